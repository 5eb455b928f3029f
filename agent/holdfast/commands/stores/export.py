"""`holdfast store export` and `import`: checkpoints in the formats of other programs."""

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
from holdfast.units import format_bytes, parse_bytes

As = Literal["safetensors", "torch", "dcp", "hf"]


def export(
    path: StorePath,
    job: StoreJob,
    checkpoint: StoredCheckpoint,
    target: Annotated[Path, typer.Argument(help="The file to write, or the directory for dcp and hf.")],
    format: Annotated[As, typer.Option(help="The format of the export; see above.")] = "safetensors",  # noqa: A002
    only: Annotated[
        str | None, typer.Option(help="Export only this object of the session, such as model.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing export.")] = False,
    degraded: Annotated[
        bool, typer.Option("--degraded", help="Export the intact tensors of a damaged checkpoint.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option(help="For hf: the model's config.json, or a directory with it and a tokenizer.")
    ] = None,
    shard_size: Annotated[
        str, typer.Option(help="For dcp and hf: maximum size of a file, and memory used.")
    ] = "5GB",
    json: Json = False,
) -> None:
    """Verify a checkpoint and write it in a format that other programs read.

    **safetensors**: one file of tensors; with --only model, a file for model.load_state_dict(load_file(TARGET)).
    **torch**: a dict of the state_dict() of each object, for torch.load(TARGET, weights_only=True).
    **dcp**: a directory for torch.distributed.checkpoint.load.
    **hf**: a model directory for AutoModel.from_pretrained(TARGET), with the files of --config.

    Sharded tensors of several ranks, and stages of a pipeline, are written complete. Of state that each rank has
    its own copy of, such as buffers, the copy of rank 0 is written.

    TARGET is written atomically; an interrupted export leaves nothing.

    A damaged checkpoint is refused. With --degraded, a safetensors file gets the tensors that are sound or can be
    repaired, and the others are listed. Where parity can repair only the important bytes of numbers, their other
    bytes are replaced by the midpoint of their possible values. Training from such a file is not an exact resume.

    Examples: holdfast store export checkpoints char-gpt latest gpt.safetensors --only model  ·  holdfast store
    export checkpoints char-gpt 1200 gpt.pt --format torch  ·  holdfast store export checkpoints gpt2 latest gpt2
    --format hf --config config.json
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
                    store, job, name, target, format, only=only, force=force, degraded=degraded, config=config,
                    shard_bytes=int(parse_bytes(shard_size, "--shard-size")), progress=progress,
                )  # fmt: skip
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


def import_(
    path: StorePath,
    job: StoreJob,
    source: Annotated[Path, typer.Argument(help="A directory of torch.distributed.checkpoint.save.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="The entry with the model's state; '' if its names are at the top level. Default: model, or the "
            "top level."
        ),
    ] = None,
    keyword: Annotated[str, typer.Option("--as", help="The keyword of the model in the session.")] = "model",
    iteration: Annotated[int, typer.Option(min=0, help="The iteration at which the new job begins.")] = 0,
    shard_size: Annotated[str, typer.Option(help="Maximum size of a file, and memory used.")] = "5GB",
    json: Json = False,
) -> None:
    """Begin a new job with the model of a torch.distributed.checkpoint directory (DCP), such as one of torchtitan.

    JOB is the name of the new job. Its first start resumes from the model, on any number of ranks. Only the model
    is imported. Name all other objects in session.keep("optimizer", "scheduler"), before session.resume() or
    session.batches(...); they start as the script creates them. Random numbers begin with the iteration as their
    seed.

    No code in the directory is run. An interrupted import leaves no checkpoint.

    Examples: holdfast store import checkpoints llama-2 outputs/checkpoint/step-1000  ·  holdfast store import
    checkpoints llama-2 step-1000 --model app --iteration 1000
    """
    if "://" not in path:
        Path(path).mkdir(parents=True, exist_ok=True)
    with opened(path) as store, _interrupt_on_sigterm():
        try:
            from holdfast.checkpoint.dcp_import import import_dcp
        except ModuleNotFoundError as error:
            fail(f"import needs {error.name}: install Holdfast with its extra `torch`")
        try:
            most = int(parse_bytes(shard_size, "--shard-size"))
            with progress_bar(f"{source}") as progress:
                made = import_dcp(
                    source, store, job, model=model, keyword=keyword, iteration=iteration, shard_bytes=most,
                    progress=progress,
                )  # fmt: skip
        except ValueError as error:
            fail(str(error.args[0]))
        except KeyboardInterrupt:
            fail(f"interrupted; {job} was not created")
    if json:
        print_json(msgspec.to_builtins(made))
        return
    size = format_bytes(made.size_bytes)
    say(f"{job} begins with {made.checkpoint}: {keyword}, {counted(made.tensors, 'tensor')}, {size}")
    if made.left_out:
        few = ", ".join(made.left_out[:5]) + (", …" if len(made.left_out) > 5 else "")
        say(f"left out: {few}")
    say(f'start it with this store and holdfast.Session("{job}", {keyword}=…); name other objects in session.keep')


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
