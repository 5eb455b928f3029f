"""What agents and browsers say of themselves is shown as text: it is never a part of a page."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import product

import pytest
from sqlalchemy import String, bindparam, delete, func, select, update

from holdfast.protocol.ids import checkpoint_id
from holdfast.protocol.wire import (
    AttemptFinished,
    AttemptStarted,
    Checkpoint,
    IntervalDecision,
    Notice,
    Samples,
)
from holdfast_server import models
from holdfast_server.accounts import sign_ins
from holdfast_server.http.auth_middleware import COOKIE
from holdfast_server.records import audit
from tests.support.accounts_server import AccountsServer
from tests.support.endpoint_table import ENDPOINTS

pytestmark = pytest.mark.usefixtures("no_background_jobs")

BREAKING_OUT = [
    "",
    '"',
    "'",
    '">',
    "'>",
    "</td>",
    "</title>",
    "</textarea>",
    "</script>",
    "-->",
    "]]>",
    "</select>",
    "{{",
    "\\",
]
ACTING = [
    "<script>alert({n})</script>",
    "<img src=x onerror=alert({n})>",
    "<svg onload=alert({n})>",
    "<a href=javascript:alert({n})>x</a>",
    "<div hx-get=/settings hx-trigger=load>{n}</div>",
    "<div hx-on:load=alert({n})>",
    "<iframe srcdoc='<b>{n}'>",
    "<form action=//evil.example/{n}><button>",
    "<base href=//evil.example/{n}>",
    "<meta http-equiv=refresh content=0;url=//evil/{n}>",
    "x onmouseover=alert({n}) x=",
    "<hx-partial hx-target=#head>{n}</hx-partial>",
    "<style>*{{display:none}}/*{n}*/</style>",
    "7*7}}}}{{% set x={n} %}}",
    "javascript:alert({n})",
]
PAYLOADS = [
    before + act.format(n=1000 + number) for number, (before, act) in enumerate(product(BREAKING_OUT, ACTING))
]
"""Each with a number of its own, by which it is found again."""
PLAIN = "plain words"
POINT = checkpoint_id(4, 1)

FREE = {
    "alert_channels": {"name", "target", "owner", "created_by"},
    "alert_deliveries": {"error"},
    "alert_notes": {"who", "text"},
    "alert_rules": {"changed_by", "jobs"},
    "alerts": {"acknowledged_by", "message", "resolved_why", "silenced_by", "subject"},
    "attempts": {"finished", "host", "previous_exit", "restore_reason", "resumed_from"},
    "audit": {"action", "after", "before", "who"},
    "checkpoints": {"label", "pinned_by", "reason"},
    "notices": {"code", "message"},
    "order_transitions": {"reason", "who"},
    "orders": {"key", "reason", "who"},
    "settings_versions": {"who"},
    "sign_ins": {"address", "browser"},
    "tokens": {"created_by", "name"},
}
"""Words that somebody chooses, some within limits that are forgotten here, and that are kept as they are."""
OURS = {
    "name", "job", "project", "person", "kind", "state", "level", "lane", "event", "scopes", "severity", "role",
    "least_severity", "rule", "prefix", "id", "channel", "parent", "checkpoint", "safety_checkpoint", "order_id",
    "password", "secret", "issuer", "subject", "nonce", "verifier", "then", "request_id", "uid", "policy",
    "pins", "retention", "restore_mode", "from_job", "from_checkpoint", "from_digest",
}  # fmt: skip
"""Names of columns that hold what is no word, is one of ours or has a checked form, or is on no page."""

PAGES = sorted(
    path
    for method, path in ENDPOINTS.access
    if method == "GET"
    and not path.startswith(("/api", "/static", "/login/provider", "/openapi"))
    and not path.endswith(("/stream", "/style.css", "/export", "z", "/metrics"))
)


HOSTILE = ("javascript:", "//", "data:")
ADDRESSES = ("href", "src", "action", "hx-get", "hx-post")

OF_ALL_JOBS = ("/alerts", "/alerts/live", "/fleet/live", "/report")
"""They grow with every job that a test has: on them is nothing that acts."""


class Skeleton(HTMLParser):
    """The tags of a page and the names of their attributes: what no value may change. Words may have `wbr`."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "wbr":
            self.tags.append((tag, tuple(sorted(name for name, _ in attrs))))
        self.addresses += [
            value or "" for name, value in attrs if name in ("href", "src", "action", "hx-get", "hx-post")
        ]


def acting(page: Skeleton) -> list[tuple[str, tuple[str, ...]]]:
    """Tags of a kind that our pages have none of, and that do something by themselves."""
    return [
        (tag, names)
        for tag, names in page.tags
        if tag in ("iframe", "base", "style", "img")
        or (tag == "script" and "src" not in names)
        or any(name.startswith(("on", "hx-on", "srcdoc", "http-equiv")) for name in names)
    ]


