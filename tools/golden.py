"""Make the files under tests/golden: checkpoints, the database of a server, and a captured conversation.

The tests in tests/unit/compatibility read them with today's code: what a release has written stays readable.
Before the first release, run this again whenever the format, the tables or the messages change. Files that a
release has written stay as they are: a later format gets separate files next to them.

    python -m tools.golden
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import gzip
import json
import platform
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch.distributed as dist
import torch.multiprocessing
from starlette.testclient import TestClient
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast.client import Client
from holdfast.save import reuse
from holdfast.server_link.http_client import AgentClient, HttpClient, HttpResponse
from holdfast_server.core.settings import ServerSettings
from holdfast_web import create_app
from tests.support import golden_server
from tests.support.accounts_server import BASE_URL
from tests.support.clock import FakeClock
from tests.support.golden_job import ITERATIONS, JOBS, GoldenJob
from tests.support.job_processes import served

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
SHARED_BYTES = 1024
"""Size from which unchanged tensors are shared here, instead of 1 MiB; the format is the same."""
HOST = "node-1"


# ---------------------------------------------------------------- checkpoints


def make_checkpoints() -> None:
    """Train each golden job in a new store; keep its newest checkpoints and what its objects held."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        kept = {name: _train(folder, name) for name in JOBS if name != "ranks"}
        torch.multiprocessing.spawn(_train_rank, (folder,), nprocs=2)
        kept["ranks"] = json.loads((folder / "rank-0.json").read_text())
        shutil.rmtree(GOLDEN / "store", ignore_errors=True)
        for name in JOBS:
            oldest = ITERATIONS - (name == "linked")
            for path in (folder / "store" / name).iterdir():
                is_old = path.name[0] == "0" and int(path.name.partition("-")[0]) < oldest
                if path.is_dir() and path.name != "spool" and not is_old:
                    shutil.copytree(path, GOLDEN / "store" / name / path.name)
        _write_json("checkpoints.json", kept)


def _train(
    folder: Path, name: str, shard: Callable[[torch.nn.Module], Any] = lambda model: model
) -> dict[str, Any]:
    shared_bytes = SHARED_BYTES if name == "linked" else reuse.MIN_SHARED_BYTES
    with (
        mock.patch.object(reuse, "MIN_SHARED_BYTES", shared_bytes),
        _on_another_host(),
    ):
        job = GoldenJob(folder / "store", name, shard).run()
        state = {"state": job.state(), "next_samples": job.next_samples()}
        job.session.close()
    return state


def _train_rank(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "meeting"), 2), world_size=2, rank=rank)
    mesh = init_device_mesh("cpu", (2,))
    state = _train(folder, "ranks", lambda model: fully_shard(model, mesh=mesh))
    (folder / f"rank-{rank}.json").write_text(json.dumps(state))
    dist.destroy_process_group()


@contextlib.contextmanager
def _on_another_host() -> Iterator[None]:
    """Keep the name of this machine out of the files."""
    names = {(socket, "gethostname"): HOST, (platform, "node"): HOST, (platform, "platform"): "Linux"}
    with contextlib.ExitStack() as patches:
        for (module, function), name in names.items():
            patches.enter_context(mock.patch.object(module, function, lambda name=name: name))
        yield


# ---------------------------------------------------------------- the database of a server


def make_database() -> None:
    """Fill the database of a new server, and keep what it answers."""
    with tempfile.TemporaryDirectory() as folder:
        path, clock = Path(folder) / "holdfast.db", FakeClock()
        with TestClient(
            create_app(ServerSettings(database=str(path), accounts=False), clock=clock), base_url=BASE_URL
        ) as client:
            golden_server.fill(client, clock)
            kept = {"now": clock.now, "responses": golden_server.responses(client)}
        _write_json("database.json", kept)
        with gzip.GzipFile(GOLDEN / "database.gz", "wb", mtime=0) as file:
            file.write(path.read_bytes())


# ---------------------------------------------------------------- a conversation


