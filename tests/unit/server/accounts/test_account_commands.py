"""`holdfast user`, `token` and `audit`: on the server's machine, whether it runs or not."""

from __future__ import annotations

import json
import re
import time

import pytest
from typer.testing import CliRunner

from holdfast_server.accounts import people, server_address
from holdfast_server.commands import audit as audit_commands
from holdfast_server.commands import project as project_commands
from holdfast_server.commands import token as token_commands
from holdfast_server.commands import user as user_commands
from holdfast_server.commands.database import in_database
from holdfast_server.records import audit
from tests.support.accounts_server import PASSWORD, AccountsServer

APPS = {
    "user": user_commands.app,
    "project": project_commands.app,
    "token": token_commands.app,
    "audit": audit_commands.app,
}


@pytest.fixture
def run(empty_database):
    """Runs a command as a person would, and returns what it printed."""

    def run(name, *arguments, refused=0, notes=False):
        result = CliRunner().invoke(APPS[name], arguments, env={"HOLDFAST_DB": empty_database, "COLUMNS": "200"})
        assert result.exit_code == refused, result.output
        assert "Traceback" not in result.output
        if refused:
            return result.output.strip()
        return (result.stderr if notes else result.stdout).strip()

    return run


def test_a_person_from_beginning_to_end(run):
    added = run("user", "add", "Ada", "--role", "viewer", "--address", "https://holdfast.example")
    assert re.search(r"https://holdfast\.example/reset#hfl_\w{64}$", added)
    assert "viewer of default" in run("user", "list")
    assert "the role operator in default" in run("user", "role", "ada", "operator")
    assert "the role admin on the server" in run("user", "role", "ada", "admin", "--server-admin")
    assert json.loads(run("user", "list", "--json"))["people"][0]["roles"] == {"default": "operator"}
    assert "has an administrator already" in run("user", "setup-link", refused=1)
    assert "#hfl_" in run("user", "reset-link", "ada")
    assert "the only server admin" in run("user", "remove", "ada", refused=1)
    run("user", "add", "root", "--server-admin")
    assert run("user", "remove", "ada") == "Removed ada."
    assert "there is no user 'ada'" in run("user", "remove", "ada", refused=1)


def test_a_server_admin_has_one_name_in_help_and_earlier_names_work(run):
    run("user", "add", "ada", "--admin")
    run("user", "add", "bob", "--server-admin")
    assert "the role admin on the server" in run("user", "role", "ada", "admin", "--server")
    for command, earlier in (("add", "--admin"), ("role", "--server")):
        words = run("user", command, "--help").split()
        assert "--server-admin" in words
        assert earlier not in words


def test_links_begin_with_the_address_of_the_server(run, empty_database):
    run("user", "add", "ada")
    assumed = "The link begins with http://127.0.0.1:7117, the default, because no server has started"
    assert assumed in run("user", "reset-link", "ada", notes=True)
    assert "http://127.0.0.1:7117/reset#hfl_" in run("user", "reset-link", "ada")

    def start(database, now):
        server_address.remember(database, "https://holdfast.example:7200/", now=now)

    in_database(empty_database, start)
    for command in (("reset-link", "ada"), ("setup-link",), ("add", "bob")):
        assert re.search(r"https://holdfast\.example:7200/(reset|setup)#hfl_\w{64}$", run("user", *command))
    assert "of the server that started at 20" in run("user", "reset-link", "ada", notes=True)
    given = run("user", "reset-link", "ada", "--address", "http://10.0.0.1:80/")
    assert re.fullmatch(r"Link for ada .*: http://10\.0\.0\.1:80/reset#hfl_\w{64}", given)


@pytest.mark.parametrize(
    "wrong",
    [
        ("role", "ada", "emperor"),
        ("role", "ada", "viewer", "--server-admin"),
        ("add", "ada", "--role", "x"),
        ("add", "a b"),
    ],
)
def test_what_makes_no_sense_is_said_in_one_sentence(run, wrong):
    said = run("user", *wrong, refused=1 if wrong == ("add", "a b") else 2)
    assert len(said.splitlines()) == 1


