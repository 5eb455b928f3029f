"""Views of the account."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar
from urllib.parse import urlencode

from holdfast.protocol.account import (
    CAUSE_DEFINITIONS,
    IDLE_RULE,
    SAVED_RULE,
    Account,
    AccountKey,
    AccountWindow,
    LossCause,
)
from holdfast_server.queries.account import KEYS, AccountQuery
from holdfast_web.shared.render import View

WINDOWS: dict[AccountWindow, str] = {"24h": "Last 24 h", "7d": "Last 7 days", "30d": "Last 30 days"}
ROWS_SHOWN = 50
"""Rows of the table before the rest is folded."""


@dataclass(frozen=True, slots=True)
class CausePart:
    """A part of the bar of GPU-hours, in percent of the whole."""

    name: LossCause | str
    gpu_hours: float
    share: float
    begin: float
    length: float


@dataclass(frozen=True, kw_only=True)
class AccountStrip(View):
    """The most telling figures in one line, for the fleet page."""

    template: ClassVar[str] = "account/strip.html"
    account: Account
    link: str
    """Address of the page with the same filter, as far as it has it."""


@dataclass(frozen=True, kw_only=True)
class AccountPage(View):
    template: ClassVar[str] = "account/account.html"
    account: Account
    asked: AccountQuery
    bar: list[CausePart]
    projects: Sequence[str]
    """Projects that the user may see."""
    query: str
    """The query string of the same account from the API."""
    windows: dict[AccountWindow, str] = field(default_factory=lambda: WINDOWS)
    keys: tuple[AccountKey, ...] = KEYS
    shown: int = ROWS_SHOWN
    saved_rule: str = SAVED_RULE
    idle_rule: str = IDLE_RULE
    definitions: dict[LossCause, str] = field(default_factory=lambda: CAUSE_DEFINITIONS)


def account_strip(found: Account, asked: AccountQuery) -> AccountStrip:
    query = _query(asked)
    return AccountStrip(account=found, link=f"/account?{query}" if query else "/account")


def account_page(found: Account, asked: AccountQuery, projects: Sequence[str]) -> AccountPage:
    return AccountPage(account=found, asked=asked, bar=_bar(found), projects=projects, query=_query(asked))


def _query(asked: AccountQuery) -> str:
    parameters = {
        "since": asked.window if asked.window != "24h" else None,
        "by": asked.by if asked.by != "project" else None,
        "project": asked.project, "owner": asked.owner, "label": ", ".join(asked.labels), "store": asked.store,
    }  # fmt: skip
    return urlencode({name: value for name, value in parameters.items() if value})


def _bar(found: Account) -> list[CausePart]:
    total, begin, parts = found.total, 0.0, []
    for name, hours in [("productive", total.productive_gpu_hours), *total.lost_gpu_hours.items()]:
        if hours > 0:
            share = hours / total.gpu_hours
            parts.append(CausePart(name, hours, share, begin * 100, share * 100))
            begin += share
    return parts
