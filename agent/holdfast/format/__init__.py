"""A checkpoint as bytes: the manifest, the shards of each rank, and the arithmetic of resharding.

Entry point: `manifest.Manifest`. No files, no state of training. May import `errors` and `protocol`.
"""