@pytest.fixture
def database_kind():
    return "sqlite"  # what is stored is the same on both, and this is about pages


class Site:
    def __init__(self, stage: AccountsServer) -> None:
        self.stage = stage
        stage.person("root", admin=True)
        self.key = stage.key("report", project="default")

        def rows(session):
            session.add(models.AlertChannelRecord(
                id="c1", project="default", name="", kind="webhook", target="", secret="", created_by="",
                least_severity="info", created_at=1.0,
            ))  # fmt: skip
            session.flush()
            session.add(models.AlertDeliveryRecord(
                channel="c1", event="test", payload=b"", state="failed", tries=1, created_at=1.0, next_at=1.0,
                ended_at=1.0, error="",
            ))  # fmt: skip
            session.add(models.AlertRuleRecord(
                project="default", name="ours", kind="silent", severity="info", limit_value=60.0, for_seconds=0.0,
                jobs="", changed_at=1.0, changed_by="",
            ))  # fmt: skip

        stage.write(rows)

    def say(self, job: str, said: str) -> None:
        """Whatever has a place in the database for somebody's words says `said`."""
        at = self.stage.clock()
        known = {
            "project": "default", "job": job, "rule": "silent", "kind": "silent", "severity": "critical",
            "message": "", "since": at, "fired_at": at,
        }  # fmt: skip

        def rows(session):
            session.add_all([
                models.SettingsVersionRecord(job=job, version=1, who="", at=at, changes="[]"),
                models.RestoreOrderRecord(
                    id=f"order-{job}", job=job, key="", checkpoint=POINT, iteration=4, state="failed", who="",
                    created_at=at, fence=1, from_iteration=4, from_lineage=1, reason="",
                ),
                models.AlertRecord(**known, acknowledged_at=at, acknowledged_by="",
                                   silenced_until=2e9, silenced_by=""),
                models.AlertRecord(**known, resolved_at=at, resolved_why=""),
            ])  # fmt: skip
            session.flush()
            session.add(
                models.AlertNoteRecord(alert=_alert_of(session, job), at=at, who="", kind="comment", text="")
            )
            session.add(
                models.OrderTransitionRecord(order_id=f"order-{job}", state="failed", at=at, who="", reason="")
            )
            session.flush()
            for table, names in FREE.items():
                if table in ("audit", "sign_ins"):
                    continue  # which are written as they are in `job` and `browser`
                rows = models.Base.metadata.tables[table]
                change = update(rows).values({name: bindparam(f"_{name}") for name in names})
                if "job" in rows.c and table != "tokens":
                    change = change.where(rows.c.job == job)
                session.execute(change, {f"_{name}": said for name in names})

        self.stage.write(rows)

    def job(self, make_agent, name: str, said: str) -> None:
        """A job of whose agent every word that it may choose is `said`."""

        class AuthorizedClient:
            def post(_, url, **named):  # noqa: N805 - it closes over the site
                named["headers"] |= {"Authorization": f"Bearer {self.key}"}
                return self.stage.client.post(url, **named)

        agent = make_agent(AuthorizedClient(), job=name)
        started = {"at": agent.at, "iteration": 0, "lineage": 1}
        agent.say(AttemptStarted(host=said, previous_exit=said, versions={said: said}, **started))
        agent.train(4)
        agent.say(samples=Samples(iteration=[4], metrics={said: [1.0], f"{said} again": [2.0]}))
        common = {"at": agent.at, "iteration": 4, "lineage": 1}
        agent.say(
            Notice(level="warning", code=said, message=said, **common),
            IntervalDecision(policy=said, interval=2, budget=0.03, predicted_overhead=None, measured_overhead=0.01,
                  reason=said, profile={said: 1.0}, **common),
            Checkpoint(id=POINT, kind="scheduled", state="failed", reason=said, **common),
        )  # fmt: skip
        agent.say(AttemptFinished(reason=said, **common))

        def log(session):
            audit.record(
                session, who=said, action=said, now=1.0, job=name, project="default", before={said: said},
                after={"list": [said]},
            )  # fmt: skip

        self.stage.write(log)
        self.say(name, said)

    def browser(self, says: str) -> dict[str, str]:
        visitor = sign_ins.Visitor(address=says, browser=says)
        secret = sign_ins.begin(self.stage.db, "root", visitor, by=says, now=self.stage.clock())
        return {"Cookie": f"{COOKIE}={secret}"}

    def pages(self, job: str, browser: dict[str, str], asked: str) -> dict[str, tuple[str, int]]:
        """By template of their address, every page there is, for one job; `asked` is what its address asks for."""
        found = {}
        with self.stage.db.read() as session:
            alert = str(_alert_of(session, job))
        known = {
            "job": job, "project": "default", "checkpoint": POINT, "order": f"order-{job}", "alert": alert,
        }  # fmt: skip
        for template in PAGES:
            path = re.sub(r"{(\w+)}", lambda name: known.get(name[1], "x"), template)
            query = {"job": job, "who": asked, "next": asked, "budget": asked, "code": asked}
            if template == "/":
                query |= {"search": job}
            reply = self.stage.client.get(path, params=query, headers=browser | {"Accept": "text/html"})
            assert reply.status_code < 500, (template, reply.status_code)
            found[template] = (reply.text, reply.status_code)
        return found


