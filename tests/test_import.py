"""What importing the package loads, and what it changes in torch, in fresh processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


PROGRAM = """
import json, os, sys
import torch

child = os.fork()
if not child:
    import fsdp_compat
    heavy = ("fsdp", "checkpoint", "tensor")
    print(json.dumps([name for name in heavy if f"torch.distributed.{name}" in sys.modules]))
    sys.exit()
os.waitpid(child, 0)
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter as Writer
from torch.nn.modules.module import _global_parameter_registration_hooks as assignments
from torch.nn.utils import clip_grad_norm_
from torch.optim.optimizer import _global_optimizer_pre_hooks as steps

def looks():
    return [
        clip_grad_norm_.__closure__[0].cell_contents,
        state_dict.get_model_state_dict.__code__,
        state_dict.get_model_state_dict.__kwdefaults__,
        Writer.write_data,
        Writer.prepare_global_plan,
        list(assignments.values()),
        list(steps.values()),
    ]

def changed(before, after):
    return [number for number, (a, b) in enumerate(zip(before, after)) if a is not b and a != b]

before = looks()
import fsdp_compat
found = [changed(before, looks())]
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
for _ in range(2):
    fsdp_compat.FullyShardedDataParallel(torch.nn.Linear(2, 2))
    found.append(changed(before, looks()))
    fsdp_compat._torch_patches.undo()
    found.append(changed(before, looks()))
print(json.dumps(found))
"""


def test_importing_loads_nothing_heavy_and_the_first_wrapped_model_changes_torch() -> None:
    """And one call undoes the changes."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    loaded, changed = (json.loads(line) for line in ended.stdout.splitlines())
    assert loaded == []
    everything = list(range(7))
    assert changed == [[], everything, [], everything, []]
