"""Optimizers of the odd model, their states in every form, and what is sent for them."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullOptimStateDictConfig as TorchFullOptimConfig
from torch.distributed.fsdp import FullStateDictConfig as TorchFullConfig
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import StateDictType as TorchType

from fsdp_compat import FullOptimStateDictConfig, StateDictType
from fsdp_compat import FullyShardedDataParallel as FSDP
from tests.support.odd_model import Config, assert_same, make_model, shard, torch_model, train
from tests.support.parity import groups_of

Make = Callable[[Any], torch.optim.Optimizer]
Trained = tuple[Any, Any]  # a model and its optimizer

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
OPTIMIZERS: dict[str, Make] = {
    "Adam": functools.partial(torch.optim.Adam, lr=0.02, amsgrad=True),
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1),
    "SGD": functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=0.02),
}
FEW_CONFIGS: tuple[Config, ...] = (
    ("FULL_SHARD", False, "blocks"),
    ("FULL_SHARD", True, "always"),
    ("SHARD_GRAD_OP", True, "none"),
    ("NO_SHARD", False, "blocks"),
)


def params_of(model: nn.Module, groups: bool) -> Any:
    """All parameters, or two groups of them."""
    if not groups:
        return model.parameters()
    named = list(model.named_parameters())
    others = [p for name, p in named if not name.endswith("weight")]
    return [
        {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.3},
        {"params": others, "weight_decay": 0.0, "lr": 0.005},
    ]


def made(make: Make | str, params: Any) -> Any:
    return (OPTIMIZERS[make] if isinstance(make, str) else make)(params)


def trained(
    model: nn.Module, make: Make | str = "AdamW", steps: int = 2, groups: bool = False
) -> Trained:
    """Return a model and an optimizer of it after some steps."""
    optimizer = made(make, params_of(model, groups))
    train(model, optimizer, range(steps))
    return model, optimizer


def sharded(config: Config, make: Make | str = "AdamW", steps: int = 2, **options: Any) -> Trained:
    """Return the odd model in ``config``, and an optimizer of it after some steps."""
    return trained(shard(make_model(), config), make, steps, **options)


def torchs_pair(
    use_orig_params: bool, make: Make | str = "Adam", steps: int = 2
) -> tuple[Trained, Trained]:
    """Return torch's FSDP1 and ours, trained alike."""
    form = "original" if use_orig_params else "flat"
    theirs = torch_model(f"FSDP1 {form}", 0, odd=False)
    ours = shard(make_model(odd=False), ("FULL_SHARD", use_orig_params, "as torch"))
    return trained(theirs, make, steps), trained(ours, make, steps)


class Named(torch.optim.Adam):
    """Its state dict is keyed by what the model calls its parameters, as torch.distributed.optim's
    and TorchRec's are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.02)
        self.names = [name for name, _ in model.named_parameters()]

    def state_dict(self) -> dict[str, Any]:
        return rekeyed_as(super().state_dict(), dict(enumerate(self.names)))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        numbers = {name: number for number, name in enumerate(self.names)}
        super().load_state_dict(rekeyed_as(state_dict, numbers))


def rekeyed_as(state_dict: Mapping[str, Any], keys: Mapping[Any, Any]) -> dict[str, Any]:
    groups = state_dict["param_groups"]
    return {
        "state": {keys[key]: entry for key, entry in state_dict["state"].items()},
        "param_groups": [{**g, "params": [keys[key] for key in g["params"]]} for g in groups],
    }


class TakesAsItIs(torch.optim.SGD):
    """Takes its state as it is: torch's own way casts 8-bit states to the parameter's dtype."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.state.clear()
        self.state.update(
            {parameters[number]: dict(entry) for number, entry in state_dict["state"].items()}
        )


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise ValueError("no closure")


def full_state(model: nn.Module, optimizer: Any, **options: Any) -> dict[str, Any]:
    with FSDP.state_dict_type(model, FULL, None, FullOptimStateDictConfig(**options)):
        return FSDP.optim_state_dict(model, optimizer)


