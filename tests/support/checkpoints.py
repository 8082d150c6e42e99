"""Real checkpoints of every kind that the tools read, from one small model after a step of Adam.

    made = make("fsdp2-dcp", 2, tmp_path)
    archive = open_archive(made["path"])  # compare with made["model"] and made["optimizer"]

The model has what is hard for checkpoints: a tie, a 0-d and an empty parameter, rows that no number
of ranks divides, buffers, two dtypes. Its gradients depend on its values alone, so that all ranks
compute what an unsharded model computes, bit for bit. Checkpoints are made once per session and
copied."""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import json
import os
import resource
import shutil
import signal
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import fsdp_compat
from fsdp_compat import checkpoint
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.checkpoint.corpus.content import take_step
from tests.support.odd_model import state_by_name
from tests.support.ranks import run_ranks

STEP = 1


class Words(nn.Module):
    """Two modules with one parameter of 7 rows, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:  # fsdp_compat makes units of what can be called
        return x


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(5, 11, dtype=dtype)
        self.down = nn.Linear(11, 5, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


class Toy(nn.Module):
    """It is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.words = Words()
        self.blocks = nn.ModuleList([Block(torch.float32), Block(torch.bfloat16)])
        self.cube = nn.Parameter(torch.randn(3, 1, 5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.gain = nn.Parameter(torch.tensor(1.1))
        self.register_buffer("count", torch.tensor(3))

    def parts(self) -> list[nn.Module]:
        return [self.words, *self.blocks]

    def ignored(self) -> list[nn.Parameter]:
        return [self.gain, self.empty]


def unsharded() -> Toy:
    """Return the model before its step, the same in every process."""
    torch.manual_seed(7)
    return Toy()


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """Train a step; return the optimizer."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.125)
    take_step(optimizer)
    return optimizer


def reference() -> dict[str, Any]:
    """Return "model" (the state dict), "optimizer" (its state by name) and "aliases" of the
    unsharded model after the step."""
    model = unsharded()
    optimizer = state_by_name(model, trained(model))
    aliases = {"words.head.weight": "words.embed.weight"}
    return {"model": dict(model.state_dict()), "optimizer": optimizer, "aliases": aliases}


def make(kind: str, ranks: int, directory: Path) -> dict[str, Any]:
    """Write a checkpoint of a kind, made by ``ranks`` ranks, to a new directory inside
    ``directory``. Return ``reference()`` and "path": the file, or the directory of several."""
    path = _made(kind, ranks)
    target = directory / path.relative_to(_session())
    shutil.copytree(_session() / f"{kind}-{ranks}", directory / f"{kind}-{ranks}", symlinks=True)
    return {**reference(), "path": target}


def assert_same(values: Tensor, expected: Tensor, what: str) -> None:
    """Assert that two tensors have one dtype, shape and content."""
    assert values.dtype == expected.dtype, what
    assert values.shape == expected.shape, what
    assert torch.equal(_bytes(values), _bytes(expected)), what


def _bytes(values: Tensor) -> Tensor:
    return values.detach().reshape(-1).contiguous().view(torch.uint8)


def flip(file: Path, place: int) -> None:
    """Change one bit of a byte of a file."""
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(content)


def save_dcp(states: Any, path: Path, **options: Any) -> Path:
    """Save by torch.distributed.checkpoint, in this process alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(states, checkpoint_id=path, no_dist=True, **options)
    return path


def change_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of a checkpoint, and its checksum with it."""
    content = json.loads((path / "manifest.json").read_text())["content"]
    change(content)
    (path / "manifest.json").write_text(manifest_of(json.dumps(content)))


def manifest_of(content: str) -> str:
    """Return the text of a manifest around any content, with the checksum that fits."""
    return f'{{"content": {content},\n"crc32": "{zlib.crc32(content.encode()):08x}"}}\n'


@contextlib.contextmanager
def before_syncs(act: Callable[[Path], object]) -> Iterator[None]:
    """Call ``act`` with the path of each file or folder before it is made durable."""
    fsync = os.fsync

    def acted(descriptor: int) -> None:
        act(path_of(descriptor))
        fsync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", acted)
        yield


@contextlib.contextmanager
def before_writes(act: Callable[[], object]) -> Iterator[None]:
    """Call ``act`` before bytes are written to a file of a checkpoint."""
    write = os.write

    def acted(descriptor: int, data: Any) -> int:
        if path_of(descriptor).suffix == ".safetensors":
            act()
        return write(descriptor, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", acted)
        yield


@contextlib.contextmanager
def no_more_than(nbytes: int) -> Iterator[None]:
    """Files may not become longer: what a full disk looks like, to this process alone."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def path_of(descriptor: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))


def open_files(folder: Path) -> list[int]:
    """Return this process's descriptors of files and directories inside of a folder."""
    found = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            if folder in path_of(descriptor).parents:
                found.append(descriptor)
    return found


class Forgery:
    """A checkpoint of one rank as JSON, to be changed anywhere and written again."""

    def __init__(self, path: Path) -> None:
        content = (path / "rank-00000.safetensors").read_bytes()
        stop = 8 + int.from_bytes(content[:8], "little")
        self.header = json.loads(content[8:stop])
        self.text = json.loads(self.header["__metadata__"].pop("fsdp_compat"))
        self.manifest = json.loads((path / "manifest.json").read_text())["content"]
        self.data = content[stop:]

    def write(self, path: Path) -> None:
        if isinstance(metadata := self.header.get("__metadata__"), dict):
            metadata.setdefault("fsdp_compat", json.dumps(self.text))
        header = json.dumps(self.header).encode()
        content = len(header).to_bytes(8, "little") + header + self.data
        for file in self.manifest["files"] if isinstance(self.manifest.get("files"), list) else ():
            if (
                isinstance(file, dict)
                and isinstance(file.get("nbytes"), int)
                and isinstance(file.get("crc32"), str)
            ):
                file.update(nbytes=len(content), crc32=f"{zlib.crc32(content):08x}")
        path.mkdir(exist_ok=True)
        (path / "rank-00000.safetensors").write_bytes(content)
        (path / "manifest.json").write_text(manifest_of(json.dumps(self.manifest)))


# -- errors

FACTS = ("expected:", "got:", "where:", "to do:")


@contextlib.contextmanager
def refused(kind: type[Exception], *texts: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """The context raises an error whose message has the four facts and these texts."""
    with pytest.raises(kind) as raised:
        yield raised
    for text in (*FACTS, *texts):
        assert text in str(raised.value), f"no {text!r} in: {raised.value}"


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
        return fsdp_compat.fully_shard(model, **options)
    return fsdp_compat.FullyShardedDataParallel(
        model, use_orig_params=front_end == "flat original", **options
    )


def toy(
    front_end: str = "flat", num_steps: int = 1, seed: int = 7
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded `Toy` and its optimizer after some steps."""
    torch.manual_seed(seed)
    if front_end == "rows":
        model = ours_fully_shard(Toy())
    else:
        model = ours_fsdp1(Toy(), use_orig_params=front_end == "flat original")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.125)
    for _ in range(num_steps):
        take_step(optimizer)
    return model, optimizer


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return a copy of what this rank has of a model and an optimizer."""
    parameters = list(model.parameters())
    states = (sorted(optimizer.state.get(each, {}).items()) for each in parameters if each.numel())
    values = (*parameters, *model.buffers(), *(value for state in states for _, value in state))
    return [value.detach().clone() for value in values]


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
def noted_reads() -> Iterator[list[tuple[int, int]]]:
    """Note the offset and the number of bytes of each read from a file."""
    runs: list[tuple[int, int]] = []
    preadv = os.preadv

    def noted(descriptor: int, buffers: Any, offset: int) -> int:
        runs.append((offset, preadv(descriptor, buffers, offset)))
        return runs[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", noted)
        yield runs


def num_read(runs: list[tuple[int, int]]) -> int:
    """Return how many bytes were read."""
    return sum(nbytes for _, nbytes in runs)


# -- on the ranks


def _save(kind: str, directory: str) -> str:
    """Save to the directory; return where in it the checkpoint is."""
    warnings.simplefilter("ignore")  # FSDP1 and ShardedTensor are deprecated
    if kind in _SAVES:
        return _SAVES[kind](Path(directory))
    states, name = _STATES[kind]
    return save_states(states(), Path(directory) / name)


class Parted(Protocol):
    """A model with parts that are sharded by themselves, and parameters that torch refuses."""

    def parts(self) -> list[nn.Module]: ...

    def ignored(self) -> list[nn.Parameter]: ...


def torch_fsdp1(model: Parted, use_orig_params: bool = True) -> Any:
    from torch.distributed import fsdp

    return fsdp.FullyShardedDataParallel(
        model,
        auto_wrap_policy=fsdp.wrap.ModuleWrapPolicy({type(part) for part in model.parts()}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
        ignored_states=model.ignored(),
    )


def torch_fsdp2(model: Parted, mesh: DeviceMesh | None = None) -> Any:
    from torch.distributed.fsdp import fully_shard

    for part in model.parts():
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh, ignored_params=set(model.ignored()))


def ours_fsdp1(model: Parted, **options: Any) -> Any:
    policy = ModuleWrapPolicy({type(part) for part in model.parts()})
    given = {"auto_wrap_policy": policy, "use_orig_params": True, **options}
    return fsdp_compat.FullyShardedDataParallel(model, **given)


def ours_fully_shard(model: Parted, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    for part in model.parts():
        fsdp_compat.fully_shard(part, mesh=mesh, **options)
    return fsdp_compat.fully_shard(model, mesh=mesh, **options)


def by_columns(parameter: nn.Parameter) -> Shard:
    """A ``shard_placement_fn`` that cuts along the last dim."""
    return Shard(max(parameter.ndim - 1, 0))


# How each library shards the model.
WRAPPERS: dict[str, Callable[[Toy], Any]] = {
    "fsdp1": torch_fsdp1,
    "fsdp2": torch_fsdp2,
    "ours": ours_fsdp1,
    "fully_shard": ours_fully_shard,
}


def flat_states(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    kind: str,
    library: Any = None,
    configs: Sequence[Any] = (),
) -> dict[str, Any]:
    """The state dicts of a class FSDP of torch, or of another library. configs: of the two state
    dicts, if not the default."""
    if library is None:
        from torch.distributed import fsdp as library
    fsdp = library.FullyShardedDataParallel
    with fsdp.state_dict_type(model, library.StateDictType[f"{kind}_STATE_DICT"], *configs):
        states = {"model": model.state_dict(), "step": STEP}
        if kind != "LOCAL":
            states["optimizer"] = fsdp.optim_state_dict(model, optimizer)
    return states


def _flat(kind: str, use_orig_params: bool = True) -> dict[str, Any]:
    model = torch_fsdp1(unsharded(), use_orig_params)
    return flat_states(model, trained(model), kind)


def _ours_flat() -> dict[str, Any]:
    model = ours_fsdp1(unsharded())
    return flat_states(model, trained(model), "SHARDED", fsdp_compat)


def states_by_torch(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dicts of any model, by torch's functions."""
    state, optim = get_state_dict(model, optimizer)
    return {"model": state, "optimizer": optim, "step": STEP}


def _rows(wrap: Callable[[Toy], Any]) -> dict[str, Any]:
    model = wrap(unsharded())
    return states_by_torch(model, trained(model))


def save_states(states: Any, path: Path) -> str:
    """Save as the name says: in a file of the first rank, a file of each, or by
    torch.distributed.checkpoint. Return the name."""
    if path.suffix == ".pt":
        if dist.get_rank() == 0:
            torch.save(states, path)
    elif "ranks" in path.name.split("-"):
        path.mkdir(exist_ok=True)
        torch.save(states, path / f"rank_{dist.get_rank()}.pt")
    else:
        dcp.save(states, checkpoint_id=path)
    return path.name


def _ddp() -> dict[str, Any]:
    model = nn.parallel.DistributedDataParallel(unsharded())
    optimizer = trained(model)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": STEP}


def _ours_native(directory: Path) -> str:
    model = ours_fsdp1(unsharded())
    path = checkpoint.save(directory, model, trained(model), {"epoch": 2}, step=STEP)
    return path.name


def _ours_columns(directory: Path) -> str:
    model = ours_fully_shard(unsharded(), shard_placement_fn=by_columns)
    return checkpoint.save(directory, model, trained(model), {"epoch": 2}, step=STEP).name


def _ours_safetensors(directory: Path) -> str:
    model = ours_fsdp1(unsharded())
    trained(model)
    checkpoint.save_safetensors(directory / "weights", model)
    return "weights"


_STATES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {  # with a name for save_states
    "fsdp1-full": (lambda: _flat("FULL"), "full.pt"),
    "fsdp1-sharded-dcp": (lambda: _flat("SHARDED"), "dcp"),
    "fsdp1-sharded-torch": (lambda: _flat("SHARDED"), "ranks"),
    "fsdp1-local": (lambda: _flat("LOCAL", use_orig_params=False), "ranks"),
    "fsdp1-local-original": (lambda: _flat("LOCAL"), "ranks"),
    "fsdp2-dcp": (lambda: _rows(torch_fsdp2), "dcp"),
    "fsdp2-torch": (lambda: _rows(torch_fsdp2), "ranks"),
    "ddp": (_ddp, "ddp.pt"),
    "ours-sharded-dcp": (_ours_flat, "dcp"),
    "fully_shard-dcp": (lambda: _rows(ours_fully_shard), "dcp"),
}
_SAVES = {
    "ours-native": _ours_native,
    "ours-columns": _ours_columns,
    "ours-safetensors": _ours_safetensors,
}
KINDS = (*_STATES, *_SAVES)
