"""Optimizers of other packages, of whole parameters of a sharded model, step as in one process."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import UsageError, checkpoint
from fsdp_compat.optim import ShardBlocks
from tests.examples.test_readme import blocks
from tests.examples.test_recipes import run_recipe
from tests.state.test_whole_parameters import (
    LAYOUTS,
    WAYS,
    Net,
    assert_near,
    beside,
    expected,
    load,
    save,
    sharded,
    train,
    values,
)
from tests.support.cases import about
from tests.support.models import Residual as Layer
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.clients

GALORE = {"rank": 4, "update_proj_gap": 2, "scale": 1.0, "projection_type": "std"}
# by package: name of the class, options; "group" are settings of the parameter group
OPTIMIZERS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "pytorch_optimizer": [
        ("AdaFactor", {"lr": 0.02}),
        ("Adan", {"lr": 0.02}),
        ("CAME", {"lr": 0.02}),
        ("GaLore", {"lr": 0.02, "group": GALORE}),
        ("LARS", {"lr": 0.02}),
        ("Lamb", {"lr": 0.02}),
        ("Lion", {"lr": 0.002}),
        ("Muon", {"lr": 0.02, "group": {"use_muon": True}}),
        ("SOAP", {"lr": 0.02}),
        ("ScalableShampoo", {"lr": 0.02, "start_preconditioning_step": 1, "block_size": 8}),
        ("Shampoo", {"lr": 0.02}),
    ],
    "bitsandbytes.optim": [
        ("AdamW8bit", {"lr": 0.02, "min_8bit_size": 16}),
        ("Lion8bit", {"lr": 0.002, "min_8bit_size": 16}),
    ],
    "torchao.optim": [
        ("AdamW8bit", {"lr": 0.02, "block_size": 2}),
        ("AdamW4bit", {"lr": 0.02, "block_size": 2}),
    ],
    "transformers.optimization": [
        ("Adafactor", {"lr": 0.02, "relative_step": False, "scale_parameter": True})
    ],
}
# Those in which parameters depend on each other.
TOGETHER = [("Prodigy", {}), ("DAdaptAdam", {}), ("Lamb", {"pre_norm": True})]


def made(module: str, name: str, options: dict[str, Any], params: Any) -> Optimizer:
    given = dict(options)
    group = given.pop("group", None)
    if group is not None:
        params = [{"params": params, **group}]
    return getattr(importlib.import_module(module), name)(params, **given)


def makers(module: str, cases: Any) -> dict[str, Callable[[Any], Optimizer]]:
    return {name: functools.partial(made, module, name, options) for name, options in cases}


def needs(module: str) -> None:
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs the extra 'optimizers': {package}")


@pytest.mark.parametrize("module", OPTIMIZERS)
def test_steps_are_those_of_one_process(module: str) -> None:
    needs(module)
    for world_size in (2, 3):
        run_ranks(world_size, _compare, module, timeout=300)


def _compare(module: str) -> None:
    world_size = dist.get_world_size()
    for name, make in makers(module, OPTIMIZERS[module]).items():
        right = expected(make, num_ranks=world_size)
        for layout, wrap in LAYOUTS.items():
            model = wrap(Net())
            with about((name, layout)):
                train(model, sharded(model, make))
                assert_near(values(model), right, is_exact=True)


class Wide(Net):
    """With parameters that are large enough for 8-bit states."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(400), Layer(384)])


@pytest.mark.parametrize("module", ["bitsandbytes.optim", "torchao.optim"])
def test_8_bit_states_move_between_numbers_of_ranks(module: str, tmp_path: Path) -> None:
    needs(module)
    options = {"block_size": 32} if module.startswith("torchao") else {}
    for world_size in (2, 3):
        run_ranks(world_size, _run, module, {"lr": 0.02, **options}, tmp_path, timeout=300)


