"""The training of the stage `exact`: it prints a line of JSON for each iteration, and may be killed at any moment.

`python -m benchmarks.cuda.exact_job FOLDER --device cuda --iterations 40 --start 0`
"""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import Dataset

import holdfast
from benchmarks.checkpoint.scale import VOCABULARY, TrainingScale
from benchmarks.checkpoint.training import Gpt
from benchmarks.harness import run
from holdfast.store import open_store

TOKENS, BATCH, SAMPLES = 32, 4, 64
SCALE = TrainingScale(layers=2, width=128, tokens=TOKENS, batch=BATCH)
JOB = "exact"
Record = dict[str, Any]


class NoisyTokens(Dataset[tuple[int, Tensor]]):
    """Each sample with its index and with random tokens from the generator of its worker."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, (torch.randint(VOCABULARY, (TOKENS,)) + index) % VOCABULARY


class DropoutGpt(Gpt):
    def forward(self, words: Tensor) -> Tensor:
        x = F.dropout(self.words(words) + self.places.weight, 0.1, self.training)
        for block in self.blocks:
            x = F.dropout(block(x), 0.1, self.training)
        return self.head(self.norm(x))


class ExactTraining:
    """A small GPT in bf16 with fused AdamW, dropout and a loader with workers."""

    def __init__(self, store: Path, device: str, *, start: int = 0, workers: int = 2) -> None:
        # another random state at each resume, so that nothing comes out right by chance
        fresh = not open_store(store).checkpoints(JOB)
        torch.manual_seed(0 if fresh else 100 + start)
        self.device = device
        self.model = DropoutGpt(SCALE).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.loader = holdfast.DataLoader(
            NoisyTokens(), batch_size=BATCH, shuffle=True, seed=1, num_workers=workers
        )
        self.session = holdfast.Session(
            JOB, store=store, server="", every=1, keep=1000, model=self.model, optimizer=self.optimizer
        )

    def records(self) -> Generator[Record, None, None]:
        """Train; yield what each iteration was, before it ends."""
        for indices, words in self.session.batches(self.loader, epochs=1000):
            words = words.to(self.device)
            with torch.autocast(self.device, dtype=torch.bfloat16):
                logits = self.model(words)
                loss = F.cross_entropy(logits.flatten(0, 1).float(), words.flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield {
                "iteration": self.session.iteration + 1,
                "samples": indices.tolist(),
                "random": self._random_state(),
                "updates": int(next(iter(self.optimizer.state.values()))["step"]),
                "loss": loss.item().hex(),
                "state": self._digest(),
            }
            self.session.step()

    def _random_state(self) -> str:
        states = [torch.get_rng_state()]
        if self.device == "cuda":
            states.append(torch.cuda.get_rng_state())
        return hashlib.sha256(b"".join(bytes(each.tolist()) for each in states)).hexdigest()[:16]

    def _digest(self) -> str:
        """Digest of the parameters and the moments of the optimizer."""
        whole = hashlib.sha256()
        for parameter in self.model.parameters():
            state = self.optimizer.state[parameter]
            for tensor in (parameter.detach(), state["exp_avg"], state["exp_avg_sq"]):
                whole.update(tensor.cpu().numpy().tobytes())
        return whole.hexdigest()[:16]


def main(
    store: Path,
    device: str = "cuda",
    iterations: int = 40,
    start: int = 0,
    workers: int = 2,
    any_kernels: bool = False,
    killed: bool = False,
) -> None:
    """Train.

    Args:
        any_kernels: nondeterministic kernels, too
        killed: wait in the last iteration for the kill
    """
    if device == "cpu":
        torch.set_num_threads(1)
    torch.use_deterministic_algorithms(not any_kernels)
    training = ExactTraining(store, device, start=start, workers=workers)
    for record in training.records():
        print(json.dumps(record), flush=True)
        if record["iteration"] >= iterations:
            if killed:
                signal.pause()
            break
    training.session.step()
    training.session.close()


if __name__ == "__main__":
    run(main, is_helper=True)
