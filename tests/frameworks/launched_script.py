"""A script that dies in its first start under a launcher.

launched_script.py STORE LEDGER
"""

from __future__ import annotations

import os
import sys

import torch

import holdfast

ITERATIONS, DIES_AT = 12, 7
store, ledger = sys.argv[1:]
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
with holdfast.Session("launched", model=model, optimizer=optimizer, store=store, every=1) as session:
    start = session.resume()
    with open(ledger, "a") as file:
        for iteration in range(start, ITERATIONS):
            optimizer.zero_grad()
            loss = model(torch.full((4, 8), float(iteration))).square().mean()
            loss.backward()
            optimizer.step()
            file.write(f"{iteration} {loss.item()!r}\n")
            file.flush()
            session.step(loss=loss)
            session.wait(60)
            if iteration + 1 == DIES_AT and is_first:
                os._exit(3)
