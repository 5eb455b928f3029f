"""Copies of large objects within an S3-compatible server, by parts: one request copies at most 5 GB.

obstore has no such request, so it is signed here (AWS Signature Version 4), with the keys of the environment.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import ssl
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

COPIED_PART_BYTES = 1 << 30
MOST_PARTS = 10_000
_UPLOAD_ID = re.compile(r"<UploadId>([^<]+)</UploadId>")
_ETAG = re.compile(r"<ETag>([^<]+)</ETag>")


@dataclass(frozen=True, slots=True)
class S3Requests:
    """Signed requests to a bucket."""

    url: str
    """Address of the bucket."""
    region: str
    tls: ssl.SSLContext | None
    timeout_seconds: float
    environment: Mapping[str, str]

    @property
    def has_keys(self) -> bool:
        return all(self.environment.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))

    def send(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> str:
        """Return the body of the response. OSError: the server refuses it, or does not answer."""
        address = f"{self.url}/{urllib.parse.quote(key)}"
        text = "&".join(f"{name}={urllib.parse.quote(value, safe='')}" for name, value in sorted(query.items()))
        signed = {"content-type": "application/xml"}  # urllib would add another one
        signed |= headers or {}
        signed |= self._signature(method, address, text, body, signed)
        request = urllib.request.Request(f"{address}?{text}", body or None, signed, method=method)  # noqa: S310
        with urllib.request.urlopen(request, timeout=self.timeout_seconds, context=self.tls) as response:  # noqa: S310
            found: str = response.read().decode()
        if "<Error>" in found:  # with the status 200, since the copy took longer than the server waits
            raise OSError(f"{method} {address}: {found}")
        return found

    def _signature(
        self, method: str, address: str, query: str, body: bytes, headers: Mapping[str, str]
    ) -> dict[str, str]:
        parts, now = urllib.parse.urlsplit(address), time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        digest, scope = hashlib.sha256(body).hexdigest(), f"{now[:8]}/{self.region}/s3/aws4_request"
        added = {"x-amz-content-sha256": digest, "x-amz-date": now}
        if token := self.environment.get("AWS_SESSION_TOKEN"):
            added["x-amz-security-token"] = token
        signed = dict(sorted({"host": parts.netloc, **headers, **added}.items()))
        lines = "".join(f"{name}:{value}\n" for name, value in signed.items())
        canonical = "\n".join([method, parts.path, query, lines, ";".join(signed), digest])
        key = f"AWS4{self.environment['AWS_SECRET_ACCESS_KEY']}".encode()
        for each in scope.split("/"):
            key = hmac.digest(key, each.encode(), "sha256")
        hashed = hashlib.sha256(canonical.encode()).hexdigest()
        text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashed}"
        signature = hmac.new(key, text.encode(), "sha256").hexdigest()
        credential = f"{self.environment['AWS_ACCESS_KEY_ID']}/{scope}"
        added["Authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={';'.join(signed)}, Signature={signature}"
        )
        return added


def copy_by_parts(
    requests: S3Requests, source: str, target: str, size_bytes: int, part_bytes: int = COPIED_PART_BYTES
) -> None:
    """Copy an object, given the keys of both in the bucket.

    OSError: the server cannot do it; no part is left behind unless it does not answer.
    """
    part_bytes = max(part_bytes, -(-size_bytes // MOST_PARTS))
    upload = _found(_UPLOAD_ID, requests.send("POST", target, {"uploads": ""}))
    bucket = urllib.parse.urlsplit(requests.url).path.strip("/")
    copied = {"x-amz-copy-source": urllib.parse.quote(f"/{bucket}/{source}")}
    try:
        parts = []
        for number, start in enumerate(range(0, size_bytes, part_bytes), 1):
            end = min(start + part_bytes, size_bytes) - 1
            query = {"partNumber": str(number), "uploadId": upload}
            headers = copied | {"x-amz-copy-source-range": f"bytes={start}-{end}"}
            found = requests.send("PUT", target, query, headers=headers)
            parts.append(f"<Part><PartNumber>{number}</PartNumber><ETag>{_found(_ETAG, found)}</ETag></Part>")
        body = f"<CompleteMultipartUpload>{''.join(parts)}</CompleteMultipartUpload>".encode()
        requests.send("POST", target, {"uploadId": upload}, body)
    except BaseException:  # also on Ctrl-C
        requests.send("DELETE", target, {"uploadId": upload})
        raise


def _found(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    if match is None:
        raise OSError(f"the server answers {text[:200]!r}")
    return match[1]