def _alert_of(session, job: str) -> int:
    return session.scalar(select(func.min(models.AlertRecord.id)).where(models.AlertRecord.job == job))


def judged(site: Site, make_agent, payloads) -> list[tuple[str, str]]:
    """(page, payload) wherever a page is another one than with plain words in it."""
    site.job(make_agent, "job-plain", PLAIN)
    plain = site.pages("job-plain", site.browser(PLAIN), PLAIN)
    assert len(plain) > 25
    wrong, seen = [], 0
    for number, payload in enumerate(payloads):
        job = f"job-p{number:04d}"
        site.job(make_agent, job, payload)
        _forget_browsers(site.stage)
        for template, (page, status) in site.pages(job, site.browser(payload), payload).items():
            told, meant = Skeleton(page), Skeleton(plain[template][0])
            seen += payload[-12:] in page or status != 200 or "&lt;" in page or "&#39;" in page or "&#34;" in page
            hostile = [
                one for one in told.addresses if one.strip().lower().startswith(("javascript:", "//", "data:"))
            ]
            other = acting(told) if template in OF_ALL_JOBS else told.tags != meant.tags
            if other or status != plain[template][1] or hostile:
                wrong.append((template, payload))
    assert seen > len(payloads), "the words are on no page: this shows nothing"
    return wrong


def _forget_browsers(stage: AccountsServer) -> None:
    def work(session):
        session.execute(delete(models.SignInRecord))

    stage.db.write(work)


def test_every_column_that_holds_words_is_one_of_these():
    unknown = [
        (table.name, column.name)
        for table in models.Base.metadata.sorted_tables
        for column in table.columns
        if isinstance(column.type, String) and column.name not in FREE.get(table.name, set()) | OURS
    ]
    assert unknown == [], "say whether somebody chooses what is in it: then no page may take it for markup"


def test_a_few_payloads_change_no_page(stage: AccountsServer, fresh_agent):
    wrong = judged(Site(stage), fresh_agent, PAYLOADS[::52])
    assert {template for template, _ in wrong} == set(), wrong


@pytest.mark.long
@pytest.mark.parametrize("part", range(3))
def test_no_payload_changes_any_page(stage: AccountsServer, fresh_agent, part):
    assert len(PAYLOADS) >= 200
    site = Site(stage)
    assert judged(site, fresh_agent, PAYLOADS[part::3]) == []
    words = sum(map(len, FREE.values()))
    print(f"\n{len(PAYLOADS[part::3])} payloads in {words} columns and all that agents say, on {len(PAGES)} pages")


def test_a_page_that_says_them_as_they_are_would_be_noticed():
    page = "<table><tr><td>{}</td></tr></table>"
    plain = Skeleton(page.format(PLAIN)).tags
    noticed = [payload for payload in PAYLOADS if Skeleton(page.format(payload)).tags != plain]
    assert len(noticed) > len(PAYLOADS) / 2


TRAVERSALS = ["../../etc/passwd", "..%2f..%2fetc%2fpasswd", "..%252f..%252fetc/passwd", "....//....//etc/passwd",
              "..\\..\\etc\\passwd", "%2e%2e/%2e%2e/etc/passwd", "..%c0%af..%c0%afetc/passwd", "/etc/passwd",
              "..%00/etc/passwd", "static/../../server/holdfast_server/app.py"]  # fmt: skip


@pytest.mark.parametrize("prefix", ["/static/", "/jobs/", "/api/v1/jobs/", "/audit/", "/settings/projects/"])
def test_no_address_leads_to_a_file(stage: AccountsServer, prefix):
    site = Site(stage)
    for traversal in TRAVERSALS:
        reply = stage.client.get(prefix + traversal, headers=site.browser("x"))
        assert reply.status_code in (404, 405, 422), traversal
        assert "root:" not in reply.text
        assert "create_app" not in reply.text
