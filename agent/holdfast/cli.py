"""The `holdfast` command line."""

from __future__ import annotations

import inspect
import os
from importlib.metadata import entry_points, version
from typing import Annotated, Any, NoReturn, cast

import typer
from typer.core import TyperCommand, TyperGroup

from holdfast.commands import (
    account,
    alerts,
    approvals,
    control,
    doctor,
    fork,
    plan,
    questions,
    report,
    requests,
    store_limits,
    stores,
    training,
    values,
)
from holdfast.commands.console import EXIT_CODES, EXIT_CODES_WITH_SERVER, EXIT_USAGE, fail

COMMANDS = "holdfast.commands"
"""The entry-point group through which other packages, such as the server, add commands."""

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
        "Then run `holdfast jobs` or open http://127.0.0.1:7117.\n\n" + EXIT_CODES_WITH_SERVER + "."
    ),
)

_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
_COMMAND_LAST = {"allow_interspersed_args": False}
_MINUS_IS_A_VALUE = {"ignore_unknown_options": True}
"""Context settings of commands that take numbers: `budget -1` is out of range, not an unknown option."""

_TRAINING, _OPERATING, _STORES = "Training", "Operating a job", "Without a server"
_SERVER = "On the server's machine"


class _PlainHelp:
    """Leaves Python types out of a command's help: `--json`, not `--json <bool>`."""

    def get_params(self, context: Any) -> list[Any]:
        found: list[Any] = super().get_params(context)  # type: ignore[misc]
        for parameter in found:
            parameter.display_type = lambda _: ""
        return found


class _PlainCommand(_PlainHelp, TyperCommand): ...


class _PlainGroup(_PlainHelp, TyperGroup): ...


def _exit_codes_after(command: Any) -> str | None:
    """Return what to add to a command's help, unless its docstring explains exit codes or it has none."""
    text = command.__doc__ or "" if command is not None else ""
    if not text or "exit code" in text:
        return None
    asks_server = inspect.signature(command).parameters.keys() >= {"server", "token"}
    return f"{EXIT_CODES_WITH_SERVER if asks_server else EXIT_CODES}."


def _with_plain_help(commands: typer.Typer) -> typer.Typer:
    for command in commands.registered_commands:
        command.cls = _PlainCommand
        command.epilog = _exit_codes_after(command.callback)
    for info in (commands.info, *commands.registered_groups):
        info.cls = _PlainGroup
    if commands.registered_callback is not None:
        commands.registered_callback.cls = _PlainGroup
        commands.registered_callback.epilog = _exit_codes_after(commands.registered_callback.callback)
    for group in commands.registered_groups:
        _with_plain_help(cast("typer.Typer", group.typer_instance))
    return commands


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
        _with_plain_help(command)(args, prog_name=f"holdfast {name}")
        raise typer.Exit
    fail(NO_SERVER)


def _add_server_command(name: str, summary: str, panel: str) -> None:
    @app.command(name, help=summary, context_settings=_PASSED_ON, add_help_option=False, rich_help_panel=panel)
    def command(context: typer.Context) -> None:
        _of_server(name, context.args)


_add_server_command("serve", "Start the server and its dashboard.", _TRAINING)
for _name, _summary in (
    ("user", "Manage the users of a server with accounts: add, list, role, remove, reset-link, setup-link."),
    ("project", "Manage the projects of a server with accounts: add, list, move a job to one."),
    ("token", "Manage the access keys of a server with accounts: create, list, revoke."),
    ("audit", "List who changed what on a server, or verify that the audit log is unaltered."),
    ("db", "Manage the server's database: size, backup, restore, and limits on what it keeps."),
):
    _add_server_command(_name, _summary, _SERVER)


_Hang = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="N",
        help="Restart a trainer that finishes no iteration for N typical iteration times; 0: never.",
    ),
]
_Stay = Annotated[
    str,
    typer.Option(
        metavar="WHEN", help="When to wait for a restore request after the last start: never, failure, always."
    ),
]


_LeaveHost = Annotated[
    int,
    typer.Option(
        min=0, metavar="N", help="Exit with status 76 after N hardware faults of this host in 24 h; 0: never."
    ),
]


_Warm = Annotated[bool, typer.Option(help="Restart by forking a process that has the script's imports (Linux).")]


