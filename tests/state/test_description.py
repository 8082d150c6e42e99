"""``describe`` and ``print(model)``: what they say of units, at any moment and on any rank."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import (
    MixedPrecision,
    MixedPrecisionPolicy,
    UsageError,
    describe,
    fully_shard,
)
from tests.support.ranks import on_ranks

BF16, FP32 = torch.bfloat16, torch.float32


class Net(nn.Module):
    """Three layers of 56 elements, 27 of the root, 4 of a parameter that is ignored, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.head, self.ignored = nn.Linear(7, 3), nn.Parameter(torch.ones(4))
        self.extra = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.ones(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x) * self.extra * self.ignored.sum()


def flat(model: Net, **given: Any) -> nn.Module:
    precision = MixedPrecision(param_dtype=BF16, reduce_dtype=FP32)
    wrap: dict[str, Any] = {"auto_wrap_policy": {"Linear"}, "mixed_precision": precision}
    return FSDP(model, ignored_states=[model.ignored], **wrap, **given)


def original(model: Net) -> nn.Module:
    return flat(model, use_orig_params=True)


def rows(model: Net) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    for layer in (*model.layers, model.head):
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy, ignored_params={model.ignored})


LAYOUTS = {"flat": flat, "original": original, "rows": rows}
all_layouts = pytest.mark.parametrize("layout", LAYOUTS)


@all_layouts
@on_ranks(2)
def test_units_are_counted_before_their_first_use_on_one_rank_alone(layout: str) -> None:
    model, strategy = LAYOUTS[layout](Net()), "fully_shard" if layout == "rows" else "FULL_SHARD"
    numels = [("", 3), *((f"layers.{number}", 56) for number in range(3)), ("head", 24)]
    found = describe(model) if dist.get_rank() == 0 else None
    dist.barrier()  # rank 0 gets here although no other rank has made the call

    if found is not None:
        units = found.units
        assert [(unit.name, unit.numel) for unit in units] == numels
        assert {(unit.strategy, unit.ranks, unit.replicas) for unit in units} == {(strategy, 2, 1)}
        assert {unit.dtypes for unit in units} == {((FP32, BF16, FP32),)}
        assert [unit.is_resharded for unit in units] == [layout != "rows", *[True] * 4]
        assert all(unit.gathered_nbytes == unit.shard_nbytes for unit in units)  # half, of 2 ranks
        assert list(found.whole) == ["ignored", "scale"]
    own = torch.tensor([unit.own_numel for unit in describe(model).units])
    dist.all_reduce(own)
    assert own.tolist() == [numel for _, numel in numels]


TABLE = """\
unit                 strategy    ranks reshards      elements bytes here all-gather  dtypes
(root)               FULL_SHARD      2      yes             3       16 B       16 B  fp32/bf16/fp32
layers.0, each of 3  FULL_SHARD      2      yes            56      128 B      128 B  fp32/bf16/fp32
head                 FULL_SHARD      2      yes            24       64 B       64 B  fp32/bf16/fp32
other parameters                                            4       16 B             fp32
buffers                                                     2       16 B             fp64
total                                                     201      496 B      464 B
reshards: after forward; dtypes: stored/computed/reduced
other parameters (not sharded): ignored
buffers (not sharded): scale"""


@on_ranks(2)
def test_the_table_shows_units_that_are_alike_once_and_parts_are_refused() -> None:
    assert str(describe(flat(Net()))) == TABLE
    last = str(describe(nn.Linear(2, 2))).splitlines()[-1]
    assert last == "other parameters (not sharded): weight, bias"
    for model, part in ((flat(Net()), "module"), (rows(Net()), "layers")):
        with pytest.raises(UsageError, match="part of a unit"):
            describe(getattr(model, part))


@all_layouts
@on_ranks(2)
def test_it_says_the_same_at_any_moment(layout: str) -> None:
    model = LAYOUTS[layout](Net())
    expected, found = (repr(model), str(describe(model))), list[tuple[str, str]]()

    def look(*_: Any) -> None:
        found.append((repr(model), str(describe(model))))

    handles = [each.register_forward_hook(look) for each in (model.layers[1], model.head)]
    x = torch.ones(2, 7)
    output = model(x)
    output.register_hook(look)
    output.sum().backward()
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 8))
    for handle in handles:  # a local function cannot be pickled
        handle.remove()
    look()
    if layout != "rows":
        with FSDP.summon_full_params(model):
            look()
        for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert (repr(made), str(describe(made))) == expected
    model(x).sum().backward()
    look()
    assert len(found) == (5 if layout == "rows" else 6) and set(found) == {expected}
