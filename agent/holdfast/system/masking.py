"""Masks secrets before text leaves the machine, and control characters before it reaches a terminal."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from urllib.parse import quote, unquote

MASK = "<hidden>"
LEAST_SECRET_CHARACTERS = 8
"""Shorter values of secret environment variables are not searched for: they occur in ordinary text."""
_SECRETS = frozenset(
    ("auth", "authorization", "bearer", "cookie", "cookies", "cred", "credential", "credentials", "creds", "dsn",
     "jwt", "passcode", "passphrase", "passwd", "password", "passwords", "pwd", "secret", "secrets", "token",
     "webhook")
)  # fmt: skip
_KEYS = frozenset(
    ("access", "account", "anthropic", "api", "auth", "aws", "azure", "cohere", "comet", "deploy", "encryption",
     "gemini", "github", "gitlab", "google", "groq", "hf", "hmac", "kaggle", "license", "master", "mistral",
     "neptune", "openai", "private", "replicate", "rsa", "secret", "service", "session", "shared", "signing",
     "slack", "ssh", "storage", "stripe", "subscription", "tls", "wandb", "webhook")
)  # fmt: skip
"""Words that make a secret of a `key` behind them."""
_PASSES = frozenset(
    ("admin", "db", "ftp", "imap", "mail", "mysql", "pg", "proxy", "redis", "root", "smtp", "sudo", "user")
)
"""Words that make a secret of a `pass` behind them."""
_ONE_WORD = re.compile(
    r"(?:passwords?|passwd|passphrases?|secrets?|credentials?|connstr|webhookurl"
    r"|(?:access|api|app|auth|bearer|bot|gh|github|gitlab|hf|hub|id|oauth|refresh|session|slack|user|wandb)tokens?"
    rf"|(?:{'|'.join(sorted(_KEYS))})keys?|(?<![a-z])(?:{'|'.join(sorted(_PASSES))})pass)$"
)
"""Ends of names that are written as one word: `pgpassword`, `openaiapikey`, `dbpass`."""
_TOKENS = frozenset(("access", "api", "auth", "bearer", "hf", "hub", "refresh", "secret", "session"))
"""Words that make secrets of `tokens` behind them, which mostly count text."""
_TEXT_TOKENS = frozenset(
    ("additional", "audio", "begin", "bos", "class", "cls", "decoder", "dist", "each", "end", "eos", "first",
     "forced", "image", "last", "mask", "max", "next", "no", "num", "pad", "patch", "per", "pos", "prefix", "sep",
     "special", "start", "stop", "suffix", "unk", "video", "vocab")
)  # fmt: skip
"""Words that make a piece of text of a `token` behind them."""
_OF_TEXT_TOKENS = frozenset(
    ("budget", "count", "counts", "dim", "dropout", "embed", "embedding", "embeddings", "ids", "len", "length",
     "loss", "mask", "merging", "mixer", "mixing", "position", "positions", "shift", "type", "types", "weights")
)  # fmt: skip
"""Words that make a piece of text of a `token` before them."""
_PLACES = frozenset(("dir", "directory", "file", "folder", "home", "path", "sock", "socket"))
"""Last words of names that say where a secret is, or something else is."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