@app.command(context_settings=_COMMAND_LAST, rich_help_panel=_TRAINING)
def run(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="The training command, after `--`.")],
    store: Annotated[
        str | None, typer.Option(metavar="PATH", help="Sets HOLDFAST_STORE: where checkpoints are stored.")
    ] = None,
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="Sets HOLDFAST_SERVER: the server to report to.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="BUDGET", help="Sets HOLDFAST_BUDGET: the allowed overhead, as in 2%.")
    ] = None,
    starts: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Give up after this many starts in a row without a new iteration."),
    ] = 5,
    grace: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long the trainer may take to exit after a signal.")
    ] = 30.0,
    hang: _Hang = 50.0,
    stay: _Stay = "failure",
    leave_host: _LeaveHost = 0,
    memory_tier: Annotated[
        bool, typer.Option(help="Keep the newest snapshot in memory that outlives the trainer (Linux).")
    ] = True,
    capture_output: Annotated[
        bool, typer.Option(help="Send the last 1,000 lines of output to the server; secrets are masked.")
    ] = True,
    warm: _Warm = True,
) -> None:
    """Run a training command, and restart it after a crash; it resumes from its newest checkpoint.

    The command restarts after any signal and any exit status except 0: first immediately, then with increasing
    delays. The supervisor gives up after 5 starts in a row (--starts) without a new iteration, and immediately if
    the command cannot start, or an import or its syntax fails before the first iteration. Ctrl-C and SIGTERM go to
    the trainer; a second one, two or more seconds later, kills the trainer and its processes. The exit code is the
    trainer's; if a signal to this process ended a trainer that exits with 1, as torchrun does, the exit code is
    128 + the signal.

    A hung trainer (no iteration for 50 typical iteration times and at least 10 minutes) is killed and restarted;
    the stacks of all ranks are first recorded on the job's timeline. After giving up, the supervisor keeps running
    if a server is configured and waits for a restore request (--stay never turns this off).

    The supervisor holds the newest snapshot in its memory. When the trainer dies, the supervisor makes the
    snapshot durable, and the next start resumes from it without reading the store (--no-memory-tier turns this
    off). The last lines of the trainer's output go to the server as well (--no-capture-output turns this off). A
    process with the script's imports makes restarts fast (--no-warm turns this off).

    Examples: holdfast run -- python train.py  ·  holdfast run -- torchrun --nproc-per-node 8 train.py
    """
    from holdfast.client import validate_server
    from holdfast.pacing.settings import parse_budget
    from holdfast.supervisor.restart_limits import RestartLimits
    from holdfast.supervisor.supervisor import STAYS, Supervisor

    given = {"HOLDFAST_STORE": store, "HOLDFAST_SERVER": server, "HOLDFAST_BUDGET": budget}
    environment = {name: value for name, value in given.items() if value is not None}
    try:
        settings = os.environ | environment
        if budget_text := settings.get("HOLDFAST_BUDGET"):
            parse_budget(budget_text)
        if address := settings.get("HOLDFAST_SERVER"):
            validate_server(address)
        if stay not in STAYS:
            raise ValueError(f"stay {stay!r}: give one of {', '.join(STAYS)}")
        limits = RestartLimits(
            fruitless_starts=starts, grace_seconds=grace, hang_factor=hang, host_faults=leave_host
        )
        status = Supervisor(
            command, limits=limits, environment=environment, stay=stay, memory_tier=memory_tier,
            capture_output=capture_output, warm=warm,
        ).run()  # fmt: skip
    except ValueError as error:
        fail(str(error), EXIT_USAGE)
    except OSError as error:
        fail(f"cannot start {command[0]!r}: {error.strerror}", 127)
    raise typer.Exit(status)


_OPERATIONS = (
    questions.jobs, questions.show, questions.config, questions.logs,
    questions.checkpoints, questions.goodput, report.report, account.account,
    control.budget, control.write_budget, control.unsaved_work, control.every, control.policy, control.retention,
    control.on_trouble,
    control.pause_checkpoints, control.resume_checkpoints,
    requests.checkpoint, requests.probe, requests.restore, requests.undo, values.value, training.pause,
    training.end,
    control.pin, control.unpin, control.label, requests.verify, control.delete, control.reset_numbers,
    approvals.protect, approvals.approve, approvals.decline,
)  # fmt: skip
for _operation in _OPERATIONS:
    _takes_numbers = _operation in (
        control.budget,
        control.write_budget,
        control.unsaved_work,
        control.every,
        control.policy,
        values.value,
    )
    _settings = _MINUS_IS_A_VALUE if _takes_numbers else None
    app.command(rich_help_panel=_OPERATING, context_settings=_settings)(_operation)
app.command("continue", rich_help_panel=_OPERATING)(training.go_on)
app.add_typer(alerts.app, name="alerts", rich_help_panel=_OPERATING)
app.add_typer(store_limits.app, name="stores", rich_help_panel=_OPERATING)
app.command(rich_help_panel=_TRAINING)(doctor.doctor)
app.command(rich_help_panel=_STORES)(fork.fork)
app.command(rich_help_panel=_STORES, context_settings=_MINUS_IS_A_VALUE)(plan.plan)
app.add_typer(stores.app, name="store", rich_help_panel=_STORES)
_with_plain_help(app)

if __name__ == "__main__":
    main()
