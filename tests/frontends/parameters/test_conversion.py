"""Converting a wrapped model to another dtype converts its shards before the first forward and
raises afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import ShardingStrategy, StateError
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.cases import about
from tests.support.models import DIM, Block, Shifted, chain
from tests.support.parity import Pair, assert_same_values, both_forms, seeded, vectors
from tests.support.ranks import on_ranks

# With a buffer, and batch norms in the root unit.
NETWORK = partial(chain, Shifted, partial(nn.BatchNorm1d, DIM), Block, partial(nn.Linear, DIM, 3))


def batch(dtype: torch.dtype) -> Tensor:
    return vectors(torch.Generator().manual_seed(1)).to(dtype)


def wrapped(**options: Any) -> FSDP:
    return FSDP(seeded(NETWORK), auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def trains(plain: nn.Module, model: nn.Module, dtype: torch.dtype) -> None:
    """Train both, with the same batch on all ranks."""
    tolerance = 0.02 if dtype == torch.bfloat16 else None  # of sums in another order
    pair = Pair(plain, model, data_ranks=1, tolerance=tolerance, batch=lambda _: batch(dtype))
    for _ in range(2):
        pair.step()
    pair.assert_state_equal()


CONVERSIONS: dict[str, tuple[Callable[[nn.Module], nn.Module], torch.dtype, str]] = {
    "double": (lambda m: m.double(), torch.float64, "FULL_SHARD"),
    "bfloat16": (lambda m: m.bfloat16(), torch.bfloat16, "SHARD_GRAD_OP"),
    "to": (lambda m: m.to("cpu", torch.float64), torch.float64, "NO_SHARD"),
    "rounded once": (lambda m: m.half().double(), torch.float64, "FULL_SHARD"),
    "and back": (lambda m: m.double().float(), torch.float32, "SHARD_GRAD_OP"),
}


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks("num_ranks")
def test_new_model_trains_in_the_dtype_it_is_converted_to(num_ranks: int) -> None:
    for how, (convert, dtype, strategy) in CONVERSIONS.items():
        with about(how):
            plain = convert(seeded(NETWORK))
            model = wrapped(use_orig_params=True, sharding_strategy=ShardingStrategy[strategy])
            before = list(map(id, model.parameters()))
            assert convert(model) is model
            assert list(map(id, model.parameters())) == before, "an optimizer made before goes on"
            assert {p.dtype for p in model.parameters()} == {dtype}
            assert [b.dtype for b in model.buffers()] == [b.dtype for b in plain.buffers()]
            assert_same_values(model.state_dict(), plain.state_dict(), "converted value", 0.0)
            trains(plain, model, dtype)


@both_forms
@on_ranks(2)
def test_model_that_has_run_rejects_a_conversion_and_still_trains(use_orig_params: bool) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    with (
        pytest.raises(StateError, match=r"inside summon_full_params, where"),
        FSDP.summon_full_params(model),
    ):
        model.half()
    model(batch(torch.float32)).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for convert in (model.half, partial(model.to, torch.float64), model[2].bfloat16):
        with pytest.raises(ValueError, match="before the first forward"):
            convert()
    model.float()
    model.to("cpu")
    assert_same_values(model.state_dict(), before, "value", 0.0)
    model(batch(torch.float32)).sum().backward()


@on_ranks(2)
def test_conversion_on_one_rank_raises_on_all_ranks() -> None:
    model = wrapped()
    with pytest.raises(StateError, match="conversion"):
        model.half() if dist.get_rank() == 0 else model.state_dict()
