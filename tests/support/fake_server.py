"""A fake server for tests of the command line: a real HTTP server with a few jobs in memory."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from msgspec import inspect
from typer.testing import Result

from holdfast.protocol.analyses import Goodput, JobPlan, RestorePreview
from holdfast.protocol.attempts import AttemptConfiguration, AttemptSummary
from holdfast.protocol.fleet import Fleet
from holdfast.protocol.ids import checkpoint_id
from holdfast.protocol.jobs import CheckpointInfo, Edit, JobSummary, NoticeInfo, Order
from holdfast.units import parse_seconds

Holdfast = Callable[..., Result]
"""The command line, as a function of its arguments."""


class FakeServer(ThreadingHTTPServer):
    """Applies edits at once and finishes a restore one step a question."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _FakeServerHandler)
        self.requests: list[tuple[str, str, Any]] = []
        self.token: str | None = None
        self.applies = True
        self.alive = True
        self.desired: dict[str, Any] = {"version": 3}
        self.conflict = False
        self.checkpoints = [checkpoint(100), checkpoint(200)]
        self.asked_for: list[list[dict[str, Any]]] = [[requested(251)]]
        """What is new among the checkpoints after a request, question by question; the last answer stays."""
        self.status = "running"
        self.status_reason = ""
        self.verdict: dict[str, str] | None = {
            "cause": "healthy",
            "level": "good",
            "text": "Healthy: newest checkpoint 4 s old",
        }
        self.output: list[str] = []
        self.order: dict[str, Any] | None = None
        self.last_order_state = "restored"
        self.order_seconds: float | None = 0.5
        self.restore_mode = "in_place"
        self.undoable: dict[str, Any] | None = None
        self.repeats = ""
        self.plan: dict[str, Any] = {"job": "gpt", "comparison": None, "why_none": "nothing is measured yet"}
        self.plain_text: bytes | None = None
        self.notices = [notice(1, "an answer of yesterday", code="data")]
        self.answers: list[list[dict[str, Any]]] = [[]]
        """What is new among the notices after a probe was asked for, question by question; the last stays."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def job(self) -> dict[str, Any]:
        version = self.desired["version"]
        return {
            "job": "gpt",
            "status": self.status if self.alive else "stopped",
            "status_reason": self.status_reason,
            "verdict": self.verdict,
            "alive": self.alive,
            "iteration": 250,
            "lineage": 1,
            "attempt": 2,
            "restarts": 1,
            "iterations_per_second": 4.0,
            "last_contact_seconds": 0.4,
            "loss": "nan",
            "measured_overhead": 0.021,
            "measured_window_iterations": 120,
            "budget": 0.035,
            "interval": 50,
            "policy": "checkfreq",
            "unsaved_iterations": 50,
            "unsaved_seconds": 12.5,
            "last_durable": self.checkpoints[-1],
            "desired": self.desired,
            "applied_version": version if self.applies else version - 1,
            "applied_iteration": 251,
            "checkpoints_total": 2,
            "open_order": self.order,
            "restore_mode": self.restore_mode,
            "restore_reason": "" if self.restore_mode == "in_place" else "it draws for itself",
        }

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        match method, path.partition("?")[0].removeprefix("/api/v1/jobs").split("/")[1:]:
            case "GET", []:
                return 200, {"jobs": [self.job()], "page": 1, "pages": 1}
            case "GET", [job, "desired"] if job != "gpt":  # a job may ask before it has reported anything
                return 200, {"version": 0}
            case _, [job, *_] if job != "gpt":
                return 404, {"error": "unknown_job", "job": job, "message": "GET /api/v1/jobs lists them"}
            case "GET", [_]:
                return 200, self.job()
            case "GET", [_, "checkpoints"]:
                return 200, {"checkpoints": self._page(parse_qs(path.partition("?")[2]))}
            case "GET", [_, "edits"]:
                return 200, {"edits": self._edits()}
            case "GET", [_, "notices"]:
                return 200, {"notices": self._notices()}
            case "GET", [_, "attempts"]:
                return 200, {"attempts": [{"attempt": 3}]}
            case "GET", [job, "attempts", attempt, "output"]:
                return 200, {"job": job, "attempt": int(attempt), "first": 0, "lines": self.output}
            case "GET", [_, "attempts", attempt, "configuration"]:
                return 200, self._configuration(int(attempt), path.partition("against=")[2])
            case "GET", [_, "plan"]:
                return 200, self.plan
            case "GET", [_, "goodput"]:
                return 200, self.goodput(path.partition("window=")[2])
            case "GET", [_, "desired"]:
                return 200, self.desired
            case "PATCH", [_, "desired"]:
                if body.get("policy") == "astrology":
                    return 422, {"error": "invalid_setting", "message": "policy 'astrology' is not one of goodput"}
                if self.conflict:
                    return 409, {"error": "conflict", "message": "ann set the budget to 1% a moment ago"}
                if isinstance(body.get("every"), str):  # a time, which the server stores in seconds
                    seconds = parse_seconds(body["every"], "every")
                    body = body | {"every": None, "interval_seconds": seconds}
                self.desired = self.desired | body | {"version": self.desired["version"] + 1}
                for counter in ("checkpoint_request", "probe_request"):
                    self.desired[counter] = int(self.desired.get(counter) or 0)
                return 200, self.desired
            case "PATCH", [_, "checkpoints", named]:
                return self._change(named, body)
            case "POST", [_, "restores"]:
                return self._order(body)
            case "POST", [_, "restores", undone, "undo"]:
                return self._order({"iteration": 200, "key": f"undo {undone}"})
            case "GET", [_, "restores"]:
                return 200, {"restores": [] if self.undoable is None else [self.undoable]}
            case "GET", [_, "restores", "preview"]:
                return 200, {"repeats": self.repeats}
            case "GET", [_, "restores", _]:
                return 200, self._moved()
        return 404, {"error": "not_found", "message": path}

    def kind_of(self, method: str, path: str) -> Any:
        """What the server answers there; None for what has no fields that must be given."""
        match method, path.partition("?")[0].removeprefix("/api/v1/jobs").split("/")[1:]:
            case "GET", []:
                return Fleet
            case "GET", [_]:
                return JobSummary
            case "GET", [_, "checkpoints" | "edits" | "notices" | "restores" as listed]:
                kinds = {"checkpoints": CheckpointInfo, "edits": Edit, "notices": NoticeInfo}
                return dict[str, list[kinds.get(listed, Order)]]  # type: ignore[misc]
            case "GET", [_, "attempts"]:
                return dict[str, list[AttemptSummary]]
            case "GET", [_, "attempts", *_]:
                return AttemptConfiguration
            case "GET", [_, "plan"]:
                return JobPlan
            case "GET", [_, "goodput"]:
                return Goodput
            case "PATCH", [_, "checkpoints", _]:
                return CheckpointInfo
            case "GET", [_, "restores", "preview"]:
                return RestorePreview
            case _, [_, "restores", *_]:
                return Order
        return None

    def _configuration(self, attempt: int, against: str) -> dict[str, Any]:
        lr = {"section": "configuration", "name": "lr", "before": "0.1", "after": "0.01"}
        return {
            "job": "gpt",
            "attempt": attempt,
            "configuration": {"lr": "0.01"},
            "environment": {"torch": "2.9"},
            "against": {"job": "gpt", "attempt": int(against)} if against else None,
            "differences": [lr] if against == "2" else [],
        }

    def _edits(self) -> list[dict[str, Any]]:
        """Newest first."""
        version = self.desired["version"]
        made = [(version, "budget 3.5 % → 2 %"), (version - 1, "interval 20 → 50")]
        return [
            {"version": number, "who": "ann", "summary": summary, "applied_iteration": 251}
            for number, summary in made
        ]

    def goodput(self, window: str) -> dict[str, Any]:
        buckets = [
            {"name": name, "seconds": seconds, "share": seconds / 200, "definition": f"what {name} is"}
            for name, seconds in (("productive", 150.0), ("lost", 50.0))
        ]
        return {
            "job": "gpt",
            "window": window,
            "wall_seconds": 200.0,
            "goodput": 0.75,
            "iterations": 150,
            "lost_iterations": 50,
            "buckets": buckets,
        }

    def _page(self, query: dict[str, list[str]]) -> list[dict[str, Any]]:
        rows = list(self.checkpoints)
        if self.desired.get("checkpoint_request"):
            rows += self.asked_for[0]
            if len(self.asked_for) > 1:
                self.asked_for.pop(0)
        newest_first = rows[::-1]
        if before := query.get("before"):
            ids = [row["id"] for row in newest_first]
            newest_first = newest_first[ids.index(before[0]) + 1 :]
        return newest_first[: int(query["limit"][0])]

    def _notices(self) -> list[dict[str, Any]]:
        rows = list(self.notices)
        if self.desired.get("probe_request"):
            rows += self.answers[0]
            if len(self.answers) > 1:
                self.answers.pop(0)
        return rows[::-1]

    def _change(self, named: str, body: Any) -> tuple[int, Any]:
        row = next((row for row in self.checkpoints if named in (row["id"], str(row["iteration"]))), None)
        if row is None:
            nearest = self.checkpoints[-1] if self.checkpoints else None
            return 404, {"error": "no_such_checkpoint", "message": "no checkpoint there", "nearest": nearest}
        if len(body.get("label") or "") > 64:
            return 422, {
                "error": "invalid_setting",
                "message": "a label has at most 64 characters",
                "field": "label",
            }
        row |= body
        if "pinned" in body:
            self.desired = self.desired | {"version": self.desired["version"] + 1}
        return 200, row

    def _order(self, body: Any) -> tuple[int, Any]:
        earlier = [row for row in self.checkpoints if row["iteration"] <= body["iteration"]]
        if not earlier or earlier[-1]["iteration"] != body["iteration"]:
            nearest = earlier[-1] if earlier else None
            return 404, {"error": "no_such_checkpoint", "message": "no checkpoint there", "nearest": nearest}
        self.order = {
            "id": "order-1",
            "job": "gpt",
            "checkpoint": earlier[-1]["id"],
            "iteration": body["iteration"],
            "state": "requested",
            "new_lineage": None,
        }
        return 201, self.order

    def _moved(self) -> dict[str, Any]:
        assert self.order is not None
        states = ["requested", "delivered", "restoring", self.last_order_state]
        following = states[min(states.index(self.order["state"]) + 1, 3)]
        self.order = self.order | {"state": following, "new_lineage": 2, "seconds": self.order_seconds}
        self.order["safety_checkpoint"] = "000000000250-1"
        self.order["reason"] = "a tensor is damaged" if following == "failed" else None
        return self.order


def _completed(kind: inspect.Type, data: Any) -> Any:
    """The same with a value for each required field that a test does not mention."""
    match kind:
        case inspect.StructType():
            given = {} if data is None else data
            return given | {
                field.encode_name: _completed(field.type, given.get(field.encode_name))
                for field in kind.fields
                if field.encode_name in given or field.required
            }
        case inspect.UnionType():
            if data is None and kind.includes_none:
                return None
            return _completed(next(each for each in kind.types if not isinstance(each, inspect.NoneType)), data)
        case inspect.ListType():
            return [_completed(kind.item_type, each) for each in data or []]
        case inspect.DictType():
            return {key: _completed(kind.value_type, each) for key, each in (data or {}).items()}
    if data is not None:
        return data
    match kind:
        case inspect.StrType():
            return "" if kind.pattern is None else checkpoint_id(0, 1)
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.BoolType():
            return False
        case inspect.NoneType():
            return None
    return 0


class _FakeServerHandler(BaseHTTPRequestHandler):
    server: FakeServer
    protocol_version = "HTTP/1.1"

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        self.server.requests.append((self.command, self.path, body))
        if self.server.token and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            status, answer = 401, {"error": "unauthorized", "message": "this token is not the right one"}
        elif self.command == "PATCH" and self.path.endswith("/desired") and not self.headers.get("If-Match"):
            status, answer = 428, {"error": "precondition_required", "message": "If-Match is missing"}
        else:
            status, answer = self.server.answer(self.command, self.path, body)
            if kind := self.server.kind_of(self.command, self.path) if status < 400 else None:
                answer = _completed(inspect.type_info(kind), answer)
        data = self.server.plain_text or json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_PATCH = _serve  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    server = FakeServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def requested(iteration: int, **changes: Any) -> dict[str, Any]:
    return checkpoint(iteration) | {"kind": "requested"} | changes


def notice(number: int, message: str, **changes: Any) -> dict[str, Any]:
    row = {"id": number, "at": 1790000000.0, "iteration": 251, "lineage": 1, "level": "info", "code": "loader"}
    return row | {"message": message} | changes


def checkpoint(iteration: int) -> dict[str, Any]:
    return {
        "id": f"{iteration:012d}-1",
        "iteration": iteration,
        "lineage": 1,
        "kind": "scheduled",
        "state": "durable",
        "at": 1790000000.0,
        "payload_bytes": 1000,
        "restorable": True,
    }
