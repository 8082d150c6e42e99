"""To be imported before forks: one step of a wrapped model. It patches torch, which in a fork would
copy the pages of all modules, and imports what first steps import."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from torch import nn

from fsdp_compat import FullyShardedDataParallel as FSDP

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
_model = FSDP(nn.Linear(2, 2))
_model(torch.ones(1, 2)).sum().backward()
torch.optim.SGD(_model.parameters(), lr=0.0, momentum=0.9).step()
del _model  # with its group, which has threads
gc.collect()
dist.destroy_process_group()
