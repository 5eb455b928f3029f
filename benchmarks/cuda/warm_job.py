"""The script of the stage `warm`: it trains for four iterations, with a line for each."""

import json
import os
import sys
import time

import torch
from torch import nn

import holdfast

device, starts = sys.argv[1], int(sys.argv[2])
model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
session = holdfast.Session("warm", every=1, model=model, optimizer=optimizer)
session.resume()
for _ in range(4):
    model(torch.ones(8, 256, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    session.step()
    session.wait(60)
    print(json.dumps({"iteration": session.iteration, "pid": os.getpid()}), flush=True)
    if session.attempt < starts and session.iteration % 2 == 0:
        time.sleep(60)  # until it is killed

session.close()
