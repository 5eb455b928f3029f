"""`holdfast store export`: a checkpoint in the format of another program."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from holdfast.commands.console import counted, fail, print_json, progress_bar, say
from holdfast.commands.options import Json, StoredCheckpoint, StoreJob, StorePath
from holdfast.commands.stores.arguments import chosen, opened
from holdfast.units import format_bytes

As = Literal["safetensors", "torch", "dcp"]


def export(
    path: StorePath,
    job: StoreJob,
    checkpoint: StoredCheckpoint,
    target: Annotated[Path, typer.Argument(help="The file to write, or the directory for dcp.")],
    format: Annotated[As, typer.Option(help="The format of the export; see above.")] = "safetensors",  # noqa: A002
    only: Annotated[
        str | None, typer.Option(help="Export only this object of the session, such as model.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing export.")] = False,
    degraded: Annotated[
        bool, typer.Option("--degraded", help="Export what is left of a damaged checkpoint.")
    ] = False,
    json: Json = False,
) -> None:
    """Verify a checkpoint and write it in a format that other programs read.

    **safetensors**: one file of tensors; with --only model, a file for model.load_state_dict(load_file(TARGET)).
    **torch**: a dict of the state_dict() of each object, for torch.load(TARGET, weights_only=True).
    **dcp**: a directory for torch.distributed.checkpoint.load.

    Sharded tensors of several ranks are written complete. Of what each rank had for itself, such as buffers, that
    of rank 0 is written.

    TARGET is written atomically; an interrupted export leaves nothing.

    A damaged checkpoint is refused. With --degraded, a safetensors file gets the tensors that are sound or can be
    repaired, and the others are listed. Where parity has repaired the important bytes of numbers alone, the middle
    of what they can be replaces their other bytes. Training from such a file is no exact resume.

    Examples: holdfast store export checkpoints char-gpt latest gpt.safetensors --only model  ·  holdfast store
    export checkpoints char-gpt 1200 gpt.pt --format torch
    """
    with opened(path) as store, _interrupt_on_sigterm():
        name = chosen(store, job, checkpoint)
        try:
            from holdfast.checkpoint.export import export as write
        except ModuleNotFoundError as error:
            fail(f"export needs {error.name}: install Holdfast with its extra `torch`")
        try:
            with progress_bar(f"{job} {name}") as progress:
                made = write(
                    store, job, name, target, format, only=only, force=force, degraded=degraded, progress=progress
                )
        except (FileExistsError, LookupError, ValueError) as error:
            fail(str(error.args[0]))
        except KeyboardInterrupt:
            fail(f"interrupted; {target} was not written")
    if json:
        about = {"job": job, "checkpoint": name, "target": str(target), "format": format}
        print_json(about | msgspec.to_builtins(made))
        return
    what = f"{', '.join(made.objects)}: {counted(made.tensors, 'tensor')}"
    say(f"wrote {target} from {job} {name} ({what}, {format_bytes(made.size_bytes)})")
    if made.inexact:
        from holdfast.checkpoint.degraded import describe_lost

        say(f"replaced {describe_lost(made.inexact)}")
    if made.lost:
        say(f"lost {counted(len(made.lost), 'damaged tensor')}: {', '.join(made.lost)}")
    if made.left_out:
        few = ", ".join(made.left_out[:3]) + (", …" if len(made.left_out) > 3 else "")
        say(f"left out {counted(len(made.left_out), 'value')} that are not tensors: {few}")


@contextlib.contextmanager
def _interrupt_on_sigterm() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, so that nothing unfinished remains."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
