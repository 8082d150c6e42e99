"""Real checkpoints of every kind that the tools read, from one small model after a step of Adam.

    made = make("fsdp2-dcp", 2, tmp_path)
    archive = open_archive(made["path"])  # compare with made["model"] and made["optimizer"]

The model has what is hard for checkpoints: a tie, a 0-d and an empty parameter, rows that no number
of ranks divides, buffers, two dtypes. Its gradients are a few bits wide, so that all ranks compute
what an unsharded model computes, bit for bit. Checkpoints are made once per session and copied."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_compat
from fsdp_compat import checkpoint
from fsdp_compat.checkpoint._tools.archive import Archive
from fsdp_compat.checkpoint._tools.reading import Files, read
from tests.support.ranks import run_ranks

__all__ = [
    "KINDS",
    "STEP",
    "WRAPPERS",
    "Toy",
    "assert_is_reference",
    "assert_same",
    "make",
    "reference",
    "trained",
    "unsharded",
]

STEP = 1
KINDS = (
    "fsdp1-full",
    "fsdp1-sharded-dcp",
    "fsdp1-sharded-torch",
    "fsdp1-local",
    "fsdp2-dcp",
    "fsdp2-torch",
    "ddp",
    "ours-native",
    "ours-safetensors",
    "ours-sharded-dcp",
    "fully_shard-dcp",
)


class Part(nn.Module):
    """Adds the sum of its parameters, each multiplied by a few small numbers, to its input."""

    def used(self) -> list[Tensor]:
        """Return the parameters; not by parameters(), which has FSDP1's flat ones."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.used():
            factors = torch.arange(parameter.numel(), dtype=parameter.dtype) % 7 / 8 - 0.25
            x = x + (parameter * factors.view(parameter.shape)).sum().float()
        return x


class Words(Part):
    """Two modules with one parameter of 7 rows, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.randn(3, 2))

    def used(self) -> list[Tensor]:
        return [self.embed.weight, self.head.bias]


class Block(Part):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(5, 11, dtype=dtype)
        self.down = nn.Linear(11, 5, bias=False, dtype=dtype)

    def used(self) -> list[Tensor]:
        return [self.up.weight, self.up.bias, self.down.weight]


class Toy(nn.Module):
    """torch's wrappers refuse 0-d and empty parameters, so they are told to ignore them. The
    gradient of an ignored parameter is the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = Words()
        self.blocks = nn.ModuleList([Block(torch.float32), Block(torch.bfloat16)])
        self.cube = nn.Parameter(torch.randn(3, 1, 5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.gain = nn.Parameter(torch.tensor(1.1))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return x + self.cube.sum() / 4 + self.empty.sum() + self.gain / 2


def unsharded() -> Toy:
    """Return the model before its step, the same in every process."""
    torch.manual_seed(7)
    return Toy()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.125)


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """Train a step; return the optimizer."""
    optimizer = optimizer_of(model)
    model(torch.ones(())).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def reference() -> dict[str, Any]:
    """Return "model" (the state dict), "optimizer" (its state by name) and "aliases" of the
    unsharded model after the step."""
    model = unsharded()
    optimizer = trained(model)
    names = [name for name, _ in model.named_parameters()]
    saved = optimizer.state_dict()
    return {
        "model": dict(model.state_dict()),
        "optimizer": {
            "state": {names[number]: state for number, state in saved["state"].items()},
            "param_groups": [
                {**group, "params": [names[number] for number in group["params"]]}
                for group in saved["param_groups"]
            ],
        },
        "aliases": {"words.head.weight": "words.embed.weight"},
    }


def make(kind: str, ranks: int, directory: Path) -> dict[str, Any]:
    """Write a checkpoint of a kind, made by ``ranks`` ranks, to a new directory inside
    ``directory``. Return ``reference()`` and "path": the file, or the directory of several."""
    path = _made(kind, ranks)
    target = directory / path.relative_to(_session())
    shutil.copytree(_session() / f"{kind}-{ranks}", directory / f"{kind}-{ranks}", symlinks=True)
    return {**reference(), "path": target}


def assert_is_reference(archive: Archive, expected: dict[str, Any]) -> None:
    """Assert that an archive has the model and the optimizer of ``expected``, bit for bit."""
    model = {**archive.tensors}
    for alias, name in archive.aliases.items():
        model[alias] = archive.tensors[name]
    states, groups = expected["optimizer"]["state"], expected["optimizer"]["param_groups"]
    assert set(model) == set(expected["model"])
    assert set(archive.states) == set(states)
    with Files() as files:
        for name, values in expected["model"].items():
            assert_same(read(model[name], files), values, name)
        for name, state in states.items():
            assert set(archive.states[name]) == set(state)
            for key, values in state.items():
                assert_same(read(archive.states[name][key], files), values, f"{name}/{key}")
    assert archive.param_groups is not None
    assert len(archive.param_groups) == len(groups)
    for group, wanted in zip(archive.param_groups, groups, strict=True):
        assert set(group["params"]) == set(wanted["params"])
        assert {key: group[key] for key in ("lr", "betas")} == {
            key: wanted[key] for key in ("lr", "betas")
        }


def assert_same(values: Tensor, expected: Tensor, what: str) -> None:
    """Assert that two tensors have one dtype, shape and content."""
    assert values.dtype == expected.dtype, what
    assert values.shape == expected.shape, what
    assert torch.equal(_bytes(values), _bytes(expected)), what


def _bytes(values: Tensor) -> Tensor:
    return values.detach().reshape(-1).contiguous().view(torch.uint8)


@functools.cache
def _session() -> Path:
    folder = tempfile.mkdtemp(prefix="checkpoints-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def _made(kind: str, ranks: int) -> Path:
    directory = _session() / f"{kind}-{ranks}"
    directory.mkdir()
    return directory / run_ranks(ranks, _save, kind, str(directory))[0]


# -- on the ranks


def _save(kind: str, directory: str) -> str:
    """Save to the directory; return where in it the checkpoint is."""
    warnings.simplefilter("ignore")  # FSDP1 and ShardedTensor are deprecated
    return _SAVES[kind](Path(directory))


def torch_fsdp1(model: Toy, use_orig_params: bool = True) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Words, Block}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
        ignored_states=[model.gain, model.empty],
    )


