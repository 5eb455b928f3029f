from __future__ import annotations

import asyncio
import itertools
import os
import re
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import unquote

import pytest
import uvicorn

from holdfast_server.core.settings import database_url
from holdfast_server.serve import ARENAS, _HttpProtocol
from tests.support.fork_server import PATIENCE_SECONDS
from tests.support.postgres import ON_POSTGRES, ON_SQLITE

JOB = "/api/v1/jobs/char-gpt"
SECRET = "a-shared-secret-of-some-length"
pytestmark = pytest.mark.processes


@pytest.fixture
def refused(spawn_server):
    """What a server that does not start says."""

    def said(*arguments, **environment):
        server = spawn_server(*arguments, **environment)
        assert server.wait() == 2
        assert "Traceback" not in server.output
        return server.output

    return said


def test_it_says_where_it_stores_what_it_migrated_and_where_it_is(serve, new_database):
    first = serve()
    assert f"Database: {new_database}" in unquote(first.output)
    assert "Migrated the database: 0001" in first.output
    first.stop()
    assert "Migrated the database" not in serve().output


@ON_SQLITE
def test_without_an_option_it_stores_in_the_persons_data_directory(tmp_path, serve):
    server = serve("--db", "", XDG_DATA_HOME=str(tmp_path / "data"))
    assert f"Database: {tmp_path}/data/holdfast/holdfast.db" in server.output


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.com"])
def test_other_machines_are_not_served_without_asking_who_they_are(refused, tmp_path, host):
    said = refused("--host", host, "--port", "0", "--db", str(tmp_path / "x.db"), "--no-accounts")
    assert "HOLDFAST_TOKEN" in said
    assert not (tmp_path / "x.db").exists()


def test_an_empty_secret_is_none(refused, tmp_path):
    said = refused(
        "--host", "0.0.0.0", "--port", "0", "--db", str(tmp_path / "x.db"), "--no-accounts", HOLDFAST_TOKEN=""
    )
    assert "HOLDFAST_TOKEN" in said


def test_a_port_in_use_is_said_once(refused, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused("--port", str(port), "--db", str(tmp_path / "x.db"))
    assert said.splitlines()[-1] == (
        f"holdfast serve: cannot listen on 127.0.0.1 port {port}: Address already in use. If another "
        "server uses the port, choose another one with --port"
    )


@ON_SQLITE
def test_the_first_start_beyond_loopback_prints_a_link_that_sets_it_up_once(serve):
    server = serve("--host", "0.0.0.0", "--address", "https://holdfast.example")
    link = re.search(r"at https://holdfast\.example/setup#(hfl_[0-9a-f]{64})\n", server.output)[1]
    wish = {"code": link, "name": "ada", "password": "a sentence of some words"}
    with server.client() as client:
        assert client.get("/api/v1/jobs").status_code == 401
        assert client.post("/setup", data=wish).status_code == 303
        assert client.post("/setup", data=wish | {"name": "eve"}).status_code == 422
    server.stop()
    again = serve()
    assert "/setup#" not in again.output
    with again.client() as client:
        assert client.get("/api/v1/jobs").status_code == 401, "on loopback too, once there are people"


@ON_SQLITE
def test_a_restart_replaces_the_link(serve):
    links = []
    for _ in range(2):
        server = serve("--accounts")
        links.append(re.search(r"/setup#(\S+)", server.output)[1])
        if len(links) == 1:
            server.stop()
    with server.client() as client:
        told = [client.post("/setup", data={"code": link, "name": "ada", "password": "some sentence"}).status_code
                for link in links]  # fmt: skip
    assert told == [422, 303]


@ON_SQLITE
def test_with_accounts_the_shared_secret_opens_nothing_and_is_told_so(serve):
    server = serve("--accounts", HOLDFAST_TOKEN=SECRET)
    assert "it ignores HOLDFAST_TOKEN" in server.output
    with server.client() as client:
        assert client.get("/api/v1/jobs", headers={"Authorization": f"Bearer {SECRET}"}).status_code == 401


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"HOLDFAST_OIDC_ISSUER": "https://id.example"}, "HOLDFAST_OIDC_CLIENT_ID"),
        ({"HOLDFAST_ADDRESS": "holdfast.example"}, "--address"),
    ],
)
def test_what_is_half_set_is_named(refused, tmp_path, environment, named):
    assert named in refused("--port", "0", "--db", str(tmp_path / "x.db"), **environment)


