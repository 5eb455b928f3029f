import json
from pathlib import Path

import msgspec

from holdfast.format.manifest_files import ManifestFile

SCHEMA = Path(__file__).resolve().parents[4] / "docs" / "manifest.schema.json"


def test_the_documented_schema_of_the_manifest_is_that_of_the_code():
    """Regenerate with: python tests/unit/agent/format/test_manifest_schema.py"""
    assert json.loads(SCHEMA.read_text()) == json.loads(json.dumps(msgspec.json.schema(ManifestFile)))


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(msgspec.json.schema(ManifestFile), indent=2) + "\n")
