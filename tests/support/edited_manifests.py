"""Manifests that a test has edited, with matching digests."""

import json

from holdfast.format import manifest as fmt


def sealed(fields):
    """A manifest of these fields."""
    body = json.dumps(fields).encode()[:-1]
    return body + fmt.DIGEST_ENTRY % fmt.digest(body).encode()


def fields_of(data):
    """What a manifest says, but for its own digest."""
    fields = json.loads(data)
    del fields["manifest_digest"]
    return fields


def reseal(path, change):
    """Change the fields of a manifest on disk."""
    fields = fields_of(path.read_bytes())
    change(fields)
    path.write_bytes(sealed(fields))
