"""`holdfast store export`: a checkpoint for programs that know nothing of Holdfast."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from holdfast.commands.console import counted, fail, print_json, size
from holdfast.commands.options import Json, StoredCheckpoint, StoreJob, StorePath
from holdfast.commands.progress_bar import progress_bar
from holdfast.commands.stores.arguments import chosen, opened

As = Literal["safetensors", "torch", "dcp"]


class Written(msgspec.Struct, kw_only=True):
    """An export, as printed."""

    job: str
    checkpoint: str
    target: str
    format: As
    objects: list[str]
    tensors: int
    size_bytes: int
    left_out: list[str]
    """Values that the format has no room for."""


def export(
    path: StorePath,
    job: StoreJob,
    checkpoint: StoredCheckpoint,
    target: Annotated[Path, typer.Argument(help="The file to write; a directory for dcp.")],
    format: Annotated[As, typer.Option(help="What will read it; see below.")] = "safetensors",  # noqa: A002
    only: Annotated[str | None, typer.Option(help="One object of the session: model.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an export that is there.")] = False,
    json: Json = False,
) -> None:
    """Write a checkpoint, verified on the way, in a format that other programs read.

    **safetensors**: one file of tensors; with --only model, what model.load_state_dict(load_file(TARGET)) takes.
    **torch**: a dict of each object's state_dict(), for torch.load(TARGET, weights_only=True).
    **dcp**: a directory for torch.distributed.checkpoint.load.

    Of a job of several ranks, tensors that these shared out are written whole; of what each rank had of its own,
    such as buffers, that of rank 0.

    TARGET appears when all of it is written; an export that is interrupted leaves nothing.

    Examples: holdfast store export checkpoints char-gpt latest gpt.safetensors --only model  ·  holdfast store
    export checkpoints char-gpt 1200 gpt.pt --format torch
    """
    with opened(path) as store, _ending_on_sigterm():
        name = chosen(store, job, checkpoint)
        try:
            from holdfast.checkpoint.export import export as write
        except ModuleNotFoundError as error:
            fail(f"to export, {error.name} is needed: install Holdfast with its extra `torch`")
        try:
            with progress_bar(f"{job} {name}") as progress:
                made = write(store, job, name, target, format, only=only, force=force, progress=progress)
        except (FileExistsError, LookupError) as error:
            fail(str(error.args[0]))
        except KeyboardInterrupt:
            fail(f"interrupted; {target} was not written")
    written = Written(
        job=job,
        checkpoint=name,
        target=str(target),
        format=format,
        objects=made.objects,
        tensors=made.tensors,
        size_bytes=made.size_bytes,
        left_out=made.left_out,
    )
    if json:
        print_json(written)
    else:
        _print(written)


def _print(written: Written) -> None:
    what = f"{', '.join(written.objects)}: {counted(written.tensors, 'tensor')}, {size(written.size_bytes)}"
    print(f"wrote {written.target} from {written.job} {written.checkpoint} ({what})")
    if written.left_out:
        few = ", ".join(written.left_out[:3]) + (", …" if len(written.left_out) > 3 else "")
        print(f"left out {counted(len(written.left_out), 'value')} that are no tensors: {few}")


@contextlib.contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Let a SIGTERM end the command as Ctrl-C does, so that nothing half-written stays."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
