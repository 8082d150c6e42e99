"""How torch.distributed.checkpoint.state_dict's functions are reached: in any order of imports, in
a module that is imported again, and in a later torch."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
import types

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat._torch_patches import dcp_adapter
from fsdp_compat.errors import UsageError
from tests.support.ranks import on_ranks

NAME = "torch.distributed.checkpoint.state_dict"


def test_a_module_imported_later_or_again_is_patched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        dcp_adapter.patches.patch()
    assert sys.meta_path.count(dcp_adapter.patches) == 1
    before = sys.modules[NAME]
    loader = type(before.__loader__)
    monkeypatch.delitem(sys.modules, NAME)
    monkeypatch.setattr(sys.modules["torch.distributed.checkpoint"], "state_dict", before)
    again = importlib.import_module(NAME)
    assert again is not before
    for module in (before, again, importlib.reload(again)):
        assert module.__spec__ is not None
        assert type(module.__loader__) is type(module.__spec__.loader) is loader
        for name in dcp_adapter.FUNCTIONS:
            function = getattr(module, name)
            assert (function.__name__, function.__module__) == (name, NAME)
            assert next(iter(inspect.signature(function).parameters)) == "model"
            assert function.__doc__
        routed = {
            name
            for name, value in vars(module).items()
            if name[0] != "_" and hasattr(value, "__wrapped__")
        }
        assert routed == set(dcp_adapter.FUNCTIONS)


@dataclasses.dataclass
class LaterOptions(StateDictOptions):
    """What a later torch may have."""

    compressed: bool = False


LATER = """
def get_model_state_dict(model, *, submodules=None, options=None, names=None):
    return "torch"
"""


@on_ranks(1)
def test_arguments_of_a_later_torch_are_refused_by_name() -> None:
    model = FSDP(nn.Linear(2, 3))
    state = get_model_state_dict(model, options=LaterOptions(full_state_dict=True))
    assert state.keys() == {"weight", "bias"}
    with pytest.raises(UsageError, match=re.escape(torch.__version__)) as caught:
        get_model_state_dict(model, options=LaterOptions(full_state_dict=True, compressed=True))
    assert "options.compressed" in str(caught.value)
    with pytest.raises(UsageError, match="options has the wrong type"):
        get_model_state_dict(model, options={"full_state_dict": True})  # type: ignore[arg-type]

    theirs = TorchFSDP(nn.Linear(2, 3), device_id=torch.device("cpu"))
    with pytest.raises(UsageError, match="of torch and of fsdp_compat"):
        get_model_state_dict(nn.ModuleList([model, theirs]))

    later = types.ModuleType("later")
    exec(LATER, vars(later))
    for _ in range(2):
        dcp_adapter._route_all(later)
    assert later.get_model_state_dict(nn.Linear(1, 1), names=1) == "torch"
    assert later.get_model_state_dict(model).keys() == {"weight", "bias"}
    with pytest.raises(UsageError, match="does not know: names"):
        later.get_model_state_dict(model, names="short")
