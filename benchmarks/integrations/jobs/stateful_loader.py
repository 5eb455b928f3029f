"""A plain loop over a loader of another library that has a position of its own."""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import time
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

import holdfast
from benchmarks.integrations import job

UPDATE_SECONDS = 0.04
"""What a larger model would take, so that a kill hits the update that it is meant for."""


class NoiseByIndex(job.AugmentedSamples):
    """Samples with noise that depends on the index alone, so that it is the same in any worker."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        generator = torch.Generator().manual_seed(index)
        noisy = self._features[index] + 0.1 * torch.randn(job.FEATURES, generator=generator)
        return noisy, self._classes[index], index


def torchdata_loader(args: argparse.Namespace) -> Iterable[Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    # torchdata does not keep the random state of workers
    samples = NoiseByIndex() if args.workers else job.AugmentedSamples()
    return StatefulDataLoader(samples, batch_size=job.BATCH_SIZE, shuffle=True, num_workers=args.workers)


def mosaic_loader(args: argparse.Namespace) -> Iterable[Any]:
    streaming = import_streaming()
    shards: Path = args.log.parent / "shards"
    if not (shards / "index.json").exists():
        with streaming.MDSWriter(out=str(shards), columns={"index": "int"}) as writer:
            for index in range(job.SAMPLES):
                writer.write({"index": index})
    # what a killed process left in shared memory
    streaming.base.util.clean_stale_shared_memory()
    samples = NoiseByIndex() if args.workers else job.AugmentedSamples()

    class Augmented(streaming.StreamingDataset):  # type: ignore[misc, name-defined]
        def __getitem__(self, position: Any) -> Any:
            return samples[int(super().__getitem__(position)["index"])]

    stream = Augmented(local=str(shards), shuffle=True, shuffle_seed=job.SEED, batch_size=job.BATCH_SIZE)
    return streaming.StreamingDataLoader(stream, batch_size=job.BATCH_SIZE, num_workers=args.workers)  # type: ignore[no-any-return]


def import_streaming() -> Any:
    """Import Mosaic's streaming, also without the torchvision that only its image datasets need."""
    importlib.import_module("transformers.tokenization_utils_base")  # looks for torchvision, too
    try:
        importlib.import_module("torchvision")
    except ImportError:
        for name in ("torchvision", "torchvision.datasets", "torchvision.transforms.functional"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
        sys.modules["torchvision.transforms.functional"].to_tensor = None  # type: ignore[attr-defined]
    return importlib.import_module("streaming")


def grain_loader(args: argparse.Namespace) -> Iterable[Any]:
    import grain

    return grain.DataLoader(  # type: ignore[no-any-return]
        data_source=range(job.SAMPLES),
        sampler=grain.samplers.IndexSampler(job.SAMPLES, shuffle=True, seed=job.SEED, num_epochs=job.EPOCHS),
        operations=[_augmentation(), grain.transforms.Batch(job.BATCH_SIZE)],
        worker_count=args.workers,
    )


def grain_dataset(args: argparse.Namespace) -> Iterable[Any]:
    import grain

    indices = grain.MapDataset.range(job.SAMPLES).seed(job.SEED).shuffle().random_map(_augmentation())
    stream = indices.batch(job.BATCH_SIZE).repeat(job.EPOCHS).to_iter_dataset()
    return (
        stream.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(args.workers)) if args.workers else stream
    )  # type: ignore[no-any-return]


def _augmentation() -> Any:
    import grain

    class Augmentation(grain.transforms.RandomMap):  # type: ignore[misc, name-defined]
        def random_map(self, index: int, rng: numpy.random.Generator) -> Any:
            features, label, _ = NoiseByIndex()[int(index)]
            noisy = features.numpy() + 0.1 * rng.standard_normal(job.FEATURES, dtype=numpy.float32)
            return noisy, label, int(index)

    return Augmentation()


LOADERS: dict[str, Callable[[argparse.Namespace], Iterable[Any]]] = {
    "torchdata": torchdata_loader,
    "mosaic": mosaic_loader,
    "grain": grain_loader,
    "grain-dataset": grain_dataset,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--loader", choices=LOADERS, default="torchdata")
    args = job.arguments(parser)
    if args.resume_by == "framework":
        parser.error("a loader takes no checkpoints itself")
    log = job.UpdateLog(args.log)
    torch.manual_seed(job.SEED)
    random.seed(job.SEED)
    model = job.classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = LOADERS[args.loader](args)
    session = holdfast.Session("loader", store=args.store, every=job.EVERY, model=model, optimizer=optimizer)
    epochs = 1 if args.loader.startswith("grain") else job.EPOCHS  # Grain repeats the epochs itself
    for number, batch in enumerate(session.batches(loader, epochs=epochs), start=1):
        features, classes, samples = (torch.as_tensor(each) for each in batch)
        loss = nn.functional.cross_entropy(model(features), classes)
        (loss / job.ACCUMULATE).backward()
        log.batch(loss.item(), samples)
        if number % job.ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(UPDATE_SECONDS)
            log.update(session.iteration + 1)
            session.step(loss=loss)
    log.finished()
    session.close()


if __name__ == "__main__":
    main()
