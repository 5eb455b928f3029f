"""What docker-compose.yml starts, started without Docker: the same commands and environments, on this machine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))
sys.path.insert(0, str(ROOT / "tests" / "server"))
SCRIPTS = Path(sys.executable).parent
SECRETS = ("HOLDFAST_TOKEN", "POSTGRES_PASSWORD", "S3_ACCESS_KEY", "S3_SECRET_KEY")


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


@pytest.fixture
def env(tmp_path) -> dict[str, str]:
    """As `python3 tools/compose_env.py` makes it."""
    import compose_env

    assert compose_env.main(tmp_path / ".env") == 0
    assert (tmp_path / ".env").stat().st_mode & 0o777 == 0o600
    assert compose_env.main(tmp_path / ".env") == 1, "a second one would lock the volumes"
    lines = (tmp_path / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def filled(text: str, env: dict[str, str]) -> str:
    """As Compose fills it in."""

    def value(match: re.Match[str]) -> str:
        name, operator, word = match[1], match[2], match[3]
        found = env.get(name, "")
        assert found or operator == ":-", f"{name} is required, and .env does not give it"
        return found or word

    return re.sub(r"\$\{(\w+)(:\?|:-)([^}]*)\}", value, text)


def environment(service, env, **replaced):
    told = {name: filled(str(value), env) for name, value in service.get("environment", {}).items()}
    for old, new in replaced.items():
        told = {name: value.replace(old.replace("__", "://"), new) for name, value in told.items()}
    return told


def test_no_secret_is_in_it(compose, env):
    text = (ROOT / "docker-compose.yml").read_text() + (ROOT / "compose.env.example").read_text()
    assert re.findall(r"(?i)(?:password|secret|token|key)\w*[:=] *[\"']?[A-Za-z0-9+/]{8,}", text) == []
    assert len({env[name] for name in SECRETS}) == 4
    assert all(len(env[name]) == 48 for name in SECRETS)


def test_every_variable_is_in_the_example(compose):
    text = (ROOT / "docker-compose.yml").read_text()
    example = (ROOT / "compose.env.example").read_text()
    assert set(re.findall(r"\$\{(\w+)", text)) == set(re.findall(r"^(\w+)=", example, re.MULTILINE))


def test_the_index_of_torch_reaches_the_build_of_the_example_job(compose):
    assert compose["services"]["char-gpt"]["build"]["args"] == {"TORCH_INDEX": "${TORCH_INDEX:-}"}
    trainer = (ROOT / "Dockerfile").read_text().partition("AS trainer")[2]
    assert re.search(r"^ARG TORCH_INDEX=$", trainer, re.MULTILINE)
    assert '${TORCH_INDEX:+--index-url "$TORCH_INDEX"}' in trainer


def test_every_service_is_watched_and_keeps_its_data(compose):
    services = compose["services"]
    assert services.keys() == {"db", "store", "server", "char-gpt"}
    for name, service in services.items():
        assert "healthcheck" in service, name
        for other in service.get("depends_on", {}):
            assert "healthcheck" in services[other], (name, other)
    used = {volume.partition(":")[0] for service in services.values() for volume in service.get("volumes", [])}
    assert used == compose["volumes"].keys()
    assert services["server"]["ports"] == ["127.0.0.1:7117:7117"], "nothing else is open, and that to this machine"
    assert [name for name, service in services.items() if "ports" in service] == ["server"]


def test_every_service_has_a_read_only_root_and_no_capabilities(compose):
    for name, service in compose["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "/tmp" in service["tmpfs"], name
        assert not service.get("privileged"), name
    assert compose["services"]["db"]["user"] == "postgres"


def test_images_are_pinned_and_run_as_a_user(compose):
    dockerfile = (ROOT / "Dockerfile").read_text()
    images = [service["image"] for service in compose["services"].values() if "image" in service]
    bases = re.findall(r"^FROM (\S+) AS", dockerfile, re.MULTILINE)
    assert [image for image in images if not re.search(r":\d+\.\d+", image)] == []
    assert [base for base in bases if base != "source" and not re.search(r":\d+\.\d+\.\d+", base)] == []
    for stage in dockerfile.split("\nFROM ")[1:]:
        if stage.partition(" AS ")[2].startswith(("server", "trainer")):
            assert re.search(r"^USER 10001$", stage, re.MULTILINE), stage
    assert re.search(r"^HEALTHCHECK [^\n]*\\\n  CMD python .*/readyz", dockerfile, re.MULTILINE)


def test_docker_compose_takes_it(env, tmp_path):
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        pytest.skip("no `docker compose` on this machine")
    command = [
        docker,
        "compose",
        "-f",
        ROOT / "docker-compose.yml",
        "--env-file",
        tmp_path / ".env",
        "config",
        "-q",
    ]
    subprocess.run(command, check=True)


# ---- the same programs ------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Started:
    """A program that has said what shows that it is there."""

    def __init__(self, command: list[str], environment: dict[str, str], sign: str, cwd: Path) -> None:
        self.process = subprocess.Popen(
            command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={"PATH": f"{SCRIPTS}:{os.environ['PATH']}", "HOME": str(cwd), **environment},
        )  # fmt: skip
        self.said: list[str] = []
        self._told = threading.Event()
        # To the end: one whose output nobody reads stops at its next line, once the pipe is full.
        self._listening = threading.Thread(target=self._listen, args=[sign], daemon=True)
        self._listening.start()
        self._told.wait()
        if not any(re.search(sign, line) for line in self.said):
            pytest.fail(f"{command} ended with {self.process.wait()}: {''.join(self.said)}")

    def _listen(self, sign: str) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.said.append(line)
                if re.search(sign, line):
                    self._told.set()
        self._told.set()

    def end(self) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait()
        self._listening.join()


@pytest.fixture
def database(env) -> Iterator[str]:
    """PostgreSQL with the user, the database and the password of the service `db`."""
    from tests.support.postgres import Cluster, NoPostgres

    try:
        cluster = Cluster()
    except NoPostgres as error:
        pytest.skip(str(error))
    try:
        cluster.start()
        cluster.execute(f"CREATE ROLE holdfast LOGIN PASSWORD '{env['POSTGRES_PASSWORD']}'")
        cluster.execute("CREATE DATABASE holdfast OWNER holdfast")
        yield str(cluster.directory)
    finally:
        cluster.remove()


@pytest.fixture
def server(compose, env, database, tmp_path) -> Iterator[tuple[Started, str]]:
    """With the command and the environment of the service; only where its neighbours are is put in."""
    service, port = compose["services"]["server"], free_port()
    told = environment(service, env)
    told["HOLDFAST_DB"] = told["HOLDFAST_DB"].replace("@db:5432/holdfast", f"@/holdfast?host={database}")
    command = [word.replace("0.0.0.0", "127.0.0.1").replace("7117", str(port)) for word in service["command"]]
    started = Started(command, told, r"Holdfast is at", tmp_path)
    yield started, f"http://127.0.0.1:{port}"
    started.end()


@pytest.fixture
def store(compose, env, tmp_path) -> Iterator[str]:
    service, port = compose["services"]["store"], free_port()
    (script,) = (
        word.replace(":9000", f"127.0.0.1:{port}").replace("/data", str(tmp_path)) for word in service["command"]
    )
    told = environment(service, env)
    started = Started([*service["entrypoint"], script], told, r"(?i)server on", tmp_path)
    yield f"http://127.0.0.1:{port}"
    started.end()


@pytest.mark.processes
def test_the_server_starts_on_the_database_and_its_health_check_says_so(compose, env, server):
    from holdfast.client import Client, UnreachableError

    started, url = server
    check = compose["services"]["server"]["healthcheck"]["test"]
    command = [
        sys.executable if word == "python" else word.replace("http://127.0.0.1:7117", url) for word in check[1:]
    ]
    subprocess.run(command, check=True)
    assert Client(url, env["HOLDFAST_TOKEN"]).jobs() == []
    with pytest.raises(UnreachableError):
        Client(url, "another", retries=0).jobs()
    assert env["POSTGRES_PASSWORD"] not in "".join(started.said)


@pytest.mark.processes
def test_the_store_takes_the_keys_of_the_job_and_no_others(compose, env, store, tmp_path):
    import obstore
    from obstore.store import S3Store

    told = environment(compose["services"]["char-gpt"], env, http__store=store)
    told["AWS_ENDPOINT_URL"] = store
    assert told["HOLDFAST_STORE"].startswith("s3://checkpoints/")

    def open_(secret: str) -> S3Store:
        return S3Store(
            "checkpoints", endpoint=store, access_key_id=told["AWS_ACCESS_KEY_ID"], secret_access_key=secret,
            region="us-east-1", client_options={"allow_http": True}, retry_config={"max_retries": 0},
        )  # fmt: skip

    obstore.put(open_(told["AWS_SECRET_ACCESS_KEY"]), "examples/a", b"1")
    assert (tmp_path / "checkpoints" / "examples" / "a").read_bytes() == b"1"
    with pytest.raises(Exception, match=r"(?i)signature|denied|forbidden|403"):
        obstore.put(open_("another"), "examples/b", b"1")


@pytest.mark.long
@pytest.mark.processes
def test_the_example_job_reports_and_stores(compose, env, server, store, tmp_path):
    from holdfast.client import Client

    service = compose["services"]["char-gpt"]
    _, url = server
    told = {**environment(service, env), "HOLDFAST_SERVER": url, "AWS_ENDPOINT_URL": store}
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    job = Started(service["command"], told, r".", tmp_path)
    try:
        client = Client(url, env["HOLDFAST_TOKEN"])
        seen = next(
            each for name in _named(client) for each in client.watch(name) if each.last_durable is not None
        )
        check = service["healthcheck"]["test"]
        command = [sys.executable if word == "python" else word for word in check[1:]]
        subprocess.run(command, check=True, env={**os.environ, **told})
    finally:
        job.end()
    assert seen.status in ("running", "starting", "finished", "stopped")
    assert any((tmp_path / "checkpoints").rglob("manifest.json"))


def _named(client) -> Iterator[str]:
    while True:
        yield from (job.job for job in client.jobs())
