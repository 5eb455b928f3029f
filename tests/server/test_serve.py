from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

JOB = "/api/v1/jobs/char-gpt"
SECRET = "a-shared-secret-of-some-length"
pytestmark = pytest.mark.processes


def refused(*arguments, **environment):
    """What a server that does not start says."""
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast_server", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": os.environ["PATH"], **environment},
    )
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    return ended.stderr


def test_it_says_where_it_stores_what_it_migrated_and_where_it_is(serve, tmp_path):
    first = serve()
    assert f"Storing in {tmp_path}/holdfast.db" in first.output
    assert "Brought the database up to date: 0001" in first.output
    first.stop()
    assert "Brought the database" not in serve().output


def test_without_an_option_it_stores_in_the_persons_data_directory(tmp_path, serve):
    server = serve("--db", "", XDG_DATA_HOME=str(tmp_path / "data"))
    assert f"Storing in {tmp_path}/data/holdfast/holdfast.db" in server.output


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.com"])
def test_other_machines_are_not_served_without_a_shared_secret(tmp_path, host):
    said = refused("--host", host, "--port", "0", "--db", str(tmp_path / "x.db"))
    assert "HOLDFAST_TOKEN" in said
    assert not (tmp_path / "x.db").exists()


def test_an_empty_secret_is_none(tmp_path):
    said = refused("--host", "0.0.0.0", "--port", "0", "--db", str(tmp_path / "x.db"), HOLDFAST_TOKEN="")
    assert "HOLDFAST_TOKEN" in said


def test_a_secret_that_can_be_guessed_is_refused_where_others_can_try(tmp_path):
    said = refused(
        "--host", "0.0.0.0", "--port", "0", "--db", str(tmp_path / "x.db"), HOLDFAST_TOKEN="fifteen-letters"
    )
    assert "15 characters" in said
    assert 'python -c "import secrets; print(secrets.token_urlsafe(32))"' in said
    assert "fifteen-letters" not in said


def test_on_loopback_any_secret_will_do(serve):
    serve(HOLDFAST_TOKEN="short")


def test_with_a_shared_secret_other_machines_are_served_and_asked_for_it(serve):
    server = serve("--host", "0.0.0.0", HOLDFAST_TOKEN=SECRET)
    with server.client() as client:
        assert client.get("/api/v1/jobs").status_code == 401
        headers = {"Authorization": f"Bearer {SECRET}"}
        assert client.get("/api/v1/jobs", headers=headers).status_code == 200
    assert SECRET not in server.output


def test_a_second_server_on_the_same_file_is_refused_and_the_first_goes_on(serve, tmp_path):
    first = serve()
    said = refused("--port", "0", "--db", str(tmp_path / "holdfast.db"))
    assert f"(process {first.process.pid})" in said
    assert "--db" in said
    with first.client() as client:
        assert client.get("/readyz").json() == {"status": "ready"}


def test_the_file_is_free_again_once_the_server_was_killed(serve):
    serve().kill()
    serve()


def test_a_port_that_is_taken_is_named(serve, tmp_path):
    port = serve().url.rpartition(":")[2]
    assert f"port {port}" in refused("--port", port, "--db", str(tmp_path / "other.db"))


@pytest.mark.parametrize("database", ["sqlite://", "postgresql://localhost/x", "/proc/nothing/x.db"])
def test_a_place_that_cannot_be_stored_in_is_named(database):
    assert database in refused("--port", "0", "--db", database)


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


def test_what_is_no_database_of_ours_is_named_in_one_sentence_and_left_alone(no_place):
    before = None if no_place.is_dir() else no_place.read_bytes()
    said = refused("--port", "0", "--db", str(no_place))
    assert str(no_place) in said
    assert "--db" in said
    assert len(said.splitlines()) == 1
    assert not any(word in said.lower() for word in ("sqlalche", "[sql", "background on", "operationalerror"))
    assert before is None or no_place.read_bytes() == before


def test_no_directory_is_made_for_a_database_that_somebody_named(tmp_path):
    said = refused("--port", "0", "--db", str(tmp_path / "a" / "b" / "holdfast.db"))
    assert f"there is no directory {tmp_path}/a/b" in said
    assert not (tmp_path / "a").exists()


def test_a_second_ctrl_c_leaves_nothing_behind(serve):
    server = serve()
    server.process.send_signal(signal.SIGINT)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(timeout=20) == 0
    assert server.process.stdout is not None
    assert server.process.stdout.read().strip() == "Holdfast has stopped."


def test_a_database_of_a_later_release_is_left_alone(serve, tmp_path):
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
            server.process.send_signal(number)
            # Its streams end by themselves; cut off, they would raise here.
            assert any(line.startswith("data: ") for line in lines)
        poll.join(timeout=20)
        assert polled == [204]
    assert server.process.wait(timeout=20) == code
    assert server.process.stdout is not None
    said = server.process.stdout.read()
    assert "ERROR" not in said
    assert "was destroyed" not in said
    assert "Traceback" not in said


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


def test_what_was_acknowledged_survives_being_killed_in_the_middle(serve, fresh_agent, tmp_path):
    """Batches are sent without pause by several agents while the server dies, five times over."""
    acknowledged: dict[str, int] = {}
    for round_ in range(5):
        server = serve()
        stop = threading.Event()

        def send(name: str, server=server, stop=stop) -> None:
            with server.client() as client:
                agent = fresh_agent(client, uid=name, job=f"job-{name}")
                agent.sequence = agent.iteration = acknowledged.get(name, 0)
                while not stop.is_set():
                    try:
                        agent.train(3)
                        agent.iteration = agent.sequence
                    except Exception:  # however a server that is killed ends the conversation
                        return
                    acknowledged[name] = agent.sequence

        agents = [threading.Thread(target=send, args=(f"agent{number}",)) for number in range(4)]
        for thread in agents:
            thread.start()
        target = 15 * (round_ + 1)
        while any(acknowledged.get(f"agent{number}", 0) < target for number in range(4)):
            assert any(thread.is_alive() for thread in agents)
        server.kill()
        stop.set()
        for thread in agents:
            thread.join()
    connection = sqlite3.connect(tmp_path / "holdfast.db")
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert len(acknowledged) == 4
    for name, count in acknowledged.items():
        stored = [row[0] for row in connection.execute(
            "SELECT sequence FROM chunks WHERE job = ? ORDER BY sequence", (f"job-{name}",))]  # fmt: skip
        assert len(stored) == len(set(stored)), "kept twice"
        assert set(range(count)) <= set(stored), "acknowledged and lost"
    connection.close()


def test_help_teaches():
    shown = subprocess.run(
        [sys.executable, "-m", "holdfast_server", "--help"], capture_output=True, text=True, check=True,
        env={"PATH": os.environ["PATH"], "COLUMNS": "120", "NO_COLOR": "1"},
    ).stdout  # fmt: skip
    for word in ("--host", "--port", "--db", "--token", "--allow-host", "HOLDFAST_TOKEN", "token_urlsafe"):
        assert word in shown


def test_the_server_knows_no_torch():
    code = "import sys, holdfast_server.serve; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path("/"))