def _run(module: str, options: dict[str, Any], folder: Path) -> None:
    make = functools.partial(made, module, "AdamW8bit", options)
    plain, saves = Wide(), dist.get_world_size() == 2
    train(plain, beside(plain, make))
    for way in WAYS:
        model = LAYOUTS["original"](Wide())
        optimizer = sharded(model, make)
        with about(way):
            if saves:
                train(model, optimizer, (0, 1))
                sizes = {v.dtype for s in optimizer.state.values() for v in tensors_in(s)}
                assert torch.uint8 in sizes
                save(way, folder / way, model, optimizer)
            else:
                load(way, folder / way, model, optimizer)
                train(model, optimizer, (2, 3))
                assert_near(values(model), plain.state_dict(), is_exact=False)


def _quantized_blocks(name: str, parameter: nn.Parameter) -> int:
    """Blocks of torchao, which leaves parameters that these do not divide as they are."""
    return 256 if parameter.numel() % 256 == 0 else parameter.numel()


# by package: blocks of shards in which its 8-bit optimizers step as in one process
SHARD_BLOCKS = {
    "bitsandbytes.optim": ShardBlocks(256, least_part=4096, max_padding=9),
    "torchao.optim": ShardBlocks(_quantized_blocks, least_part=4096, max_padding=9),
}


@pytest.mark.parametrize("module", SHARD_BLOCKS)
def test_shards_of_blocks_are_stepped_as_in_one_process(module: str, tmp_path: Path) -> None:
    needs(module)
    for world_size in (2, 1, 3, 4):  # the first one saves
        run_ranks(world_size, _step_shards, module, tmp_path, timeout=400)


def _step_shards(module: str, folder: Path) -> None:
    ranks = dist.get_world_size()
    for name, options in OPTIMIZERS[module]:
        make = functools.partial(made, module, name, {"lr": options["lr"]})
        with about((name, ranks)):
            plain = Wide()
            train(plain, right := make(plain.parameters()), (0, 1), 2)
            model = LAYOUTS["original"](Wide(), shard_blocks=SHARD_BLOCKS[module])
            optimizer = make(model.parameters())
            if ranks == 2:
                train(model, optimizer, (0, 1))
                checkpoint.save(folder / name, model, optimizer, step=2)
                if dist.get_rank() == 0:
                    torch.save(right.state_dict(), folder / f"{name}.pt")
            else:
                checkpoint.load(folder / name, model, optimizer)
            saved = {d for s in optimizer.state.values() for v in tensors_in(s) for d in [v.dtype]}
            assert torch.uint8 in saved or not any(p.numel() >= 4096 for p in model.parameters())
            train(plain, right, (2, 3), ranks)
            train(model, optimizer, (2, 3))
            assert_near(values(model), plain.state_dict(), is_exact=True)
            if ranks != 2:  # as a plain process has saved it
                given = torch.load(folder / f"{name}.pt", weights_only=False)
                optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, given))
                train(model, optimizer, (2,))


def _train_in_8_bits(directory: Path) -> None:
    (recipe,) = blocks("examples/README.md", "python", "8-bit and block-wise optimizers")
    assert run_recipe(recipe, directory)["optimizer"].state


def test_the_recipe_of_blocks_runs(tmp_path: Path) -> None:
    needs("bitsandbytes.optim")
    run_ranks(2, _train_in_8_bits, tmp_path)


def tensors_in(state: dict[Any, Any]) -> Iterator[torch.Tensor]:
    for value in state.values():
        if hasattr(value, "__tensor_flatten__"):
            yield from (getattr(value, name) for name in value.__tensor_flatten__()[0])
        elif isinstance(value, torch.Tensor):
            yield value


def test_those_of_all_parameters_together_are_refused() -> None:
    needs("pytorch_optimizer")
    run_ranks(2, _refused)


def _refused() -> None:
    for name, make in makers("pytorch_optimizer", TOGETHER).items():
        with about(name), pytest.raises(UsageError, match=f"{name} depend on all parameters"):
            sharded(LAYOUTS["original"](Net()), make)