def test_nobody_is_added_half(run):
    """Else their link is lost, and the next try says that they are here already."""
    said = run("user", "add", "ada", "--role", "operator", "--project", "vision", refused=1)
    assert "there is no project 'vision': create it with `holdfast project add`" in said
    assert json.loads(run("user", "list", "--json"))["people"] == []
    run("project", "add", "Vision")
    assert "#hfl_" in run("user", "add", "ada", "--role", "operator", "--project", "vision")
    assert "operator of vision" in run("user", "list")


def test_a_project_from_beginning_to_end(run):
    assert "Added project vision" in run("project", "add", "vision")
    assert "project 'vision' exists already" in run("project", "add", "vision", refused=1)
    assert [row["name"] for row in json.loads(run("project", "list", "--json"))["projects"]] == [
        "default",
        "vision",
    ]
    assert "vision" in run("project", "list")
    assert "job 'x' not found" in run("project", "move-job", "x", "vision", refused=1)


def test_a_setup_link_that_is_printed_sets_the_server_up(run):
    link = json.loads(run("user", "setup-link", "--json"))["link"]
    assert link.startswith("http://127.0.0.1:7117/setup#hfl_")


def test_a_key_from_beginning_to_end(run):
    secret = run("token", "create", "cluster agents")
    assert re.fullmatch(r"hf_[0-9a-f]{10}_[0-9a-f]{64}", secret)
    assert secret not in run("token", "list")
    (row,) = json.loads(run("token", "list", "--json"))["tokens"]
    assert (row["prefix"], row["scopes"], row["project"], row["state"]) == (
        secret[:13],
        ["report"],
        "default",
        "works",
    )
    assert "Revoked hf_" in run("token", "revoke", secret[:13])
    assert "Revoked hf_" in run("token", "revoke", secret), "the whole key names itself as well"
    assert "revoked" in run("token", "list")
    assert "there is no key" in run("token", "revoke", "hf_nothing", refused=1)


def test_keys_are_as_narrow_as_is_asked(run):
    made = json.loads(
        run("token", "create", "k", "--scope", "read", "--every-project", "--expires", "never", "--json")
    )
    assert (made["listed"]["project"], made["listed"]["expires_at"]) == (None, None)
    made = json.loads(run("token", "create", "k", "--job", "char-gpt", "--expires", "12h", "--json"))
    assert made["listed"]["job"] == "char-gpt"
    run("token", "create", "k", "--scope", "fly", refused=2)
    run("token", "create", "k", "--expires", "soon", refused=2)
    run("token", "create", "k", "--project", "no-such", refused=1)
    run("token", "create", "k", "--every-project", refused=1)


def test_the_log_is_listed_and_verified(run):
    run("user", "add", "ada")
    run("token", "create", "agents")
    assert [row["action"] for row in json.loads(run("audit", "list", "--json"))["entries"]] == [
        "key.create",
        "person.add",
    ]
    assert "key.create" in run("audit", "list", "--action", "key")
    assert "person.add" not in run("audit", "list", "--action", "key")
    said = run("audit", "verify")
    known = re.fullmatch(r"All 2 rows are valid\. Store this elsewhere: (2:[0-9a-f]{64})", said)[1]
    run("user", "add", "bob")
    assert "All 3 rows are valid" in run("audit", "verify", "--known", known)
    assert "Row 2 is not valid" in run("audit", "verify", "--known", "2:" + "00" * 32, refused=1)
    run("audit", "verify", "--known", "nonsense", refused=2)


def test_a_server_that_runs_is_no_hindrance(stage: AccountsServer, empty_database):
    done = CliRunner().invoke(user_commands.app, ["add", "ada", "--json", "--db", empty_database])
    assert done.exit_code == 0, done.output
    link = json.loads(done.stdout)["link"].partition("#")[2]
    assert people.choose_password(stage.db, link, PASSWORD, now=time.time()) == "ada"
    rows = stage.read(lambda session: audit.entries(session, audit.AuditQuery(), limit=9))
    assert rows[-1].who.endswith("on the server")


def test_what_a_job_was_called_moves_no_cursor(run, stage: AccountsServer):
    def work(session):
        audit.record(session, who="x", action="thing.do", now=1.0, after={"a": "\x1b[2J\u202e"})

    stage.write(work)
    shown = run("audit", "list")
    assert "thing.do" in shown
    assert "\x1b" not in shown
    assert "\u202e" not in shown