_SPELLED = rf"(?:passw(?:or)?ds?|passphrases?|passcode|pwd|(?:{'|'.join(sorted(_PASSES))})[_.-]?pass)"
_NAME = (
    rf"(?:token{''.join(rf'(?<!{word}[ _-]token)' for word in sorted(_TEXT_TOKENS))}|secrets?|credentials?"
    r"|(?:api|access|account|auth|encryption|private|secret|session|shared|signing|ssh"
    r"|sharedaccess|subscription)[ _-]?keys?)"
)
_AFTER = r"(?:\\{0,3}[\"']?\]?\s{0,3}(?::=|=>|[=:])|[\"'],)\s{0,3}"
_OPENS = r"(?:[a-z_][\w.]{0,40}\(|[\[({]){0,2}[bfru]?\\{0,3}"
"""What may be before the quote of a value: `SecretStr('…')`, `['…']`, `b'…'`."""
_NO_VALUE = r"(?!(?:none|null|true|false|yes|no|\*+)(?![\w-]))"
# Every repetition is limited, or can begin at one place only: a long line must not take quadratic time.
_PATTERNS = (
    (
        re.compile(
            r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----[^-]{0,20000}(?:-----END [A-Z ]{0,40}-----)?"
        ),
        MASK,
    ),
    (
        re.compile(
            r"\A\s{0,20}(?=[A-Z\d+/]{0,80}[a-z])(?=[a-z\d+/]{0,80}[A-Z])[A-Za-z\d+/]{60,80}={0,2}\s{0,20}\Z"
        ),
        MASK,
    ),
    (re.compile(r"(://[^\s:/@]{0,100}):(?!\d{1,5}/)[^\s\"'<>]{1,200}@(?=[\w\[])"), rf"\1:{MASK}@"),
    (re.compile(r"(://)(?=[^\s:/@]{0,200}\d)[\w.~+-]{12,200}@(?=[\w\[])"), rf"\1{MASK}@"),
    (
        re.compile(r"(hooks\.slack\.com/|discord(?:app)?\.com/api/webhooks/|webhook\.office\.com/)[\w/@+.-]{10,}"),
        rf"\1{MASK}",
    ),
    (re.compile(r"(/bot\d{6,12}:)[\w-]{20,}"), rf"\1{MASK}"),
    (re.compile(rf"(?i)(\bauthorization{_AFTER}[\"']?digest\s{{1,3}})[^\r\n]{{6,}}"), rf"\1{MASK}"),
    (
        re.compile(rf"(?i)(\bauthorization{_AFTER}[\"']?)(?:([a-z][\w-]{{0,20}})\s{{1,3}})?[^\s\"',;]{{6,}}"),
        rf"\1\2 {MASK}",
    ),
    (
        re.compile(r"(?i)\b((?:set-)?cookie[\"']?\s{0,3}[=:]\s{0,3}[\"']?)(?=[^\s=;]{1,100}=)[^\"'\r\n]{4,}"),
        rf"\1{MASK}",
    ),
    (
        re.compile(r"\b((?i:bearer|basic))\s{1,3}(?=[\w.~+/-]{0,200}(?:[a-z][A-Z]|\d|=))[\w.~+/=-]{8,}"),
        rf"\1 {MASK}",
    ),
    (
        re.compile(
            r"\b(?:sk-|gh[oprsu]_|github_pat_|glpat-|glsa_|xox[abeoprs]-|xapp-|npm_|pypi-|[rs]k_(?:live|test)_|dop_v1_"
            r"|dckr_pat_|lsv2_[ps][kt]_|nvapi-|tskey-|shpat_|whsec_|ATATT3|ya29\.|hv[sb]\.|AGE-SECRET-KEY-1)[\w-]{10,}"
            r"|\b(?:gsk_|pplx-|r8_|xai-)(?=[\w-]{0,60}\d)[\w-]{20,}|\bdapi[0-9a-f]{32}\b"
            r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w-]{30,}|\bSG\.[\w-]{10,100}\.[\w-]{10,}"
            r"|\bhfl?_(?:[A-Za-z0-9]{30,}|[\w-]{0,40}\d[\w-]{16,})"
        ),
        MASK,
    ),
    (re.compile(r"(?<![\w-])eyJ[\w-]{10,4000}\.[\w-]{10,}\.[\w-]+"), MASK),
    (
        re.compile(r"(?i)\b(x-(?:amz|goog)-(?:signature|credential|security-token)=|sig=)[^\s;&\"']{10,}"),
        rf"\1{MASK}",
    ),
    (re.compile(rf"(?i)((?:{_NAME}|{_SPELLED}){_AFTER}{_OPENS}([\"']))(?!\2)[^\r\n]{{1,200}}?\2"), rf"\1{MASK}\2"),
    (re.compile(r"(?i)(\bidentified by\s{1,3}([\"']))(?!\2)[^\r\n]{1,200}?\2"), rf"\1{MASK}\2"),
    (
        re.compile(
            r"(?i)(\blogin\s{1,3}\S{1,100}\s{1,3}password\s{1,3}|\bsshpass\s{1,3}-p\s{0,3}"
            r"|\bapi[ _-]key provided:\s{1,3}"
            r"|\s(?:-u|--(?:proxy-)?user)[ =][\"']?[^\s:\"']{1,100}:(?!\d{1,10}(?:\s|$)))[^\s\"']{4,}"
        ),
        rf"\1{MASK}",
    ),
    (
        re.compile(
            rf"(?i)({_SPELLED}{_AFTER}[\"']?|(?<!-)--[\w-]{{0,40}}{_SPELLED}\s{{1,3}}){_NO_VALUE}[^\s\"',;&<]{{4,}}"
        ),
        rf"\1{MASK}",
    ),
    # a number, as in "seconds per token: 0.004213", is no secret
    (
        re.compile(
            rf"(?i)({_NAME}{_AFTER}[\"']?|(?<!-)--[\w-]{{0,40}}{_NAME}\s{{1,3}})"
            rf"(?![\d.,+-]{{1,40}}(?:\s|$)){_NO_VALUE}[^\s\"',;&<]{{6,}}"
        ),
        rf"\1{MASK}",
    ),
)


