"""The `holdfast` command: each line of its help is a thing that a person came to do."""

from __future__ import annotations

import os
from importlib.metadata import entry_points, version
from typing import Annotated, NoReturn

import typer

from holdfast.commands import (
    alerting,
    checkpointing,
    control,
    forking,
    keeping,
    planning,
    probing,
    questions,
    restoring,
    stores,
    verifying,
)
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
        "Checkpoints that cost next to nothing, a price tag on each, and any iteration back at one click.\n\n"
        "Start with `holdfast serve` in one terminal and `holdfast run -- python train.py` in another; "
        "then ask `holdfast jobs` or open http://127.0.0.1:7117.\n\n" + EXIT_CODES
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


@app.command(context_settings=_PASSED_ON, add_help_option=False, rich_help_panel=_TRAINING)
def serve(context: typer.Context) -> None:
    """Start the server and its dashboard (`holdfast serve --help` lists its options)."""
    _of_server("serve", context.args)


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


@app.command(context_settings=_PASSED_ON, add_help_option=False, rich_help_panel=_SERVER)
def user(context: typer.Context) -> None:
    """People who sign in to a server with accounts: add, list, role, remove, reset-link, setup-link."""
    _of_server("user", context.args)


@app.command(context_settings=_PASSED_ON, add_help_option=False, rich_help_panel=_SERVER)
def project(context: typer.Context) -> None:
    """Projects of a server with accounts: add, list, and move a job to one."""
    _of_server("project", context.args)


@app.command(context_settings=_PASSED_ON, add_help_option=False, rich_help_panel=_SERVER)
def token(context: typer.Context) -> None:
    """Keys for agents and scripts of a server with accounts: create, list, revoke."""
    _of_server("token", context.args)


@app.command(context_settings=_PASSED_ON, add_help_option=False, rich_help_panel=_SERVER)
def audit(context: typer.Context) -> None:
    """Who changed what on a server: list; and whether the log is as it was written: verify."""
    _of_server("audit", context.args)


@app.command(context_settings=_PASSED_ON, add_help_option=False, rich_help_panel=_SERVER)
def db(context: typer.Context) -> None:
    """The server's database: size, backup, put-back, and keep, how long it keeps what."""
    _of_server("db", context.args)


@app.command(context_settings=_COMMAND_LAST, rich_help_panel=_TRAINING)
def run(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD...", help="The trainer, after `--`.")],
    store: Annotated[str | None, typer.Option(help="Sets HOLDFAST_STORE: where checkpoints go.")] = None,
    server: Annotated[str | None, typer.Option(help="Sets HOLDFAST_SERVER: who to report to.")] = None,
    budget: Annotated[str | None, typer.Option(help="Sets HOLDFAST_BUDGET: the overhead allowed, 2%.")] = None,
    starts: Annotated[int, typer.Option(min=1, help="Give up after so many starts in a row get nowhere.")] = 5,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that a trainer which handles SIGINT or SIGTERM has to end.")
    ] = 30.0,
    hang: Annotated[
        float, typer.Option(min=0, help="Kill a trainer without an iteration for so many usual ones; 0: never.")
    ] = 50.0,
    stay: Annotated[
        str, typer.Option(help="When to wait for an order to restore: never, after a failure, always.")
    ] = "failure",
    memory_tier: Annotated[
        bool, typer.Option(help="Hold the newest snapshot in memory that outlives the trainer.")
    ] = True,
) -> None:
    """Start a trainer, and start it again when it crashes; it goes on from its newest checkpoint.

    It is restarted on any signal and any exit status but 0, first at once, then ever more slowly, and no more
    when 5 starts in a row (--starts) ended without a new iteration. Ctrl-C goes to the trainer, which ends as it
    would without Holdfast; a second one, two seconds later or more, kills it and all its processes on the spot.
    The exit code is the trainer's; 128 + the signal where a signal to this process ended it, and 1 would be it.

    One that hangs (no iteration for 50 usual ones, and for 10 minutes at least) is killed and started again, once
    the stacks of all ranks are on the job's timeline. After it gave up, it waits for an order to restore from the
    dashboard and carries that out, where the trainer reports to a server (--stay never: it ends).

    On Linux the newest snapshot of a trainer lies in memory that this process holds. When the trainer dies it is
    made durable, and the next start goes on from there without reading the store (--no-memory-tier: never).

    Examples: holdfast run -- python train.py  ·  holdfast run -- torchrun --nproc-per-node 8 train.py
    """
    from holdfast.client import validate_server
    from holdfast.pacing.settings import parse_budget
    from holdfast.supervisor import STAYS, Limits, Supervisor

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


for _question in (questions.jobs, questions.show, questions.checkpoints, questions.goodput):
    app.command(rich_help_panel=_OPERATING)(_question)
for _edit in (control.budget, control.every, control.policy):
    app.command(rich_help_panel=_OPERATING, context_settings=_MINUS_IS_A_VALUE)(_edit)
for _switch in (control.retention, control.pause, control.resume, checkpointing.checkpoint, probing.probe):
    app.command(rich_help_panel=_OPERATING)(_switch)
for _act in (restoring.restore, restoring.undo, keeping.pin, keeping.unpin, keeping.label, verifying.verify):
    app.command(rich_help_panel=_OPERATING)(_act)
app.add_typer(alerting.app, name="alerts", rich_help_panel=_OPERATING)
app.command(rich_help_panel=_STORES)(forking.fork)
app.command(rich_help_panel=_STORES, context_settings=_MINUS_IS_A_VALUE)(planning.plan)
app.add_typer(stores.app, name="store", rich_help_panel=_STORES)

if __name__ == "__main__":
    main()