def sharded_state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    with FSDP.state_dict_type(model, SHARDED):
        return FSDP.optim_state_dict(model, optimizer)


def loadable(model: nn.Module, optimizer: Any, state: Any, **options: Any) -> dict[str, Any]:
    return FSDP.optim_state_dict_to_load(model, optimizer, state, **options)


def from_rank0(model: nn.Module, optimizer: Any, state: Any, **options: Any) -> dict[str, Any]:
    """What is loadable of the first rank's ``state``."""
    alone = state if dist.get_rank() == 0 else None
    config = FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, FULL, None, config):
        return loadable(model, optimizer, alone, **options)


def load(model: nn.Module, optimizer: Any, state: Any) -> Any:
    """Load a state, and return the optimizer's full state."""
    optimizer.load_state_dict(loadable(model, optimizer, state))
    return full_state(model, optimizer)["state"]


def load_into_new(model: nn.Module, make: Make | str, state: Any, groups: bool = False) -> Any:
    """Load a state into another optimizer of the model, and return its full state."""
    return load(model, made(make, params_of(model, groups)), state)


def older(name: str, *args: Any, **kwargs: Any) -> Any:
    """Make one of the older calls, whose deprecation does not matter here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return getattr(FSDP, name)(*args, **kwargs)


TORCHS_FULL = (
    TorchType.FULL_STATE_DICT,
    TorchFullConfig(offload_to_cpu=False),
    TorchFullOptimConfig(offload_to_cpu=False, rank0_only=False),
)


def torchs_full(model: Any, optimizer: Any, state: Any = None) -> Any:
    """By torch's newer call: with its offload to the CPU, which the older has, values are wrong on
    the CPU."""
    with TorchFSDP.state_dict_type(model, *TORCHS_FULL):
        return TorchFSDP.optim_state_dict(model, optimizer, state)


def num_sent(model: nn.Module, clear: bool = False) -> int:
    return sent(model, clear)[0]


def sent(model: nn.Module, clear: bool = True) -> tuple[int, int]:
    """Return how many messages this rank has sent for a model, and their bytes, which are counted
    anew afterwards."""
    groups = [group for group, _ in groups_of(model)]
    comms = {id(comm): comm for group in groups for comm in (group.shard, group.replica)}
    traffics = [comm.traffic for comm in comms.values()]
    found = sum(t.counts.total() for t in traffics), sum(t.nbytes.total() for t in traffics)
    for traffic in traffics if clear else ():
        traffic.clear()
    return found


def storages_of(model: nn.Module) -> set[int]:
    """Where the memory of each group's shard begins."""
    return {group.store.shard.untyped_storage().data_ptr() for group, _ in groups_of(model)}


def assert_compact(entries: Mapping[Any, Mapping[Any, Any]]) -> None:
    """No tensor shares memory with another one, or keeps more than its own alive."""
    tensors = [
        value
        for entry in entries.values()
        for value in entry.values()
        if isinstance(value, Tensor) and value.numel()
    ]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


def assert_equal_states(found: Any, expected: Any) -> None:
    """What optimizer.load_state_dict takes, bit for bit, in memory of its own."""
    assert found["param_groups"] == expected["param_groups"]
    assert list(found["state"]) == list(expected["state"])
    assert_same(found["state"], expected["state"])
    assert_compact(found["state"])


def settings(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The settings of the parameter groups."""
    return [{k: v for k, v in g.items() if k != "params"} for g in state["param_groups"]]


@contextlib.contextmanager
def refuses(kind: type[Exception], text: str = "") -> Iterator[pytest.ExceptionInfo[Any]]:
    """The context raises an error that has ``text`` and four facts."""
    with pytest.raises(kind, match=text or None) as caught:
        yield caught
    for fact in ("expected:", "got:", "where:", "to do:"):
        assert fact in str(caught.value), str(caught.value)
