"""Shards that are cut between blocks: optimizers that keep statistics of blocks or rows step them
as in one process, with states that any number of ranks loads."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_compat import (
    CheckpointError,
    StateDictType,
    UsageError,
    checkpoint,
    describe,
    fully_shard,
    optim,
    plan,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.optim import GatheredOptimizer, ShardBlocks
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.state.test_whole_parameters import assert_near, batch, train, values
from tests.support.cases import about
from tests.support.models import Residual
from tests.support.ranks import on_ranks, run_ranks
from tests.support.traffic import collectives

BLOCK, LEAST = 16, 32  # of Quantized


def rows(name: str, parameter: nn.Parameter) -> int:
    return math.prod(parameter.shape[1:])


def whole(name: str, parameter: nn.Parameter) -> int:
    return parameter.numel()


class Net(nn.Sequential):
    """Two units of several widths, with a parameter that is not cut in blocks evenly."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(Residual(40), Residual(30), nn.Linear(12, 12))


class Rows(Optimizer):
    """Scales each row by its largest gradient so far."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                dims = tuple(range(1, p.dim()))
                largest = p.grad.abs().amax(dims) if dims else p.grad.abs()
                state["largest"] = torch.maximum(state.get("largest", largest), largest)
                scale = state["largest"].view(-1, *(1 for _ in dims)) + 1e-8
                p.sub_(p.grad / scale, alpha=group["lr"])


class Quantized(Optimizer):
    """Keeps a momentum in 8 bits, with a scale for each block and a table for all; that of small
    parameters as it is."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None and p.numel()):
                p.sub_(self._momentum(self.state[p], p.grad), alpha=group["lr"])

    def _momentum(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        state["step"] = state.get("step", 0) + 1
        if grad.numel() < LEAST:
            state["moment"] = 0.9 * state.get("moment", torch.zeros_like(grad)) + grad
            return state["moment"]
        table = state.setdefault("table", torch.linspace(-1, 1, 255))
        padded = torch.nn.functional.pad(grad.reshape(-1), (0, -grad.numel() % BLOCK))
        if "codes" in state:
            codes = torch.nn.functional.pad(state["codes"].reshape(-1), (0, -grad.numel() % BLOCK))
            padded += 0.9 * (table[codes.long()].view(-1, BLOCK) * state["scales"][:, None]).view(
                -1
            )
        blocks = padded.view(-1, BLOCK)
        state["scales"] = blocks.abs().amax(1)
        codes = torch.round(blocks / (state["scales"][:, None] + 1e-12) * 127 + 127)
        state["codes"] = codes.to(torch.uint8).view(-1)[: grad.numel()].view(grad.shape)
        return (table[state["codes"].long().view(-1)]).view(grad.shape) * (
            state["scales"].repeat_interleave(BLOCK)[: grad.numel()].view(grad.shape)
        )


# by name: an optimizer, and blocks in which its steps are those of one process
BLOCKS: dict[str, tuple[Callable[[Any], Optimizer], list[ShardBlocks]]] = {
    "rows": (
        Rows,
        [ShardBlocks(rows, max_padding=9), ShardBlocks(whole, max_padding=9)],
    ),
    "quantized": (
        Quantized,
        [ShardBlocks(BLOCK, LEAST, 9.0), ShardBlocks(3 * BLOCK, LEAST, 9.0)],
    ),
}


def sharded(blocks: Any, use_orig_params: bool = True, net: nn.Module | None = None) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "shard_blocks: ")  # much padding, as units are small
        return FSDP(
            Net() if net is None else net,
            auto_wrap_policy=ModuleWrapPolicy({Residual}),
            use_orig_params=use_orig_params,
            shard_blocks=blocks,
        )


def expected(make: Callable[[Any], Optimizer], num_ranks: int, steps: int = 4) -> dict[str, Tensor]:
    plain = Net()
    train(plain, make(plain.parameters()), range(steps), num_ranks)
    return plain.state_dict()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@on_ranks("world_size")
def test_steps_are_those_of_one_process_without_an_exchange(world_size: int, name: str) -> None:
    make, ways = BLOCKS[name]
    for blocks in ways:
        model = sharded(blocks)
        optimizer = make(model.parameters())
        with about(blocks), warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is said of an optimizer that is right
            assert optim.check(model, optimizer) == []
            train(model, optimizer)
        assert_near(values(model), expected(make, world_size), is_exact=True)
        model(batch(0)).square().mean().backward()
        assert not collectives(model, optimizer.step).total()


@on_ranks(2)
def test_parts_of_rows_are_rows_and_other_parts_have_one_dim() -> None:
    for blocks, dims in ((rows, 2), (whole, 2), (BLOCK, 1), (None, 1)):
        model = sharded(ShardBlocks(blocks, max_padding=9) if blocks else None)
        for name, parameter in model.named_parameters():
            plain = Net().get_parameter(name.replace("_fsdp_wrapped_module.", ""))
            if parameter.numel() and plain.dim() == 2:
                assert parameter.dim() == dims
            if blocks is whole:
                assert parameter.numel() in (0, plain.numel())
    for given, shape in ((None, (4,)), (rows, (4, 1))):
        column = nn.Linear(1, 8, bias=False)
        model = FSDP(column, use_orig_params=True, shard_blocks=given)
        assert [tuple(parameter.shape) for parameter in model.parameters()] == [shape]


