"""State dicts of values that know their shape and dtype and are read from their file when somebody
computes with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compat import CheckpointError, FullStateDictConfig, StateDictType
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.memory import NewBytes
from tests.support.odd_model import Config, assert_same, cloned, make_model, shard, stack
from tests.support.ranks import on_ranks
from tests.support.sampling import sample

FLAT: Config = ("FULL_SHARD", False, "blocks")
ORIGINAL: Config = ("SHARD_GRAD_OP", True, "always")
FULL = StateDictType.FULL_STATE_DICT
UNSHARDED: Config = ("NO_SHARD", True, "blocks")
MESH: Config = ("HYBRID_SHARD", False, "blocks")


class Lazy:
    """As Lightning has while a checkpoint is read: on the meta device, without methods."""

    loads = 0  # of all of them

    def __init__(self, load: Callable[[], Any], like: Tensor) -> None:
        self.load, self.is_meta = load, True
        self.shape, self.dtype, self.layout = like.shape, like.dtype, like.layout

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.loads += sum(isinstance(arg, Lazy) for arg in args)
        loaded = (arg.load() if isinstance(arg, Lazy) else arg for arg in args)
        return func(*loaded, **(kwargs or {}))


def lazily(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: Lazy(value.clone, value) if isinstance(value, Tensor) else value
        for name, value in state.items()
    }


@pytest.mark.parametrize("config", [FLAT, ORIGINAL, UNSHARDED, MESH])
@pytest.mark.parametrize("world_size", sample([1, 2, 3, 4], 0, 2))
@on_ranks("world_size")
def test_lazy_values_load_like_tensors(world_size: int, config: Config) -> None:
    wanted = make_model(1).state_dict()
    real = {n for n, v in wanted.items() if isinstance(v, Tensor) and v.is_floating_point()}
    half = {name: v.half() if name in real else v for name, v in wanted.items()}
    model = shard(make_model(2), config)
    model.load_state_dict(lazily(half))
    expected = {name: half[name].to(v.dtype) if name in real else v for name, v in wanted.items()}
    assert_same(model.state_dict(), expected)
    assert str(model.load_state_dict(lazily(wanted))) == "<All keys matched successfully>"
    assert_same(model.state_dict(), wanted)
    block = make_model(3).blocks[0].state_dict()
    model.blocks[0].load_state_dict(lazily(block))
    assert_same(model.blocks[0].state_dict(), block)
    with FSDP.summon_full_params(model):
        model.load_state_dict(lazily(wanted))
    assert_same(model.state_dict(), wanted)


def wrapped_stack(seed: int) -> FSDP:
    torch.manual_seed(seed)
    return FSDP(stack(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


def rank0_only(model: nn.Module) -> None:
    FSDP.set_state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True))


@on_ranks(2)
def test_one_unit_is_read_at_a_time_and_each_value_once() -> None:
    wanted = {name: value.clone() for name, value in wrapped_stack(1).state_dict().items()}
    unit_nbytes = wanted["0.weight"].nbytes
    model = wrapped_stack(2)
    Lazy.loads = 0
    with NewBytes() as new:
        model.load_state_dict(lazily(wanted))
    assert Lazy.loads == len(wanted), "each is read once"
    assert new.peak <= 2 * unit_nbytes, "one unit at a time"
    assert_same(model.state_dict(), wanted)

    model = wrapped_stack(2)
    rank0_only(model)
    Lazy.loads = 0
    with NewBytes() as new:
        model.load_state_dict(lazily(wanted) if dist.get_rank() == 0 else {})
    assert Lazy.loads == (len(wanted) if dist.get_rank() == 0 else 0)
    assert new.peak <= 3 * unit_nbytes, "one unit at a time"
    FSDP.set_state_dict_type(model, FULL)
    assert_same(model.state_dict(), wanted)


@on_ranks(4)
def test_a_rank_reads_only_parameters_it_has_a_part_of() -> None:
    """In one unit, whose parameters are one after the other in it."""
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4))))
    wanted = {name: value.clone() * 2 for name, value in model.state_dict().items()}
    Lazy.loads = 0
    model.load_state_dict(lazily(wanted))
    assert_same(model.state_dict(), wanted)
    assert Lazy.loads == 1


@on_ranks(2)
def test_lazy_values_that_do_not_fit_are_refused_unread() -> None:
    wanted = lazily(make_model(1).state_dict())
    wrong: list[tuple[str, str, Tensor]] = [
        ("cube", "size mismatch for cube: expected shape .3, 1, 5. as .*2, 2", torch.empty(2, 2)),
        ("cube", "complex64", torch.empty(3, 1, 5, dtype=torch.complex64)),
        ("count", "size mismatch for count", torch.empty(3, dtype=torch.int64)),
        ("surplus", "Unexpected key.*surplus", torch.empty(3)),
    ]
    for config, on_rank0 in ((FLAT, False), (ORIGINAL, True)):
        model = shard(make_model(2), config)
        before = cloned(model.state_dict())
        if on_rank0:
            rank0_only(model)
        for key, words, like in wrong:
            given = {**wanted, key: Lazy(lambda: None, like)}
            Lazy.loads = 0
            with pytest.raises(CheckpointError, match=words):
                model.load_state_dict({} if on_rank0 and dist.get_rank() else given)
            assert Lazy.loads == 0, words
        FSDP.set_state_dict_type(model, FULL)
        assert_same(model.state_dict(), before, "nothing was loaded")


@on_ranks(2)
def test_a_value_that_does_not_load_is_an_error_on_all_ranks() -> None:
    def torn() -> Tensor:
        raise OSError("the file ends here")

    faults: list[tuple[str, Callable[[], Any]]] = [
        ("OSError: the file ends here", torn),
        (r"a Tensor of shape \(2, 2\)", lambda: torch.ones(2, 2)),
        ("on meta", lambda: torch.empty(3, 1, 5, device="meta")),
        ("float64", lambda: torch.ones(3, 1, 5).double()),
    ]
    for words, load in faults:
        given = {
            **lazily(make_model(1).state_dict()),
            "cube": Lazy(load, torch.empty(3, 1, 5)),
        }
        model = shard(make_model(2), UNSHARDED)
        with pytest.raises(CheckpointError, match=f"(?s){words}.*'cube'"):
            model.load_state_dict(given)
        model = shard(make_model(2), FLAT)
        rank0_only(model)
        with pytest.raises(CheckpointError, match=f"(?s){words}.*'cube'"):  # on all ranks
            model.load_state_dict(given if dist.get_rank() == 0 else {})
        count = {
            **given,
            "cube": make_model(1).cube,
            "count": Lazy(load, torch.empty(())),
        }
        with pytest.raises(CheckpointError, match="'count'"):
            model.load_state_dict(count if dist.get_rank() == 0 else None)
        model.load_state_dict(lazily(make_model(1).state_dict()) if dist.get_rank() == 0 else None)
        FSDP.set_state_dict_type(model, FULL)
        assert_same(model.state_dict(), make_model(1).state_dict(), "the next load works")