def test_a_secret_that_can_be_guessed_is_refused_where_others_can_try(refused, tmp_path):
    said = refused(
        "--host", "0.0.0.0", "--port", "0", "--db", str(tmp_path / "x.db"), HOLDFAST_TOKEN="fifteen-letters"
    )
    assert "15 characters" in said
    assert 'python -c "import secrets; print(secrets.token_urlsafe(32))"' in said
    assert "fifteen-letters" not in said


@ON_SQLITE
def test_a_short_secret_is_accepted_on_loopback_with_a_warning(serve):
    output = serve(HOLDFAST_TOKEN="short").output
    assert "warning: the token (HOLDFAST_TOKEN) has 5 characters and can be guessed: use at least 16" in output


@ON_SQLITE
def test_a_secret_of_sufficient_length_gets_no_warning(serve):
    assert "warning" not in serve(HOLDFAST_TOKEN=SECRET).output


@ON_SQLITE
def test_with_a_shared_secret_other_machines_are_served_and_asked_for_it(serve):
    server = serve("--host", "0.0.0.0", HOLDFAST_TOKEN=SECRET)
    with server.client() as client:
        assert client.get("/api/v1/jobs").status_code == 401
        headers = {"Authorization": f"Bearer {SECRET}"}
        assert client.get("/api/v1/jobs", headers=headers).status_code == 200
    assert SECRET not in server.output


@ON_SQLITE
def test_a_second_server_on_the_same_file_is_refused_and_the_first_goes_on(refused, serve, tmp_path):
    first = serve()
    said = refused("--port", "0", "--db", str(tmp_path / "holdfast.db"))
    assert f"(process {first.pid})" in said
    assert "--db" in said
    with first.client() as client:
        assert client.get("/readyz").json() == {"status": "ready"}


@ON_SQLITE
def test_it_has_room_for_more_connections_than_a_process_begins_with(serve):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 64  # this process, too, has to open some until it is back
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        server = serve()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    host, port = server.url.removeprefix("http://").split(":")
    held = [socket.create_connection((host, int(port))) for _ in range(few + 150)]
    try:
        with server.client() as client:
            assert client.get("/healthz").status_code == 200
    finally:
        for connection in held:
            connection.close()


def test_its_threads_share_two_arenas_of_the_allocator(serve):
    server = serve()
    with server.client() as client:
        assert client.get("/readyz").status_code == 200  # by then a reader and the writer have run
    assert len(arenas_of_threads(server.pid)) == ARENAS - 1  # the first one is the heap


