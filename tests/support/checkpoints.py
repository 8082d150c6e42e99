"""Real checkpoints of every kind that the tools read, from one small model after a step of Adam.

    made = make("fsdp2-dcp", 2, tmp_path)
    archive = open_archive(made["path"])  # compare with made["model"] and made["optimizer"]

The model has what is hard for checkpoints: a tie, a 0-d and an empty parameter, rows that no number
of ranks divides, buffers, two dtypes. Its gradients are a few bits wide, so that all ranks compute
what an unsharded model computes, bit for bit. Checkpoints are made once per session and copied."""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import fsdp_compat
from fsdp_compat import checkpoint
from fsdp_compat.checkpoint._tools.archive import Archive, StoredTensor
from fsdp_compat.checkpoint._tools.opening import problems_of
from fsdp_compat.checkpoint._tools.reading import Files, read
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.ranks import run_ranks

STEP = 1


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


def assert_is_reference(
    archive: Archive, expected: dict[str, Any], with_optimizer: bool = True
) -> None:
    """Assert that an archive has the model and the optimizer of ``expected``, bit for bit; one name
    of a tie is enough, and a number is as good as a tensor of it."""
    assert problems_of(archive) == []
    names = {**{name: name for name in archive.tensors}, **archive.aliases}
    assert {*names, *expected["aliases"]} == set(expected["model"])
    with Files() as files:
        for name, values in expected["model"].items():
            held = names.get(name) or names[expected["aliases"][name]]
            assert_same(read(archive.tensors[held], files), values, name)
        if not with_optimizer:
            assert archive.param_groups is None
            return
        states, groups = expected["optimizer"]["state"], expected["optimizer"]["param_groups"]
        assert set(archive.states) == set(states)
        for name, state in states.items():
            assert set(archive.states[name]) == set(state)
            for key, values in state.items():
                own = archive.states[name][key]
                is_tensor = isinstance(own, StoredTensor)
                found = read(own, files) if is_tensor else torch.tensor(own, dtype=values.dtype)
                assert_same(found, values, f"{name}/{key}")
    assert archive.param_groups is not None
    for group in archive.param_groups:
        assert (group["lr"], tuple(group["betas"])) == (groups[0]["lr"], groups[0]["betas"])
    taken = [name for group in archive.param_groups for name in group["params"]]
    assert sorted(taken) == sorted(groups[0]["params"])


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


# -- what a load finds and reads


