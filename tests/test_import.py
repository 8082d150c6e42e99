"""What importing the package loads, and what it changes in torch, in a fresh process and forks."""

from __future__ import annotations

import json

from tests.support.programs import ROOT, python

PROGRAM = """
import atexit, json, os, sys, types
import fsdp_compat
assert "torch" not in sys.modules
import torch
import torch.distributed as dist

def import_api_and_wrap():
    package = sys.modules["fsdp_compat"] = types.ModuleType("fsdp_compat")  # not the real one
    package.__path__ = ["fsdp_compat"]
    import fsdp_compat.api, fsdp_compat.wrap
    return loaded("fsdp")

def import_all():
    from fsdp_compat import FSDPModule
    found = loaded("fsdp", "checkpoint", "tensor") + compiler()
    for name in ("checkpoint", "optim"):
        assert getattr(fsdp_compat, name) is sys.modules[f"fsdp_compat.{name}"]
    for name in ("no_such_name", "_no_such_name", "__bool__", "a.b", "no.such.name", ""):
        assert not hasattr(fsdp_compat, name), name
    return found

def step():
    import fsdp_compat
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = fsdp_compat.FullyShardedDataParallel(torch.nn.Linear(4, 4), use_orig_params=True)
    model(torch.ones(2, 4)).sum().backward()
    model.clip_grad_norm_(1.0)
    model.state_dict()
    return compiler()

def handlers():
    found = {"fork": [], "exit": []}

    def recorded(kind, register):
        def call(*args, **kwargs):
            found[kind].append(sys._getframe(1).f_globals["__name__"])
            return register(*args, **kwargs)
        return call

    os.register_at_fork = recorded("fork", os.register_at_fork)
    atexit.register = recorded("exit", atexit.register)
    import fsdp_compat.checkpoint
    fsdp_compat.__all__  # loads the package
    return found

def loaded(*names):
    return [name for name in names if f"torch.distributed.{name}" in sys.modules]

def compiler():
    return ["torch._dynamo"] if "torch._dynamo" in sys.modules else []

for call in (import_api_and_wrap, import_all, step, handlers):
    child = os.fork()
    if not child:
        found = call()
        print(json.dumps(found), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter as Writer
from torch.nn.modules.module import _global_parameter_registration_hooks as assignments
from torch.nn.utils import clip_grad_norm_
from torch.optim.optimizer import _global_optimizer_pre_hooks as steps

def looks():
    return [
        clip_grad_norm_,
        torch.nn.utils.clip_grad._get_total_norm,
        get_model_state_dict,
        state_dict.get_model_state_dict,
        Writer.write_data,
        Writer.prepare_global_plan,
        list(assignments.values()),
        list(steps.values()),
        torch.optim.Optimizer.state_dict,
        torch.optim.Optimizer.load_state_dict,
        torch.nn.parallel.DistributedDataParallel.__init__,
        torch.nn.Module.requires_grad_,
    ]

def changed(before, after):
    return [number for number, (a, b) in enumerate(zip(before, after)) if a is not b and a != b]

before = looks()
fsdp_compat.install  # all names come with the first
found = [changed(before, looks())]
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(2):
    fsdp_compat.FullyShardedDataParallel(torch.nn.Linear(2, 2))
    found.append(changed(before, looks()))
    fsdp_compat.uninstall()
    found.append(changed(before, looks()))
print(json.dumps(found))
"""


def test_importing_loads_nothing_heavy_and_the_first_wrapped_model_changes_torch() -> None:
    """And one call undoes the changes. No compiler is imported by a step either. The handlers of
    forks and exits are those that are listed."""
    ended = python("-c", PROGRAM)
    *loaded, found, changed = (json.loads(line) for line in ended.stdout.splitlines())
    assert loaded == [[], [], []]
    everything = list(range(12))
    assert changed == [[], everything, [], everything, []]

    waits, background = "fsdp_compat._comm.board", "fsdp_compat.checkpoint._background"
    connections = "fsdp_compat._comm.gloo_connections"
    assert {*found["fork"]} == {f"{waits}.progress", f"{waits}.board", connections, background}
    assert {*found["exit"]} == {f"{waits}.board", background}
    listed = (ROOT / "fsdp_compat" / "_torch_patches" / "__init__.py").read_text()
    assert all(name.partition(".")[2].replace(".", "/") in listed for name in found["fork"])
