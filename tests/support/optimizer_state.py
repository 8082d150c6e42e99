"""A model with unusual parameters, optimizers of it, and their states in every form."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullOptimStateDictConfig as TorchFullOptimConfig
from torch.distributed.fsdp import FullStateDictConfig as TorchFullConfig
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy
from torch.distributed.fsdp import StateDictType as TorchType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchWrapPolicy

from fsdp_compat import FullOptimStateDictConfig, StateDictType
from fsdp_compat import FullyShardedDataParallel as FSDP
from tests.support.odd_model import Config, train, wrap_as

Make = Callable[[Any], torch.optim.Optimizer]
Trained = tuple[Any, Any]  # a model and its optimizer

SHARDED = StateDictType.SHARDED_STATE_DICT
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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Model(nn.Module):
    """A tie, and with ``odd`` a 0-d parameter and one without elements, which torch refuses."""

    def __init__(self, odd: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.Sequential(Block(), Block())
        self.gain = nn.Parameter(torch.ones(()) if odd else torch.ones(1))
        self.nothing = nn.Parameter(torch.zeros(0, 2) if odd else torch.zeros(1, 2))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gain * self.head(self.blocks(self.embed(tokens))) + self.nothing.sum()


def make_model(seed: int = 0, odd: bool = True) -> Model:
    torch.manual_seed(seed)
    return Model(odd)


def with_spare() -> nn.Module:
    """A model with a frozen parameter, and a block that never runs."""
    model = make_model()
    model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    model.spare = Block()
    return model


def shard(model: nn.Module, config: Config, **options: Any) -> FSDP:
    return wrap_as(config, model, {Block}, **options)


def split_decay(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    others = [p for name, p in named if not name.endswith("weight")]
    return [
        {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.3},
        {"params": others, "weight_decay": 0.0, "lr": 0.005},
    ]


def params_of(model: nn.Module, groups: bool) -> Any:
    return split_decay(model) if groups else model.parameters()


def trained(
    model: nn.Module, make: Make | str = "AdamW", steps: int = 2, groups: bool = False
) -> Trained:
    """Return a model and an optimizer of it after some steps."""
    optimizer = (OPTIMIZERS[make] if isinstance(make, str) else make)(params_of(model, groups))
    train(model, optimizer, range(steps))
    return model, optimizer


def sharded(config: Config, make: Make | str = "AdamW", steps: int = 2, **options: Any) -> Trained:
    """Return the model in ``config``, and an optimizer of it after some steps."""
    return trained(shard(make_model(), config), make, steps, **options)


def torchs_pair(
    use_orig_params: bool, make: Make | str = "Adam", steps: int = 2, **options: Any
) -> tuple[Trained, Trained]:
    """Return torch's FSDP1 and ours, trained alike. options: of both."""
    strategy = options.pop("strategy", "FULL_SHARD")
    groups = options.pop("groups", False)
    theirs = TorchFSDP(
        make_model(0, odd=False),
        auto_wrap_policy=TorchWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        sharding_strategy=TorchStrategy[strategy],
        device_id=torch.device("cpu"),
        **options,
    )
    ours = shard(make_model(0, odd=False), (strategy, use_orig_params, "blocks"), **options)
    return trained(theirs, make, steps, groups), trained(ours, make, steps, groups)


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


# -- states


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict of an unsharded model's optimizer, by names."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        "state": {names[p]: dict(optimizer.state[p]) for p in names if p in optimizer.state},
        "param_groups": [
            {**group, "params": [names[p] for p in group["params"]]}
            for group in optimizer.param_groups
        ],
    }


def full_state(model: nn.Module, optimizer: Any, **options: Any) -> dict[str, Any]:
    config = FullOptimStateDictConfig(**options)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, None, config):
        return FSDP.optim_state_dict(model, optimizer)


def sharded_state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    with FSDP.state_dict_type(model, SHARDED):
        return FSDP.optim_state_dict(model, optimizer)


def loadable(model: nn.Module, optimizer: Any, state: Any, **options: Any) -> dict[str, Any]:
    return FSDP.optim_state_dict_to_load(model, optimizer, state, **options)


def from_rank0(model: nn.Module, optimizer: Any, state: Any, **options: Any) -> dict[str, Any]:
    """What is loadable of the first rank's ``state``."""
    alone, config = (
        state if dist.get_rank() == 0 else None,
        FullOptimStateDictConfig(rank0_only=True),
    )
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, None, config):
        return loadable(model, optimizer, alone, **options)


def load(model: nn.Module, optimizer: Any, state: Any) -> Any:
    """Load a state, and return the optimizer's full state."""
    optimizer.load_state_dict(loadable(model, optimizer, state))
    return full_state(model, optimizer)["state"]


def load_into_new(model: nn.Module, make: Make | str, state: Any, groups: bool = False) -> Any:
    """Load a state into another optimizer of the model, and return its full state."""
    optimizer = (OPTIMIZERS[make] if isinstance(make, str) else make)(params_of(model, groups))
    return load(model, optimizer, state)


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


def torchs_loadable(model: Any, optimizer: Any, state: Any, **options: Any) -> Any:
    with TorchFSDP.state_dict_type(model, *TORCHS_FULL):
        return TorchFSDP.optim_state_dict_to_load(model, optimizer, state, **options)


def num_sent(model: FSDP) -> int:
    comms = {
        id(comm): comm for group in model._runtime.groups for comm in (group.shard, group.replica)
    }
    return sum(sum(comm.traffic.counts.values()) for comm in comms.values())


def by_rank(value: Any) -> list[Any]:
    """Return every rank's value. Collective."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


# -- assertions


def assert_state(
    actual: Mapping[str, Any],
    expected: Mapping[str, Any],
    tolerance: float = 0.0,
    atol: float | None = None,
) -> None:
    """tolerance: relative; absolute, too, without ``atol``."""
    atol = tolerance if atol is None else atol
    assert set(actual) == set(expected)
    for name, entry in expected.items():
        assert set(actual[name]) == set(entry), name
        for key, value in entry.items():
            where = f"{key} of {name}"
            if not isinstance(value, Tensor):
                assert actual[name][key] == value, where
                continue
            found = actual[name][key]
            assert found.shape == value.shape, where
            assert found.dtype == value.dtype, where
            if tolerance:
                torch.testing.assert_close(found, value, rtol=tolerance, atol=atol, msg=where)
            else:
                assert torch.equal(found, value), where


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
    assert_state(found["state"], expected["state"])
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
