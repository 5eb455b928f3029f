"""A script of Accelerate for several ranks. Arguments: store."""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator

import holdfast.integrations.accelerate

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
session = holdfast.integrations.accelerate.session(accelerator, "unaware", store=sys.argv[1], model=model)
session.close()