def _fsdp1_states(kind: str, use_orig_params: bool = True) -> dict[str, Any]:
    from torch.distributed.fsdp import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        LocalStateDictConfig,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        StateDictType,
    )
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    model = unsharded()
    if not use_orig_params:
        trained(model)  # now: under a FlatParameter, Part.forward would see other parameters
    model = torch_fsdp1(model, use_orig_params)
    optimizer = trained(model) if use_orig_params else None
    settings = {
        "full": (
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=False, rank0_only=False),
            FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False),
        ),
        "sharded": (
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(),
            ShardedOptimStateDictConfig(),
        ),
        "local": (StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig(), None),
    }[kind]
    with FSDP.state_dict_type(model, *settings):
        state = model.state_dict()
        if kind == "local":
            return {"model": state, "step": STEP}
        optim = FSDP.optim_state_dict(model, optimizer)
    return {"model": state, "optimizer": optim, "step": STEP}


def _dcp(states: dict[str, Any], directory: Path) -> str:
    import torch.distributed.checkpoint as dcp

    dcp.save(states, checkpoint_id=directory / "checkpoint")
    return "checkpoint"


def _per_rank(states: Any, directory: Path) -> str:
    torch.save(states, directory / f"rank_{dist.get_rank()}.pth")
    dist.barrier()
    return "."


def _from_first(states: Any, directory: Path) -> str:
    if dist.get_rank() == 0:
        torch.save(states, directory / "checkpoint.pt")
    return "checkpoint.pt"


def _ddp(directory: Path) -> str:
    model = nn.parallel.DistributedDataParallel(unsharded())
    optimizer = trained(model)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": STEP}
    return _from_first(states, directory)


def torch_fsdp2(model: Toy) -> Any:
    from torch.distributed.fsdp import fully_shard

    ignored = {model.gain, model.empty}
    for part in (model.words, *model.blocks):
        fully_shard(part)
    return fully_shard(model, ignored_params=ignored)


def _fsdp2_states() -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = torch_fsdp2(unsharded())
    state, optim = get_state_dict(model, trained(model))
    return {"model": state, "optimizer": optim, "step": STEP}


def ours_fsdp1(model: Toy) -> Any:
    from fsdp_compat.wrap import ModuleWrapPolicy

    return fsdp_compat.FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Words, Block}), use_orig_params=True
    )


def _ours_sharded() -> dict[str, Any]:
    from fsdp_compat import FullyShardedDataParallel as FSDP
    from fsdp_compat import StateDictType

    model = ours_fsdp1(unsharded())
    optimizer = trained(model)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        optim = FSDP.optim_state_dict(model, optimizer)
        return {"model": model.state_dict(), "optimizer": optim, "step": STEP}


def _ours_native(directory: Path) -> str:
    model = ours_fsdp1(unsharded())
    path = checkpoint.save(directory, model, trained(model), {"epoch": 2}, step=STEP)
    return path.name


def _ours_safetensors(directory: Path) -> str:
    model = ours_fsdp1(unsharded())
    trained(model)
    checkpoint.save_safetensors(directory / "weights", model)
    return "weights"


def ours_fully_shard(model: Toy) -> Any:
    for part in (model.words, *model.blocks):
        fsdp_compat.fully_shard(part)
    return fsdp_compat.fully_shard(model)


def _fully_shard_states() -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = ours_fully_shard(unsharded())
    state, optim = get_state_dict(model, trained(model))
    return {"model": state, "optimizer": optim, "step": STEP}


# How each library shards the model.
WRAPPERS: dict[str, Callable[[Toy], Any]] = {
    "fsdp1": torch_fsdp1,
    "fsdp2": torch_fsdp2,
    "ours": ours_fsdp1,
    "fully_shard": ours_fully_shard,
}

_SAVES: dict[str, Callable[[Path], str]] = {
    "fsdp1-full": lambda directory: _from_first(_fsdp1_states("full"), directory),
    "fsdp1-sharded-dcp": lambda directory: _dcp(_fsdp1_states("sharded"), directory),
    "fsdp1-sharded-torch": lambda directory: _per_rank(_fsdp1_states("sharded"), directory),
    "fsdp1-local": lambda directory: _per_rank(_fsdp1_states("local", False), directory),
    "fsdp2-dcp": lambda directory: _dcp(_fsdp2_states(), directory),
    "fsdp2-torch": lambda directory: _per_rank(_fsdp2_states(), directory),
    "ddp": _ddp,
    "ours-native": _ours_native,
    "ours-safetensors": _ours_safetensors,
    "ours-sharded-dcp": lambda directory: _dcp(_ours_sharded(), directory),
    "fully_shard-dcp": lambda directory: _dcp(_fully_shard_states(), directory),
}