_LIST = re.compile(
    rf"(?i)((?:{_SPELLED}|(?:access|api|auth)[ _-]?tokens|{_NAME}|cookies){_AFTER})"
    r"[\[({](?=\s{0,3}[bru]?[\"'])[^\])}]{1,2000}"
)
_NAMED_VALUE = re.compile(
    rf"(?<![\w.-])(-{{0,2}}[A-Za-z_][\w.-]{{0,60}})({_AFTER}(?i:{_OPENS})[\"']?)"
    r"(?![\d.,+-]{1,40}(?:[\s\"',;&<)\]]|$))(?=[^\s\"',;&<]{0,200}\d)([^\s\"',;&<]{6,})"
)
"""A name and its value, in which a digit is: words are mostly ordinary text."""
_URL_PASSWORD = re.compile(r"://[^\s:/@]{0,100}:([^\s/@]{1,200})@")


def is_secret(name: str, value: str = "") -> bool:
    """Return whether a name is that of a secret: `api_key`, `hub.token`, `PGPASSWORD`, but not `max_tokens`.

    Args:
        value: a number is no secret under a name that can also be that of a count, such as `tokens`.
    """
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in _PLACES or name in ("PWD", "OLDPWD"):
        return False
    if words == ["pass"] and name.isalpha():
        return True
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        if word == "token" and (before in _TEXT_TOKENS or after in _OF_TEXT_TOKENS):
            continue
        if (
            word in _SECRETS
            or (word in ("key", "keys") and before in _KEYS)
            or (word in ("pass", "pw") and before in _PASSES)
            or (word == "pat" and before in ("azure", "devops", "gh", "github", "gitlab"))
        ):
            return True
        if word == "tokens" and (before in _TOKENS or words == ["tokens"]) and not _is_number(value):
            return True
        if word == "string" and before in ("conn", "connection"):
            return True
        if _ONE_WORD.search(word) or (before == "keys" and word in _KEYS):
            return True
    return False


def _is_number(value: str) -> bool:
    with contextlib.suppress(ValueError):
        float(value)
        return True
    return False


def mask_text(text: str) -> str:
    """Mask what looks like a secret, and the values of secret environment variables."""
    for secret in _secrets_of_environment():
        text = text.replace(secret, MASK)
    text = _LIST.sub(rf"\1[{MASK}", text)
    for pattern, masked in _PATTERNS:
        text = pattern.sub(masked, text)
    return _NAMED_VALUE.sub(_masked_value, text)


def _masked_value(found: re.Match[str]) -> str:
    name, between, value = found.groups()
    return f"{name}{between}{MASK}" if is_secret(name, value) else found[0]


def mask_command(words: Iterable[str]) -> str:
    """Return a command line with the values of secret options masked."""
    return shlex.join(_masked_words(words)).replace(f"'{MASK}'", MASK)


def _masked_words(words: Iterable[str]) -> Iterator[str]:
    is_value = takes_more = False
    for word in words:
        name, equals, value = word.partition("=")
        if is_value and not word.startswith("--") and not (word.startswith("-") and len(word) == 2):
            yield MASK
            is_value = takes_more
        elif equals and is_secret(name, value):
            yield f"{name}={MASK if value else ''}"
        else:
            is_value = word.startswith("-") and is_secret(word)
            takes_more = is_value and word.endswith("s")
            yield mask_text(word)


@functools.cache
def _secrets_of_environment() -> tuple[str, ...]:
    """Return the values of secret variables, each line of them, passwords in URLs, and how a URL has them."""
    values = [value for name, value in os.environ.items() if is_secret(name, value) and not _is_place(value)]
    passwords = (unquote(found) for value in os.environ.values() for found in _URL_PASSWORD.findall(value))
    values += [each for each in passwords if not each.isalpha()]  # "postgres" occurs in ordinary text
    lines = {line.strip() for value in values for line in (value, *value.splitlines())}
    found = {
        form for line in lines if len(line) >= LEAST_SECRET_CHARACTERS for form in (line, quote(line, safe=""))
    }
    # longest first: one may be a part of another
    return tuple(sorted(found, key=len, reverse=True))


def _is_place(value: str) -> bool:
    """Return whether the value of a variable says where the secret is."""
    return value.startswith("/") and os.path.exists(value)


def escaped(text: str) -> str:
    """Escape control characters, line ends and marks that reorder text: a terminal would act on them."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