# -- states


WAYS = ("native", "full", "plain", "first rank")


@pytest.mark.parametrize("name", BLOCKS)
def test_states_load_on_other_ranks_and_into_other_blocks(name: str, tmp_path: Path) -> None:
    make, (blocks, others) = BLOCKS[name]
    run_ranks(2, _save, make, blocks, tmp_path)
    for world_size in (1, 2, 3, 4):
        run_ranks(world_size, _load, make, others, tmp_path)


def _save(make: Callable[[Any], Optimizer], blocks: ShardBlocks, folder: Path) -> None:
    model = sharded(blocks)
    optimizer = make(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as every layout of such blocks can load it
        train(model, optimizer, range(2), 1)
        checkpoint.save(folder / "native", model, optimizer, step=2)
        full = FSDP.optim_state_dict(model, optimizer)
    plain = Net()
    train(plain, its := make(plain.parameters()), range(2), 2)
    if dist.get_rank() == 0:
        torch.save([full, plain.state_dict(), its.state_dict()], folder / "dicts.pt")


def _load(make: Callable[[Any], Optimizer], blocks: ShardBlocks, folder: Path) -> None:
    plain, ranks = Net(), dist.get_world_size()
    right = make(plain.parameters())
    full, weights, numbered = torch.load(folder / "dicts.pt", weights_only=False)
    plain.load_state_dict(weights)
    right.load_state_dict(copy.deepcopy(numbered))
    train(plain, right, range(2, 4), ranks)
    for way in WAYS:
        model = sharded(blocks)
        optimizer = make(model.parameters())
        checkpoint.load(folder / "native", model, optimizer if way == "native" else None)
        given: Any = {"full": full, "plain": numbered, "first rank": full}.get(way)
        if way == "first rank":
            given = given if dist.get_rank() == 0 else None
            loadable = FSDP.scatter_full_optim_state_dict(given, model, optim=optimizer)
            optimizer.load_state_dict(loadable)
        elif given is not None:
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, given))
        with about(way):
            train(model, optimizer, range(2, 4))
            assert_near(values(model), plain.state_dict(), is_exact=True)


@on_ranks(2)
def test_states_of_blocks_are_refused_where_these_are_cut(tmp_path: Path) -> None:
    make, (blocks, _) = BLOCKS["quantized"]
    model = sharded(blocks)
    optimizer = make(model.parameters())
    train(model, optimizer, range(1))
    checkpoint.save(tmp_path, model, optimizer, step=1)
    full = FSDP.optim_state_dict(model, optimizer)
    other = sharded(ShardBlocks(BLOCK + 1, LEAST, 9.0))
    its = make(other.parameters())
    with pytest.raises(CheckpointError, match="scales"):
        checkpoint.load(tmp_path, other, its)
    with pytest.raises(CheckpointError, match="shard_blocks"):
        FSDP.optim_state_dict_to_load(other, its, full)
    assert not its.state


@on_ranks(2)
def test_states_of_blocks_of_parts_that_are_cut_anywhere_are_refused() -> None:
    """The numbers of scales, 4 for 60 elements and 8 for 120, fit blocks of 15 as well."""

    def made(blocks: Any) -> tuple[FSDP, Optimizer]:
        net = nn.Linear(10, 12, bias=False)
        given = ShardBlocks(blocks, max_padding=9) if blocks else None
        model = FSDP(net, use_orig_params=True, shard_blocks=given)
        return model, Quantized(model.parameters())

    for saved, loading in ((None, whole), (whole, None)):
        model, optimizer = made(saved)
        model(torch.randn(2, 10)).sum().backward()
        optimizer.step()
        full = FSDP.optim_state_dict(model, optimizer)
        with pytest.raises(CheckpointError, match="cannot be resharded"):
            FSDP.optim_state_dict_to_load(*made(loading), full)


@on_ranks(2)
def test_local_state_dicts_of_other_cuts_are_refused() -> None:
    for original in (False, True):
        model, same, other = (
            sharded(ShardBlocks(size, max_padding=9), original) for size in (rows, rows, BLOCK)
        )
        for each in (model, same, other):
            FSDP.set_state_dict_type(each, StateDictType.LOCAL_STATE_DICT)
        state = model.state_dict()
        same.load_state_dict(state)
        with pytest.raises(CheckpointError, match=r"0.*flat parameter of a LOCAL_STATE_DICT"):
            other.load_state_dict(state)


# -- arguments


