"""Manifests made or edited by hand, with matching digests."""

import json
import re

from holdfast.checkpoint import stored_manifest
from holdfast.format import manifest as fmt
from holdfast.format import manifest_files
from holdfast.format.manifest_files import ManifestFile

MANIFEST_COPIES = stored_manifest.copies_of(fmt.MANIFEST)


def sealed(fields):
    """A manifest of these fields."""
    body = json.dumps(fields).encode()[:-1]
    return body + manifest_files.DIGEST_ENTRY % fmt.digest(body).encode()


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


def root_of(manifest):
    """The content of the manifest's first file, and the content of the others by name."""
    described = fmt.description_of(manifest)
    indexes = [_index(manifest, rank) for rank in range(manifest.world_size)]
    structure = [
        [manifest_files.structure_of(tensor) for tensor in manifest.tensors if _rank_of(tensor.file) == rank]
        for rank in range(manifest.world_size)
    ]
    if manifest.world_size == 1:
        return ManifestFile(**described, structure=structure, index=indexes[0], origin=manifest.origin), {}
    files, ranks = {}, []
    for rank, (tensors, index) in enumerate(zip(structure, indexes, strict=True)):
        data, entries = manifest_files.encode_structure(tensors), manifest_files.encode_index(index)
        part = manifest_files.part_of(data)
        files |= {manifest_files.structure_name(part, rank): data, manifest_files.index_name(rank): entries}
        ranks.append(manifest_files.rank_entry(entries, part, index.files))
    return ManifestFile(**described, ranks=ranks, origin=manifest.origin), files


def encode_manifest(manifest):
    """The manifest of one rank as it is stored."""
    root, files = root_of(manifest)
    assert not files
    return manifest_files.encode_manifest(root)


def decode_manifest(data, file=fmt.MANIFEST):
    """A manifest of one rank that was stored."""
    return manifest_files.assemble(manifest_files.decode_manifest(ManifestFile, data, file), {})


def stored_and_read(manifest):
    """A manifest as it comes back from its files."""
    root, files = root_of(manifest)
    read = manifest_files.decode_manifest(ManifestFile, manifest_files.encode_manifest(root))
    return manifest_files.assemble(read, files)


def commit_manifest(writer, manifest, **options):
    """Write all files of a manifest, with copies if there is parity, and commit."""
    root, files = root_of(manifest)
    for name, data in files.items():
        copied = stored_manifest.StoredManifest(manifest, root, files, {}).is_copied(name)
        stored_manifest.write_part(writer, name, data, copied=copied)
    stored_manifest.commit(writer, root, **options)


def _index(manifest, rank):
    files = [file for file in manifest.files if _rank_of(file.name) == rank]
    tensors = [tensor for tensor in manifest.tensors if _rank_of(tensor.file) == rank]
    state = manifest.state if rank == 0 else manifest.rank_states.get(str(rank), {})
    return manifest_files.index_of(files, tensors, state)


def _rank_of(file):
    found = re.match(r"rank-(\d+)\.", file)
    return int(found[1])
