"""Checkpoints in a bucket of an S3-compatible server."""

from __future__ import annotations

import re
from importlib.util import find_spec

from holdfast.store.bucket import Bucket
from holdfast.store.objects import ObjectStore
from holdfast.store.s3_connection import S3Place

SCHEME = "s3://"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")


def open_s3(url: str) -> ObjectStore:
    """Open the store at `s3://bucket/prefix`; ValueError for another address, or without obstore."""
    bucket, _, prefix = url.removeprefix(SCHEME).partition("/")
    prefix = prefix.strip("/")
    if not _BUCKET.fullmatch(bucket) or any(part in ("", ".", "..") for part in prefix.split("/") if prefix):
        raise ValueError(f"store {url!r}: give a bucket and a prefix, as in s3://my-bucket/checkpoints")
    if find_spec("obstore") is None:
        raise ValueError(
            f"store {url!r}: object stores need obstore: pip install obstore, or install Holdfast with its "
            "extra `s3`"
        )
    return ObjectStore(Bucket(S3Place(bucket, prefix)))
