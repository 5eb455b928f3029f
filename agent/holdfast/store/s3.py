"""Checkpoints in a bucket of an S3-compatible server."""

from __future__ import annotations

from holdfast.store.objects import ObjectStore, open_bucket
from holdfast.store.s3_connection import S3Place


def open_s3(url: str) -> ObjectStore:
    """Open the store at `s3://bucket/prefix`; ValueError for another address, or without obstore."""
    return open_bucket(url, "s3", S3Place)