def arenas_of_threads(pid):
    """Addresses of glibc's arenas but the first: 64 MiB at a multiple of it, of which the begin is in use."""
    size, found = 64 << 20, []
    mapped = [line.split()[:2] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    for (used, mode), (free, after) in itertools.pairwise(mapped):
        (begin, end), (after_begin, after_end) = ([int(at, 16) for at in each.split("-")] for each in (used, free))
        if (mode, after) == ("rw-p", "---p") and end == after_begin and begin % size == 0 == after_end % size:
            found.append(begin)
    return found


@ON_SQLITE
def test_the_file_is_free_again_once_the_server_was_killed(serve):
    serve().kill()
    serve()


@ON_SQLITE
def test_a_port_that_is_taken_is_named(refused, serve, tmp_path):
    port = serve().url.rpartition(":")[2]
    assert f"port {port}" in refused("--port", port, "--db", str(tmp_path / "other.db"))


@pytest.mark.parametrize("database", ["sqlite://", "/proc/nothing/x.db"])
def test_a_place_that_cannot_be_stored_in_is_named(refused, database):
    assert database in refused("--port", "0", "--db", database)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://me:hidden@127.0.0.1:1/x", ("refused", "start PostgreSQL there")),
        ("postgresql://me:hidden@nowhere.invalid/x", ("nowhere.invalid", "correct the host")),
        ("postgresql://postgres@/nowhere?host={folder}", ('database "nowhere" does not exist', "createdb")),
        ("postgresql://outsider@/postgres?host={folder}", ('role "outsider" does not exist', "createuser")),
        ("postgresql://guarded:hidden@/postgres?host={folder}", ("password authentication failed", "PGPASSWORD")),
        ("postgresql://guarded@/postgres?host={folder}", ("no password supplied", "PGPASSWORD")),
        ("postgresql://me:hidden@127.0.0.1", ("the name is missing", "postgresql://USER@HOST/NAME")),
    ],
)
def test_a_postgresql_that_cannot_be_used_is_told_in_one_sentence(refused, cluster, url, words):
    said = refused("--port", "0", "--db", url.format(folder=cluster.directory))
    assert all(word in said for word in words), said
    assert len(said.splitlines()) == 1
    assert "hidden" not in said


@ON_POSTGRES
def test_a_user_who_may_make_no_tables_is_told_what_to_ask_for(refused, cluster, new_database):
    cluster.execute("CREATE ROLE guest LOGIN")
    try:
        cluster.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC", database_url(new_database).database)
        said = refused("--port", "0", "--db", new_database.replace("postgres@", "guest@"))
        assert "permission denied for schema public" in said
        assert "OWNER TO" in said
        assert len(said.splitlines()) == 1
    finally:
        cluster.execute("DROP ROLE guest")


