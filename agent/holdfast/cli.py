"""The `holdfast` command: each line of its help is a thing that a person came to do."""

from __future__ import annotations

import os
from importlib.metadata import entry_points, version
from typing import Annotated, NoReturn

import typer

from holdfast.commands import alerts, control, fork, plan, questions, requests, stores
from holdfast.commands.console import EXIT_CODES, EXIT_USAGE, fail

COMMANDS = "holdfast.commands"
"""The entry-point group through which other packages, the server first, add theirs."""

NO_SERVER = "the server is not installed here: install Holdfast with its extra `server`"

app = typer.Typer(
    name="holdfast",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help=(
        "Checkpoint PyTorch training within an overhead budget, and restore any checkpoint.\n\n"
        "Start `holdfast serve` in one terminal and `holdfast run -- python train.py` in another. "
        "Then run `holdfast jobs` or open http://127.0.0.1:7117.\n\n" + EXIT_CODES
    ),
)

_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
_COMMAND_LAST = {"allow_interspersed_args": False}
_MINUS_IS_A_VALUE = {"ignore_unknown_options": True}
"""So that a budget of -1 is refused for what it is, not as an option that does not exist."""

_TRAINING, _OPERATING, _STORES = "Training", "Operating a job", "Without a server"
_SERVER = "On the server's machine"


def main() -> None:
    app(prog_name="holdfast")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"holdfast {version('holdfast')}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None: ...


def _of_server(name: str, args: list[str]) -> NoReturn:
    for entry in entry_points(group=COMMANDS, name=name):
        try:
            command = entry.load()
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0].startswith("holdfast"):
                raise
            fail(f"{NO_SERVER} ({error.name} is missing)")
        if not isinstance(command, typer.Typer):
            served = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
            served.command()(command)
            command = served
        command(args, prog_name=f"holdfast {name}")
        raise typer.Exit
    fail(NO_SERVER)


def _add_server_command(name: str, told: str, panel: str) -> None:
    @app.command(name, help=told, context_settings=_PASSED_ON, add_help_option=False, rich_help_panel=panel)
    def command(context: typer.Context) -> None:
        _of_server(name, context.args)


_add_server_command(
    "serve", "Start the server and its dashboard (`holdfast serve --help` lists the options).", _TRAINING
)
for _name, _told in (
    ("user", "Manage the users of a server with accounts: add, list, role, remove, reset-link, setup-link."),
    ("project", "Manage the projects of a server with accounts: add, list, move a job to one."),
    ("token", "Manage the keys of agents and scripts on a server with accounts: create, list, revoke."),
    ("audit", "List who changed what on a server, or verify that the audit log is unaltered."),
    ("db", "Manage the server's database: size, backup, put-back, and limits on what it keeps."),
):
    _add_server_command(_name, _told, _SERVER)


@app.command(context_settings=_COMMAND_LAST, rich_help_panel=_TRAINING)
def run(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD...", help="The training command, after `--`.")],
    store: Annotated[str | None, typer.Option(help="Sets HOLDFAST_STORE: where checkpoints go.")] = None,
    server: Annotated[str | None, typer.Option(help="Sets HOLDFAST_SERVER: the server to report to.")] = None,
    budget: Annotated[
        str | None, typer.Option(help="Sets HOLDFAST_BUDGET: the allowed overhead, as in 2%.")
    ] = None,
    starts: Annotated[
        int, typer.Option(min=1, help="Give up after this many starts in a row without a new iteration.")
    ] = 5,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that the trainer has to end after SIGINT or SIGTERM.")
    ] = 30.0,
    hang: Annotated[
        float,
        typer.Option(min=0, help="Restart a trainer after this many usual iteration times without one; 0: never."),
    ] = 50.0,
    stay: Annotated[
        str, typer.Option(help="When to wait for a restore request after the last start: never, failure, always.")
    ] = "failure",
    memory_tier: Annotated[
        bool, typer.Option(help="Keep the newest snapshot in memory that outlives the trainer (Linux).")
    ] = True,
) -> None:
    """Run a training command, and restart it after a crash; it resumes from its newest checkpoint.

    The command is restarted after any signal and any exit status but 0: first at once, then with growing delays.
    The supervisor gives up after 5 starts in a row (--starts) without a new iteration. Ctrl-C goes to the trainer,
    which ends as it would without Holdfast; a second Ctrl-C, two or more seconds later, kills the trainer and its
    processes. The exit code is that of the trainer; where a signal to this process ended a trainer that exits with
    1, as torchrun does, it is 128 + the signal.

    A hung trainer (no iteration for 50 usual iteration times and at least 10 minutes) is killed and restarted; the
    stacks of all ranks are recorded on the job's timeline first. After giving up, the supervisor keeps running if
    a server is configured and waits for a restore request (--stay never: it ends).

    The supervisor holds the newest snapshot in its memory. When the trainer dies, the snapshot is made durable,
    and the next start resumes from it without reading the store (--no-memory-tier turns this off).

    Examples: holdfast run -- python train.py  ·  holdfast run -- torchrun --nproc-per-node 8 train.py
    """
    from holdfast.client import validate_server
    from holdfast.pacing.settings import parse_budget
    from holdfast.supervisor.supervisor import STAYS, Limits, Supervisor

    given = {"HOLDFAST_STORE": store, "HOLDFAST_SERVER": server, "HOLDFAST_BUDGET": budget}
    environment = {name: value for name, value in given.items() if value is not None}
    try:
        if "HOLDFAST_BUDGET" in (wanted := os.environ | environment):
            parse_budget(wanted["HOLDFAST_BUDGET"])
        if wanted.get("HOLDFAST_SERVER"):
            validate_server(wanted["HOLDFAST_SERVER"])
        wanted_stay = next((each for each in STAYS if each == stay), None)
        if wanted_stay is None:
            raise ValueError(f"stay {stay!r}: give one of {', '.join(STAYS)}")
        limits = Limits(fruitless_starts=starts, grace_seconds=grace, hang_factor=hang)
        status = Supervisor(
            command, limits=limits, environment=environment, stay=wanted_stay, memory_tier=memory_tier
        ).run()
    except ValueError as error:
        fail(str(error), EXIT_USAGE)
    except OSError as error:
        fail(f"cannot start {command[0]!r}: {error.strerror}", 127)
    raise typer.Exit(status)


_OPERATIONS = (
    questions.jobs, questions.show, questions.checkpoints, questions.goodput,
    control.budget, control.every, control.policy, control.retention, control.pause, control.resume,
    requests.checkpoint, requests.probe, requests.restore, requests.undo,
    control.pin, control.unpin, control.label, requests.verify, control.delete, control.reset_numbers,
)  # fmt: skip
for _operation in _OPERATIONS:
    _takes_numbers = _operation in (control.budget, control.every, control.policy)
    _settings = _MINUS_IS_A_VALUE if _takes_numbers else None
    app.command(rich_help_panel=_OPERATING, context_settings=_settings)(_operation)
app.add_typer(alerts.app, name="alerts", rich_help_panel=_OPERATING)
app.command(rich_help_panel=_STORES)(fork.fork)
app.command(rich_help_panel=_STORES, context_settings=_MINUS_IS_A_VALUE)(plan.plan)
app.add_typer(stores.app, name="store", rich_help_panel=_STORES)

if __name__ == "__main__":
    main()