def make_conversation() -> None:
    """Let an agent and an operator talk to a server process, and keep requests and responses in their order."""
    exchanges: list[dict[str, Any]] = []
    original = HttpClient.exchange

    def exchange(
        self: HttpClient, method: str, path: str, body: Any = None, headers: Any = None, **more: Any
    ) -> Any:
        response: HttpResponse = original(self, method, path, body, headers, **more)
        sender = "AgentClient" if isinstance(self, AgentClient) else "Client"
        exchanges.append(
            {
                "client": sender, "method": method, "path": path, "headers": dict(headers or {}),
                "body": body, "status": response.status, "response": response.body,
            }
        )  # fmt: skip
        return response

    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as client, _on_another_host():
        with mock.patch.object(HttpClient, "exchange", exchange):
            _talk(Path(folder), client)
        hidden_words = [folder, str(ROOT), client.server, sys.prefix, sys.base_prefix]
        hidden = re.compile("|".join(map(re.escape, hidden_words)))
    _write_json("conversation.json", [_portable(each, hidden) for each in exchanges])


def _talk(folder: Path, client: Client) -> None:
    job = GoldenJob(folder / "store", "plain", server=client.server, owner="ada", labels={"team": "vision"})
    with client:
        steps = iter(_operate(client))
        next(steps)
        for x in job.session.batches(job.loader, epochs=None):
            job.iterate(x)
            if not next(steps, False):
                break
        job.session.close()
        for question in (client.jobs, client.fleet):
            question()
        for question in (
            client.job, client.checkpoints, client.orders, client.timeline, client.attempts, client.notices,
            client.edits, client.annotations, client.desired, client.goodput, client.forks,
        ):  # fmt: skip
            question("plain")
        client.configuration("plain", 1)


def _operate(client: Client) -> Iterator[bool]:
    """Make each request of an operator once the job has reached its iteration; yields after every iteration."""

    def known(predicate: Callable[[], bool]) -> Iterator[bool]:
        while not predicate():
            yield True

    yield True
    yield from known(
        lambda: any(row.restorable for row in client.checkpoints("plain")) if client.jobs() else False
    )
    edited = client.edit("plain", budget="2%")
    yield from known(lambda: client.applied_at("plain", edited.version) is not None)
    client.annotate("plain", "learning rate halved", iteration=1)
    checkpoint = client.restorable("plain")[0]
    client.pin("plain", checkpoint.id)
    client.label("plain", checkpoint.id, "golden")
    order = client.restore("plain", checkpoint=checkpoint.id, key="golden")
    yield from known(lambda: client.order("plain", order.id).state == "restored")


def _portable(exchange: dict[str, Any], hidden: re.Pattern[str]) -> dict[str, Any]:
    """With bodies as base64, and without the paths of this machine."""

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return hidden.sub("/srv", value)
        if isinstance(value, dict):
            return {clean(key): clean(each) for key, each in value.items()}
        return [clean(each) for each in value] if isinstance(value, list) else value

    if exchange["headers"].get("Content-Type") == "application/msgpack":
        codec = msgspec.msgpack.encode, msgspec.msgpack.decode
    else:
        codec = msgspec.json.encode, msgspec.json.decode
    encode, decode = codec
    bodies = {}
    for name in ("body", "response"):
        data = exchange[name]
        bodies[name] = base64.b64encode(encode(clean(decode(data)))).decode() if data else None
    return {**exchange, **bodies}


# ---------------------------------------------------------------- all


def _write_json(name: str, value: object) -> None:
    (GOLDEN / name).write_text(json.dumps(value, ensure_ascii=False, sort_keys=True) + "\n")


PARTS = {"checkpoints": make_checkpoints, "database": make_database, "conversation": make_conversation}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.golden", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; by default all")
    parts = parser.parse_args().parts or list(PARTS)
    if unknown := set(parts) - PARTS.keys():
        parser.error(f"unknown part {', '.join(sorted(unknown))}: use {', '.join(PARTS)}")
    GOLDEN.mkdir(exist_ok=True)
    for part in parts:
        PARTS[part]()
    size = sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file())
    print(f"{GOLDEN} has {size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
