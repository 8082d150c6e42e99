"""Write checkpoints to the corpus, and what they hold to its table.

    export PYTHONPATH=.
    python -m tests.checkpoint.corpus.make torch torch-2.15.0    # torch's own FSDP
    python -m tests.checkpoint.corpus.make ours ours             # fsdp_compat
    python -m tests.checkpoint.corpus.make clients clients       # Accelerate, Lightning, Fabric

The second argument is a new directory of the corpus. What older versions wrote cannot be made
again, so nothing is replaced: formats that change get a further directory.

truth.json has the values of an unsharded model in the memory of this script; no reader takes part.
Its "contents" are the dtype, shape and SHA-256 of each tensor, and its "entries" say which content
a checkpoint has, and how much of it."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fsdp_compat
from fsdp_compat import checkpoint
from fsdp_compat.optim import GatheredOptimizer
from tests.checkpoint.corpus import content
from tests.support import checkpoints
from tests.support.ranks import run_ranks

CORPUS = Path(__file__).parent
TRUTH = CORPUS / "truth.json"
MINOR = ".".join(torch.__version__.split(".")[:2])
Entries = dict[str, dict[str, Any]]  # by the path inside the new directory


# -- on the ranks


def _split_tensors(model: content.Tiny, mesh: Any) -> None:
    """Cut parameters over the ranks of tensor parallelism: by rows, by columns, and not."""
    places = {model.block.up: Shard(0), model.embed: Shard(1), model.frozen: Replicate()}
    for module, place in places.items():
        value = distribute_tensor(module.weight.detach(), mesh, [place])
        module.weight = nn.Parameter(value, module.weight.requires_grad)
    model.head.weight = model.embed.weight


def _keep_few_settings(optimizer: torch.optim.Optimizer) -> None:
    """Leave few settings: torch.distributed.checkpoint writes a file of torch.save for each."""
    for group in optimizer.param_groups:
        for key in set(group) - {*content.SETTINGS, "params"}:
            del group[key]


# -- torch


def _torch_flat(
    use_orig_params: bool, optimizer_of: content.MakesOptimizer = content.adam
) -> tuple[nn.Module, torch.optim.Optimizer]:
    return _trained(checkpoints.torch_fsdp1(content.Tiny(), use_orig_params), optimizer_of)


def _trained(
    model: nn.Module, optimizer_of: content.MakesOptimizer
) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = optimizer_of(model)
    content.take_step(optimizer)
    _keep_few_settings(optimizer)
    return model, optimizer


def _torch_rows(
    kind: str, optimizer_of: content.MakesOptimizer = content.adam
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = content.Tiny()
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (2,))
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "other"))
    if kind == "tp":
        _split_tensors(model, mesh["other"])
        mesh = mesh["data"]
    return _trained(checkpoints.torch_fsdp2(model, mesh), optimizer_of)


def _save_torch(path: Path) -> None:
    from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig

    warnings.simplefilter("ignore")  # FSDP1 and ShardedTensor are deprecated
    form, kind, *rest = path.stem.split("-")
    if form == "fsdp1":
        model, optimizer = _torch_flat("flat" not in rest and kind != "local")
        given = {"offload_to_cpu": False, "rank0_only": False}  # offloaded values are wrong on CPUs
        configs = FullStateDictConfig(**given), FullOptimStateDictConfig(**given)
        configs = configs if kind == "full" else ()
        states = checkpoints.flat_states(model, optimizer, kind.upper(), configs=configs)
    else:
        states = checkpoints.states_by_torch(*_torch_rows(form))
    if "model" in rest:
        del states["optimizer"]
    checkpoints.save_states(states, path)


# With the number of ranks. A file of torch.save takes 1.3 KB, and each part of a tensor in a
# torch.distributed.checkpoint is one. What differs between versions are the classes in pickles: a
# small set has them all.
TORCH = {
    "fsdp1-full.pt": 2,
    "fsdp1-local-ranks": 2,
    "fsdp1-sharded-ranks-model": 2,
    "fsdp2-sharded-model": 2,
    "fsdp2-sharded-ranks-model": 2,
    "tp-sharded-ranks-model": 4,
}


def make_torch(folder: Path) -> Entries:
    entries = {}
    for name, ranks in TORCH.items():
        run_ranks(ranks, _save_torch, folder / name)
        has_optimizer = not {"local", "model"} & set(name.split("-"))
        entries[name] = {**_entry(has_optimizer), "extra": {"step": content.STEP}}
        if "local" in name:
            entries[name]["needs_shapes"] = True
    return entries


# -- fsdp_compat


def ours(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """kind: "flat" (a FlatParameter for each unit, dtype and requires_grad), "original"
    (use_orig_params=True, and one unit for all), "rows" (fully_shard) or "columns" (fully_shard,
    along the last dim); with "-tp", on two ranks of tensor parallelism."""
    model = content.Tiny()
    form, _, parallel = kind.partition("-")
    ranks = dist.get_world_size() // (2 if parallel else 1)
    mesh = init_device_mesh("cpu", (ranks, 2 if parallel else 1), mesh_dim_names=("data", "tp"))
    if parallel:
        _split_tensors(model, mesh["tp"])
    if form in ("rows", "columns"):
        options: dict[str, Any] = {}
        if form == "columns":
            options = {"shard_placement_fn": checkpoints.by_columns}
        wrapped = checkpoints.ours_fully_shard(model, mesh["data"], **options)
    else:
        # without a mesh, sharded state dicts have ShardedTensors, not DTensors
        options = {"device_mesh": mesh["data"]} if parallel else {}
        if form == "original":
            options = {"device_mesh": mesh["data"], "auto_wrap_policy": None}
        wrapped = checkpoints.ours_fsdp1(model, use_orig_params=form == "original", **options)
    return wrapped, content.adam(wrapped)


def _save_native(kind: str, what: str, path: Path) -> None:
    """what: "all", the "model", "rank-local" states, or "whole" ones, each on one rank."""
    warnings.simplefilter("ignore")  # rank-local state can only be loaded with the same layout
    model, optimizer = ours(kind)
    if what == "rank-local":
        optimizer = content.rank_local(model)
    if what == "whole":
        optimizer = GatheredOptimizer(model, lambda own: torch.optim.Adam(own, lr=0.125))
        for parameter in optimizer.trained:
            parameter.grad = parameter.detach() * 0.5 + 0.25
        optimizer.step()
    else:
        content.take_step(optimizer)
    extra = {**content.EXTRA, "rank": dist.get_rank()} if what == "all" else None
    own = None if what == "model" else optimizer
    saved = checkpoint.save(path.parent / "saved", model, own, extra, step=content.STEP)
    if dist.get_rank() == 0:
        saved.rename(path)
        saved.parent.rmdir()


def _save_safetensors(max_file_size: int, path: Path) -> None:
    model, optimizer = ours("flat")
    content.take_step(optimizer)
    checkpoint.save_safetensors(path, model, max_file_size=max_file_size)


def _save_ours(kind: str, form: str, path: Path) -> None:
    warnings.simplefilter("ignore")  # torch's ShardedTensor is deprecated
    model, optimizer = ours(kind)
    content.take_step(optimizer)
    _keep_few_settings(optimizer)
    if kind == "rows":
        states = checkpoints.states_by_torch(model, optimizer)
    else:
        states = checkpoints.flat_states(model, optimizer, form, fsdp_compat)
    if "model" in path.name:
        del states["optimizer"]
    checkpoints.save_states(states, path)


def make_ours(folder: Path) -> Entries:
    entries: Entries = {}
    extra = content.facts_of({**content.EXTRA, "rank": 0})
    for kind, ranks in [
        *(("flat", 2), ("original", 2), ("rows", 2)),
        *(("columns", 3), ("flat-tp", 4), ("rows-tp", 4)),
    ]:
        run_ranks(ranks, _save_native, kind, "all", folder / f"native-{kind}")
        entries[f"native-{kind}"] = {**_entry(), "extra": extra}
    mapped = {"FSDP_COMPAT_SAME_HOST": "mapped", "FSDP_COMPAT_MAP_FROM": "1"}
    for kind in ("flat", "rows"):  # of these, flat shards consist of whole pages
        path = folder / f"native-{kind}-mapped-model"
        run_ranks(2, _save_native, kind, "model", path, environment=mapped)
        entries[path.name] = _entry(False)
    for kind in ("flat", "original", "rows"):
        run_ranks(2, _save_native, kind, "rank-local", folder / f"native-{kind}-rank-local")
        entries[f"native-{kind}-rank-local"] = {**_entry(), "content": "rank-local"}
    for kind in ("flat", "rows"):  # each state is whole on one rank
        run_ranks(2, _save_native, kind, "whole", folder / f"native-{kind}-whole")
        entries[f"native-{kind}-whole"] = _entry()
    for name, max_file_size in [("safetensors", 1 << 20), ("safetensors-sharded", 64)]:
        run_ranks(2, _save_safetensors, max_file_size, folder / name)
        entries[name] = {**_entry(False), "step": None, "has_ties": False}
    for kind, form, name in [
        ("flat", "FULL", "flat-full.pt"),
        ("flat", "SHARDED", "flat-sharded-ranks"),
        ("flat", "LOCAL", "flat-local-ranks"),
        ("flat", "SHARDED", "flat-sharded-model"),
        ("original", "SHARDED", "original-sharded-ranks"),
        ("original", "LOCAL", "original-local-ranks"),
        ("rows", "SHARDED", "rows-sharded-model"),
        ("rows", "SHARDED", "rows-sharded-ranks"),
    ]:
        run_ranks(2, _save_ours, kind, form, folder / name)
        entry = _entry(form != "LOCAL" and "model" not in name)
        entries[name] = {**entry, "has_ties": form != "LOCAL", "extra": {"step": content.STEP}}
    return entries


# -- libraries that use torch's FSDP, called where they save: they train on accelerators alone


def _save_accelerate(path: Path) -> None:
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.checkpointing import save_accelerator_state
    from accelerate.state import PartialState
    from accelerate.utils import fsdp_utils

    warnings.simplefilter("ignore")
    PartialState(cpu=True)  # for its logger; it does not see the ranks
    process = SimpleNamespace(process_index=dist.get_rank(), num_processes=dist.get_world_size())
    if "full" in path.name:  # of FSDP1, torch gives wrong values on CPUs
        model, optimizer = _torch_rows("fsdp2", content.sgd)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="full_state_dict")
    else:
        model, optimizer = _torch_flat(True, content.sgd)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=1, state_dict_type="sharded_state_dict"
        )
    options = {"use_dcp": "ranks" not in path.name}
    fsdp_utils.save_fsdp_model(plugin, process, model, path, **options)
    fsdp_utils.save_fsdp_optimizer(plugin, process, optimizer, model, path, **options)
    if "full" in path.name and dist.get_rank() == 0:  # 14 KB of each rank's random states
        schedule = _schedule_of(optimizer)
        save_accelerator_state(path, [], [], [schedule], [], dist.get_rank(), content.STEP)


def _schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)


def _save_fabric(path: Path) -> None:
    from lightning.fabric.strategies import FSDPStrategy

    warnings.simplefilter("ignore")
    model, _ = _torch_flat(True, content.sgd)
    states = {"net": model, "step": content.STEP, "note": "fabric"}
    _in_process_group(FSDPStrategy).save_checkpoint(path, states)


def _save_lightning(path: Path) -> None:
    import lightning
    from lightning.pytorch.strategies import FSDPStrategy
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    warnings.simplefilter("ignore")
    model, optimizer = _torch_flat(True, content.sgd)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        states: dict[str, Any] = {
            "epoch": 0,
            "global_step": content.STEP,
            "pytorch-lightning_version": lightning.__version__,
            "state_dict": model.state_dict(),
            "optimizer_states": [FullyShardedDataParallel.optim_state_dict(model, optimizer)],
        }
    _in_process_group(FSDPStrategy).save_checkpoint(states, path)


def _in_process_group(strategy_class: Any) -> Any:
    """Return a strategy of Lightning that finds its ranks in the process group."""
    from lightning.fabric.plugins.environments import LightningEnvironment

    strategy = strategy_class(state_dict_type="sharded", cluster_environment=LightningEnvironment())
    strategy.cluster_environment.set_global_rank(dist.get_rank())
    strategy._local_rank = dist.get_rank()
    return strategy


def make_clients(folder: Path) -> Entries:
    import lightning

    scheduler = _schedule_of(content.sgd(content.Tiny())).state_dict()
    lightnings = {
        "epoch": 0,
        "global_step": content.STEP,
        "pytorch-lightning_version": lightning.__version__,
    }
    entries = {}
    for name, save, step, extra in [
        ("accelerate-full", _save_accelerate, None, {"scheduler": scheduler}),
        ("accelerate-sharded", _save_accelerate, None, {}),
        ("accelerate-sharded-ranks", _save_accelerate, None, {}),
        ("fabric-model", _save_fabric, content.STEP, {"step": content.STEP, "note": "fabric"}),
        ("lightning", _save_lightning, content.STEP, lightnings),
    ]:
        run_ranks(2, save, folder / name)
        entries[name] = {
            **_entry("model" not in name),
            "content": "sgd",
            "step": step,
            "extra": content.facts_of(extra),
        }
    return entries


# -- the table


def _entry(has_optimizer: bool = True) -> dict[str, Any]:
    return {
        "torch": MINOR,
        "content": "adam",
        "has_optimizer": has_optimizer,
        "has_ties": True,  # False: only the first name of each tied parameter
        "needs_shapes": False,  # to tell the parameters inside flat ones apart
        "step": content.STEP,
        "extra": {},
    }


def main(what: str, name: str) -> None:
    from tests.checkpoint.corpus import make  # the name under which ranks find the functions

    folder = CORPUS / name
    folder.mkdir()  # raises if it exists
    entries = getattr(make, f"make_{what}")(folder)
    truth: dict[str, Any] = {"contents": {}, "entries": {}}
    if TRUTH.exists():
        truth = json.loads(TRUTH.read_text(encoding="utf-8"))
    for key, optimizer_of in content.OPTIMIZERS.items():
        values = content.unsharded(optimizer_of)
        assert truth["contents"].setdefault(key, values) == values, "this torch computes others"
    truth["entries"] |= {f"{name}/{path}": entry for path, entry in entries.items()}
    TRUTH.write_text(json.dumps(truth, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