@ON_POSTGRES
@pytest.mark.parametrize("driver", ["psycopg"])
def test_a_driver_that_is_missing_is_named_with_what_brings_it(new_database, driver):
    program = (
        f"import sys; sys.modules[{driver!r}] = None; sys.argv[1:] = ['--port', '0', '--db', {new_database!r}]; "
        "import runpy; runpy.run_module('holdfast_server', run_name='__main__')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 2
    assert driver in ended.stderr
    assert "install Holdfast with its extra `postgres`" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.fixture(params=["a directory", "a text", "a database of another program", "a damaged database"])
def no_place(request, tmp_path):
    path = tmp_path / "place"
    match request.param:
        case "a directory":
            path.mkdir()
        case "a text":
            path.write_text("loss,iteration\n" * 100)
        case "a database of another program":
            with sqlite3.connect(path) as connection:
                connection.execute("CREATE TABLE jobs (x)")
            connection.close()
        case "a damaged database":
            path.write_bytes(b"SQLite format 3\0" + b"\xff" * 4096)
    return path


def test_what_is_no_database_of_ours_is_named_in_one_sentence_and_left_alone(refused, no_place):
    before = None if no_place.is_dir() else no_place.read_bytes()
    said = refused("--port", "0", "--db", str(no_place))
    assert str(no_place) in said
    assert "--db" in said
    assert len(said.splitlines()) == 1
    assert not any(word in said.lower() for word in ("sqlalche", "[sql", "background on", "operationalerror"))
    assert before is None or no_place.read_bytes() == before


def test_no_directory_is_made_for_a_database_that_somebody_named(refused, tmp_path):
    said = refused("--port", "0", "--db", str(tmp_path / "a" / "b" / "holdfast.db"))
    assert f"there is no directory {tmp_path}/a/b" in said
    assert not (tmp_path / "a").exists()


def test_a_second_ctrl_c_leaves_nothing_behind(serve):
    server = serve()
    server.signal(signal.SIGINT)
    server.signal(signal.SIGINT)
    assert server.wait() == 0
    assert server.output.rpartition("(press Ctrl-C to stop)")[2].strip() == "Holdfast stopped."


@ON_SQLITE
def test_a_database_of_a_later_release_is_left_alone(refused, serve, tmp_path):
    serve().stop()
    with sqlite3.connect(tmp_path / "holdfast.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    assert "9999" in refused("--port", "0", "--db", str(tmp_path / "holdfast.db"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 0)])
def test_it_stops_though_streams_and_long_polls_are_open(serve, fresh_agent, number, code):
    server = serve()
    with server.client() as client, server.client() as listening, server.client() as waiting:
        fresh_agent(client).start()
        polled = []
        poll = threading.Thread(
            target=lambda: polled.append(waiting.get(f"{JOB}/desired?after=0&wait=60").status_code)
        )
        poll.start()
        with listening.stream("GET", f"{JOB}/stream") as stream:
            lines = stream.iter_lines()
            assert next(lines) == "event: tick"
            while "holdfast_listeners 2.0" not in client.get("/metrics").text:
                pass
            server.signal(number)
            # Its streams end by themselves; cut off, they would raise here.
            assert any(line.startswith("data: ") for line in lines)
        poll.join()
        assert polled == [204]
    assert server.wait() == code
    assert "ERROR" not in server.output
    assert "was destroyed" not in server.output
    assert "Traceback" not in server.output


def test_a_stream_ticks_when_something_changes(serve, fresh_agent):
    server = serve()
    with server.client() as client, server.client() as listening:
        agent = fresh_agent(client)
        agent.start()
        with listening.stream("GET", f"{JOB}/stream") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            data = (line for line in stream.iter_lines() if line.startswith("data: "))
            assert '"iteration":0' in next(data)
            agent.train(7, loss=float("nan"))
            tick = next(line for line in data if '"iteration":7' in line)
            assert '"loss":"nan"' in tick
        assert client.get("/api/v1/jobs/nobody/stream").status_code == 404


@pytest.mark.parametrize(
    "named", [("--address", "https://holdfast.example"), ("--allow-host", "holdfast.example")]
)
def test_a_public_name_exposes_a_server_on_loopback_too(refused, tmp_path, named):
    said = refused("--port", "0", "--db", str(tmp_path / "x.db"), "--no-accounts", *named)
    assert " ".join(named) in said
    assert "HOLDFAST_TOKEN" in said
    assert "15 characters" in refused(
        "--port", "0", "--db", str(tmp_path / "x.db"), *named, HOLDFAST_TOKEN="fifteen-letters"
    )


@ON_SQLITE
def test_a_server_with_a_public_name_asks_for_accounts_from_its_first_start(serve):
    server = serve("--address", "https://holdfast.example")
    assert "at https://holdfast.example/setup#hfl_" in server.output
    with server.client() as client:
        assert client.get("/api/v1/jobs").status_code == 401
        assert client.get("/api/v1/jobs", headers={"Host": "holdfast.example"}).status_code == 401


@ON_SQLITE
def test_a_server_without_authentication_answers_no_proxy_that_keeps_quiet_of_itself(serve):
    """nginx, as it comes, adds no header, and speaks HTTP/1.0."""
    host, port = serve().url.removeprefix("http://").split(":")
    for version, status in (("1.0", b"403"), ("1.1", b"200")):
        headers = f"Host: {host}:{port}\r\nConnection: close\r\n"
        assert status_of(host, port, f"GET /api/v1/jobs HTTP/{version}\r\n{headers}\r\n") == status


@ON_SQLITE
@pytest.mark.parametrize("token", ["", SECRET])
def test_a_health_check_over_http_1_0_without_a_host_name_is_answered(serve, token):
    """HAProxy sends it like this unless it is configured otherwise."""
    host, port = serve(**({"HOLDFAST_TOKEN": token} if token else {})).url.removeprefix("http://").split(":")
    for path in ("/healthz", "/readyz"):
        assert status_of(host, port, f"GET {path} HTTP/1.0\r\n\r\n") == b"200"
    assert status_of(host, port, "GET /api/v1/jobs HTTP/1.0\r\n\r\n") in (b"403", b"421")


def status_of(host: str, port: str, request: str) -> bytes:
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(request.encode())
        return connection.makefile("rb").readline().split()[1]


@ON_SQLITE
def test_the_address_that_a_proxy_forwards_is_the_clients_and_other_text_is_none(serve):
    server = serve("--log-format", "json", HOLDFAST_TOKEN=SECRET)
    with server.client() as client:
        for forwarded in ("203.0.113.9", "<b>10.0.0.1"):
            client.get("/api/v1/jobs", headers={"X-Forwarded-For": forwarded})
    server.stop()
    assert re.findall(r'"client": ?"([^"]*)"', server.output) == ["203.0.113.9", "unknown"]


# ---- slow headers ---------------------------------------------------------------------------


class SlowApplication:
    """An application that answers `/slow` when it is told to, and anything else at once."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.config = uvicorn.Config(
            self.answer, interface="asgi3", http=ShortHeaderTimeoutProtocol, log_config=None, lifespan="off"
        )
        self.server = uvicorn.Server(self.config)
        self.thread = threading.Thread(target=self.server.run, args=([self.listener],))
        self.thread.start()

    async def answer(self, scope, _, send):
        self.loop = asyncio.get_running_loop()
        if scope["path"] == "/slow":
            await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    def connect(self) -> socket.socket:
        return socket.create_connection(self.listener.getsockname(), timeout=PATIENCE_SECONDS)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join()


class ShortHeaderTimeoutProtocol(_HttpProtocol):
    """Waits for headers for as long as a test wants."""


@pytest.fixture
def waiting(monkeypatch):
    monkeypatch.setattr(ShortHeaderTimeoutProtocol, "header_seconds", 3.0)
    waiting = SlowApplication()
    yield waiting
    waiting.close()


def is_closed(connection: socket.socket) -> bool:
    """Waits for the other side to close it, or to answer."""
    return connection.recv(1000) == b""


REQUEST = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"GE", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "])
def test_a_header_that_does_not_come_is_not_waited_for(waiting, sent, monkeypatch):
    monkeypatch.setattr(ShortHeaderTimeoutProtocol, "header_seconds", 0.01)
    with waiting.connect() as connection:
        connection.sendall(sent)
        assert is_closed(connection)


@pytest.mark.parametrize("sent", [b"\r\n", b"GET / HT"])
def test_nor_is_that_of_a_later_request(waiting, sent, monkeypatch):
    with waiting.connect() as connection:
        connection.sendall(REQUEST)
        assert connection.recv(1000).endswith(b"ok")
        monkeypatch.setattr(ShortHeaderTimeoutProtocol, "header_seconds", 0.01)
        connection.sendall(sent)
        assert is_closed(connection)


def test_an_answer_that_takes_its_time_and_a_connection_that_rests_are_let_be(waiting):
    with waiting.connect() as slow, waiting.connect() as resting, waiting.connect() as half:
        slow.sendall(REQUEST.replace(b"/ ", b"/slow "))
        resting.sendall(REQUEST)
        assert resting.recv(1000).endswith(b"ok")
        half.sendall(b"GET / HT")
        assert is_closed(half), "and by then the time of the others would be over, too"
        waiting.loop.call_soon_threadsafe(waiting.go.set)
        assert slow.recv(1000).endswith(b"ok")
        resting.sendall(REQUEST)
        assert resting.recv(1000).endswith(b"ok")


def test_help_teaches():
    shown = subprocess.run(
        [sys.executable, "-m", "holdfast_server", "--help"], capture_output=True, text=True, check=True,
        env={"PATH": os.environ["PATH"], "COLUMNS": "120", "NO_COLOR": "1"},
    ).stdout  # fmt: skip
    for word in (
        "--host",
        "--port",
        "--db",
        "--token",
        "--allow-host",
        "--accounts",
        "--address",
        "HOLDFAST_TOKEN",
        "token_urlsafe",
    ):
        assert word in shown


def test_the_server_knows_no_torch():
    code = "import sys, holdfast_server.serve; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path("/"))