@on_ranks(3)
def test_blocks_that_do_not_fit_are_refused_before_anything_changes() -> None:
    net = Net()
    for given, text in (
        (0, "shard_blocks"),
        ("rows", "shard_blocks"),
        (ShardBlocks(8, 0), "least_part"),
        (ShardBlocks(8, max_padding=-1), "max_padding"),
        (lambda name, p: 2.5, "'0.norm.weight'|'0..*'"),
        (whole, r"needs? too much padding(.|\n)*weight(.|\n)*blocks of \d+ elements(.|\n)*%"),
    ):
        with pytest.raises(UsageError, match=text):
            sharded(given, net=net)
        assert type(net[0]) is Residual
    names = list[str]()
    sharded(lambda name, p: names.append(name) or 1)
    assert names == [name for name, _ in Net().named_parameters()]
    with pytest.warns(UserWarning, match="weight' in blocks of .* over 3 ranks: .*% padding"):
        FSDP(Net(), shard_blocks=whole)


@on_ranks(2)
def test_ranks_that_ask_for_different_blocks_are_told() -> None:
    sizes = {0: 16, 1: 48}
    with pytest.raises(UsageError, match=r"in blocks of (16|48)"):
        model = sharded(ShardBlocks(sizes[dist.get_rank()], max_padding=9))
        model(batch(0))


@on_ranks(2)
def test_without_blocks_nothing_changes_and_with_them_padding_is_shown() -> None:
    model = sharded(ShardBlocks(rows, max_padding=9))
    lines = str(describe(model)).splitlines()
    [unit, *_] = [each for each in describe(model).units if each.padding]
    padded = 2 * unit.shard_nbytes // 4 - unit.numel
    assert unit.padding == padded / unit.numel > 0
    assert any(line.startswith("padding between blocks: at most ") for line in lines)
    assert "% padding" in str(model)
    for blocks in (None, 1):
        assert not any(each.padding for each in describe(sharded(blocks)).units)
    assert "padding" not in str(describe(sharded(None)))


def test_a_plan_shows_padding() -> None:
    with torch.device("meta"):
        net, x = Net(), torch.randn(6, 12)
    shown = plan(net, 2, x, use_orig_params=True, shard_blocks=ShardBlocks(whole, max_padding=9))
    assert "padding between blocks: at most " in str(shown)


@on_ranks(3)
def test_rows_of_fully_shard_are_whole_blocks_or_refused() -> None:
    net = nn.Linear(8, 12)  # parts of 4 rows
    for blocks, is_right in ((4 * 8, False), (lambda n, p: 2 * rows(n, p), True), (3, False)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if is_right:
                fully_shard(copy.deepcopy(net), shard_blocks=blocks)
                continue
        with pytest.raises(UsageError, match=r"'(weight|bias)' of shape \(12(, 8)?,?\) over 3"):
            fully_shard(net, shard_blocks=blocks)
        assert type(net) is nn.Linear
    fully_shard(nn.Linear(8, 12, bias=False), shard_blocks=32)


# -- optimizers of whole parameters, and checks


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks("world_size")
def test_what_lies_whole_on_its_owner_is_not_exchanged(world_size: int) -> None:
    muon, adamw = partial(torch.optim.Muon, lr=0.02), partial(torch.optim.AdamW, lr=0.02)
    is_matrix = lambda name, shape: len(shape) == 2  # noqa: E731
    plain = Net()
    matrices = [p for p in plain.parameters() if p.dim() == 2]
    both = [muon(matrices), adamw([p for p in plain.parameters() if p.dim() != 2])]
    for step in range(3):
        plain(batch(step)).square().mean().backward()
        for parameter in plain.parameters():
            parameter.grad = sum([parameter.grad] * world_size) / world_size
        for each in both:
            each.step()
            each.zero_grad()
    for blocks, num_exchanges in ((whole, 0), (None, 0 if world_size == 1 else 3)):
        model = sharded(ShardBlocks(blocks, max_padding=9) if blocks else None)
        axis = type(model._runtime.groups[0].shard)
        optimizer = GatheredOptimizer(model, muon, is_matrix, adamw)
        for step in range(3):
            model(batch(step)).square().mean().backward()
            with mock.patch.object(
                axis, "exchange", autospec=True, side_effect=axis.exchange
            ) as sent:
                optimizer.step()
            assert sent.call_count == num_exchanges
            optimizer.zero_grad()
        assert_near(values(model), plain.state_dict(), is_exact=True)


@on_ranks(2)
def test_check_says_which_blocks_make_an_optimizer_right() -> None:
    def said(make: Callable[[Any], Optimizer], blocks: Any, original: bool = True) -> str:
        model = FSDP(nn.Linear(70, 70), use_orig_params=original, shard_blocks=blocks)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optim.check(model, make(model.parameters()))
        return " ".join(str(each.message) for each in caught)

    right = f"shard_blocks=ShardBlocks({BLOCK}, least_part={LEAST})"
    for blocks in (None, 3, ShardBlocks(70, LEAST)):
        assert right in said(Quantized, blocks)
    assert said(Quantized, ShardBlocks(2 * BLOCK, LEAST)) == ""
    assert "those of a FlatParameter" in said(Quantized, BLOCK, original=False)
    assert "which cuts between rows" in said(Rows, BLOCK)
    assert said(Rows, rows) == ""
    assert "wrong on shards" in said(partial(torch.optim.Adafactor, lr=0.1), rows)
    assert said(partial(torch.optim.Adafactor, lr=0.1), ShardBlocks(whole, max_padding=9)) == ""
