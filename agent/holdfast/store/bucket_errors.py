"""What goes wrong with a bucket, each as one sentence that names the server, the bucket and the way out."""

from __future__ import annotations

import errno
import re

NO_CREDENTIALS = (
    "no credentials for bucket {bucket} at {server}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
    "(or AWS_SKIP_SIGNATURE=true for a server that asks for none)"
)
_SIGNATURE = (
    "{server} does not accept the signature for bucket {bucket}: check AWS_SECRET_ACCESS_KEY, then AWS_REGION "
    "and this machine's clock"
)
_EXPIRED = "{server} does not accept the session token any more: renew AWS_SESSION_TOKEN and its keys"
_DENIED = (
    "{server} denies access to bucket {bucket}: these credentials must be allowed to list it, and to get, put "
    "and delete objects"
)
_NO_BUCKET = "{server} has no bucket {bucket}: create it, or correct the store's address"
_ELSEWHERE = "bucket {bucket} is in another region than {server}: set AWS_REGION"
_FULL = "{server} has no room left in bucket {bucket}: free some, or raise its quota"
_BUSY = "{server} answers {answer} for bucket {bucket}: it is overloaded, full or broken"
_FORGOTTEN = "{server} has forgotten the upload to bucket {bucket} half-way"
_OTHER = "{server} and bucket {bucket}: {reason}"
_ODD = "{server} answers {answer} for bucket {bucket}"

_BY_CODE = {
    "NoSuchBucket": (errno.ENOENT, _NO_BUCKET),
    "InvalidAccessKeyId": (errno.EACCES, "{server} does not know the access key: check AWS_ACCESS_KEY_ID"),
    "SignatureDoesNotMatch": (errno.EACCES, _SIGNATURE),
    "RequestTimeTooSkewed": (errno.EACCES, _SIGNATURE),
    "ExpiredToken": (errno.EACCES, _EXPIRED),
    "InvalidToken": (errno.EACCES, _EXPIRED),
    "AuthorizationHeaderMalformed": (errno.EINVAL, _ELSEWHERE),
    "PermanentRedirect": (errno.EINVAL, _ELSEWHERE),
    "QuotaExceeded": (errno.ENOSPC, _FULL),
    "XMinioStorageFull": (errno.ENOSPC, _FULL),
}
_BY_STATUS = {
    "301": (errno.EINVAL, _ELSEWHERE),
    "401": (errno.EACCES, _DENIED),
    "403": (errno.EACCES, _DENIED),
    "501": (errno.ENOTSUP, "{server} does not know a kind of request that Holdfast makes"),
    "507": (errno.ENOSPC, _FULL),
}
_BY_TEXT = (
    (re.compile(r"//169\.254\.|//\[?fd00:ec2|//sts\."), errno.EACCES, NO_CREDENTIALS),
    (re.compile("no space left|disk full|ENOSPC", re.IGNORECASE), errno.ENOSPC, _FULL),
)
_UNANSWERED = (
    ("dns error", errno.EHOSTUNREACH, "{server} is not known by that name: check AWS_ENDPOINT_URL"),
    ("ConnectionRefused", errno.ECONNREFUSED, "{server} refuses connections: is it running, and on that port?"),
    ("InvalidContentType", errno.EPROTO, "{server} does not speak TLS: should its address begin with http://?"),
    ("ertificate", errno.EPROTO, "{server} has a certificate that is not trusted here: see AWS_CA_BUNDLE"),
    ("TimedOut", errno.ETIMEDOUT, "{server} did not answer in time"),
    ("Timeout", errno.ETIMEDOUT, "{server} did not answer in time"),
)
_CODE = re.compile(r"<Code>\s*(\w+)\s*</Code>")
_STATUS = re.compile(r"non-2xx status code: (\d+)")


class Unanswered(OSError):
    """No answer, or none to rely on: what was asked for may have been done, may yet be done, or never."""


class NoSuchObject(FileNotFoundError):
    """The bucket is there, the object is not."""


class Place:
    """A prefix in a bucket at a server, as people know them."""

    def __init__(self, bucket: str, prefix: str, server: str) -> None:
        self.bucket, self.prefix, self.server = bucket, prefix, server
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")

    def error(self, number: int, sentence: str, kind: type[OSError] = OSError, **more: str) -> OSError:
        return kind(number, sentence.format(bucket=self.bucket, server=self.server, **more), self.url)

    def explain(self, error: BaseException) -> OSError:
        """What obstore raised, as an OSError of the kind that it is."""
        from obstore.exceptions import NotSupportedError

        text = str(error)
        status = _first(_STATUS, text)
        if isinstance(error, NotSupportedError):
            status = "501"
        if isinstance(error, FileNotFoundError):
            status = "404"
        if status:
            return self.answered(status, text)
        return self.unanswered(text) if "HTTP error" in text else self.error(errno.EIO, _OTHER, reason=_last(text))

    def answered(self, status: str, text: str) -> OSError:
        """The server's refusal: an HTTP status, and the document that came with it."""
        code = _first(_CODE, text)
        if code in _BY_CODE:
            return self.error(*_BY_CODE[code])
        for pattern, number, sentence in _BY_TEXT:
            if pattern.search(text):
                return self.error(number, sentence)
        if status in _BY_STATUS:
            return self.error(*_BY_STATUS[status])
        if code == "NoSuchUpload":
            return self.error(errno.EIO, _FORGOTTEN, Unanswered)
        if status == "404":
            return self.error(errno.ENOENT, "{server} has no such object in bucket {bucket}", NoSuchObject)
        if status.startswith("5") or code == "SlowDown":
            return self.error(errno.EAGAIN, _BUSY, Unanswered, answer=f"{status} {code}".strip())
        return self.error(errno.EIO, _ODD, answer=f"{status} {code}".strip())

    def unanswered(self, text: str) -> OSError:
        for mark, number, sentence in _UNANSWERED:
            if mark in text:
                return self.error(number, sentence, Unanswered)
        return self.error(errno.EIO, _OTHER, Unanswered, reason=_last(text))


def _last(text: str) -> str:
    """The reason at the end of the first line."""
    return text.partition("\n")[0].rpartition(" - ")[2]


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""