def sharded(front_end: str, model: nn.Module, **options: Any) -> nn.Module:
    if front_end == "rows":
        fsdp_compat.fully_shard(model)
        return model
    return fsdp_compat.FullyShardedDataParallel(
        model, use_orig_params=front_end == "flat original", **options
    )


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All values by name; states under ``state.name.key``."""
    fsdp = fsdp_compat.FullyShardedDataParallel
    found = {name: value.clone() for name, value in checkpoint.iter_full_state_dict(model)}
    with fsdp.state_dict_type(model, fsdp_compat.StateDictType.FULL_STATE_DICT):
        states = fsdp.optim_state_dict(model, optimizer)["state"]
    for name, state in states.items():
        found.update({f"state.{name}.{key}": copy.copy(value) for key, value in state.items()})
    return found


@contextlib.contextmanager
def counted_reads() -> Iterator[list[int]]:
    counts: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        counts.append(preadv(descriptor, buffers, offset))
        return counts[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", counted)
        yield counts


# -- on the ranks


def _save(kind: str, directory: str) -> str:
    """Save to the directory; return where in it the checkpoint is."""
    warnings.simplefilter("ignore")  # FSDP1 and ShardedTensor are deprecated
    return _SAVES[kind](Path(directory))


def torch_fsdp1(model: Toy, use_orig_params: bool = True) -> Any:
    from torch.distributed import fsdp

    return fsdp.FullyShardedDataParallel(
        model,
        auto_wrap_policy=fsdp.wrap.ModuleWrapPolicy({Words, Block}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
        ignored_states=[model.gain, model.empty],
    )


def torch_fsdp2(model: Toy) -> Any:
    from torch.distributed.fsdp import fully_shard

    ignored = {model.gain, model.empty}
    for part in (model.words, *model.blocks):
        fully_shard(part)
    return fully_shard(model, ignored_params=ignored)


def ours_fsdp1(model: Toy) -> Any:
    return fsdp_compat.FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Words, Block}), use_orig_params=True
    )


def ours_fully_shard(model: Toy) -> Any:
    for part in (model.words, *model.blocks):
        fsdp_compat.fully_shard(part)
    return fsdp_compat.fully_shard(model)


# How each library shards the model.
WRAPPERS: dict[str, Callable[[Toy], Any]] = {
    "fsdp1": torch_fsdp1,
    "fsdp2": torch_fsdp2,
    "ours": ours_fsdp1,
    "fully_shard": ours_fully_shard,
}


def _fsdp1_states(library: Any, wrap: Callable[[Toy], Any], kind: str) -> dict[str, Any]:
    """The state dicts of a class FSDP of torch, or of ours."""
    model = wrap(unsharded())
    optimizer = trained(model)
    fsdp = library.FullyShardedDataParallel
    with fsdp.state_dict_type(model, library.StateDictType[kind]):
        optim = fsdp.optim_state_dict(model, optimizer)
        return {"model": model.state_dict(), "optimizer": optim, "step": STEP}


def _torch_states(kind: str) -> dict[str, Any]:
    from torch.distributed import fsdp

    if kind != "LOCAL_STATE_DICT":
        return _fsdp1_states(fsdp, torch_fsdp1, kind)
    model = unsharded()
    trained(model)  # now: under a FlatParameter, Part.forward would see other parameters
    model = torch_fsdp1(model, use_orig_params=False)
    with fsdp.FullyShardedDataParallel.state_dict_type(model, fsdp.StateDictType[kind]):
        return {"model": model.state_dict(), "step": STEP}


def _states(wrap: Callable[[Toy], Any]) -> dict[str, Any]:
    """The state dicts of any model, by torch's functions."""
    model = wrap(unsharded())
    state, optim = get_state_dict(model, trained(model))
    return {"model": state, "optimizer": optim, "step": STEP}


def _dcp(states: dict[str, Any], directory: Path) -> str:
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


def _ours_native(directory: Path) -> str:
    model = ours_fsdp1(unsharded())
    path = checkpoint.save(directory, model, trained(model), {"epoch": 2}, step=STEP)
    return path.name


def _ours_safetensors(directory: Path) -> str:
    model = ours_fsdp1(unsharded())
    trained(model)
    checkpoint.save_safetensors(directory / "weights", model)
    return "weights"


_SAVES: dict[str, Callable[[Path], str]] = {
    "fsdp1-full": lambda path: _from_first(_torch_states("FULL_STATE_DICT"), path),
    "fsdp1-sharded-dcp": lambda path: _dcp(_torch_states("SHARDED_STATE_DICT"), path),
    "fsdp1-sharded-torch": lambda path: _per_rank(_torch_states("SHARDED_STATE_DICT"), path),
    "fsdp1-local": lambda path: _per_rank(_torch_states("LOCAL_STATE_DICT"), path),
    "fsdp2-dcp": lambda path: _dcp(_states(torch_fsdp2), path),
    "fsdp2-torch": lambda path: _per_rank(_states(torch_fsdp2), path),
    "ddp": _ddp,
    "ours-native": _ours_native,
    "ours-safetensors": _ours_safetensors,
    "ours-sharded-dcp": lambda path: _dcp(
        _fsdp1_states(fsdp_compat, ours_fsdp1, "SHARDED_STATE_DICT"), path
    ),
    "fully_shard-dcp": lambda path: _dcp(_states(ours_fully_shard), path),
}
KINDS = tuple(_SAVES)
