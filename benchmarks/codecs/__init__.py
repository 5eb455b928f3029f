"""Sizes and costs of encoded checkpoints of real training states: `make bench-codecs`."""
