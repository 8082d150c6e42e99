"""The same training with torch's FullyShardedDataParallel and with ours, compared bit by bit.

@on_ranks(2)
def test_training_is_bit_equal_to_torch() -> None:
    assert_as_torch(partial(trained, build=Stack, strategy="SHARD_GRAD_OP"))"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

import fsdp_compat
from tests.support.models import Block, Stack
from tests.support.parity import Batch, plain_name, seeded, sgd, square, vectors

Values = dict[str, Tensor]


def assert_as_torch(train: Callable[[Any], Values], what: object = "") -> None:
    """Compare what ``train`` returns for torch.distributed.fsdp and for fsdp_compat. Collective."""
    with warnings.catch_warnings():
        # torch deprecates NO_SHARD, and its FSDP warns of its own state dicts and of batch norms
        warnings.simplefilter("ignore")
        expected, got = train(torch_fsdp), train(fsdp_compat)
    assert sorted(got) == sorted(expected)
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, f"{what}: {name}"
        difference = (got[name].double() - value.double()).abs().max() if value.numel() else 0.0
        assert torch.equal(got[name], value), f"{what}: {name} differs by {difference:.1e}"


def trained(
    library: Any,
    build: Callable[[], nn.Module] = Stack,
    units: Collection[type[nn.Module]] = (Block,),
    *,
    policy: Callable[[Any], Any] | None = None,
    strategy: str = "FULL_SHARD",
    precision: dict[str, Any] | None = None,
    prepare: Callable[[Any, Any], None] = lambda library, model: None,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    batch: Batch = vectors,
    pattern: str = "ss",
    with_state: bool = False,
    **options: Any,
) -> Values:
    """Train with ``library``; return losses, and whole parameters after each update. Collective.

    policy: makes a policy of the library; None: for ``units``. prepare: changes the wrapped model.
    pattern: a letter for each backward: n is under no_sync, a has no update, s has one. with_state:
    also return buffers and the optimizer's state.
    """
    cls = library.FullyShardedDataParallel
    model = cls(
        seeded(build),
        auto_wrap_policy=policy(library) if policy else library.wrap.ModuleWrapPolicy(units),
        sharding_strategy=library.ShardingStrategy[strategy],
        mixed_precision=library.MixedPrecision(**precision) if precision else None,
        device_id=torch.device("cpu"),
        **options,
    )
    prepare(library, model)
    return recorded(library, model, optimizer(model.parameters()), pattern, batch, with_state)


def recorded(
    library: Any,
    model: Any,
    optim: torch.optim.Optimizer,
    pattern: str,
    batch: Batch = vectors,
    with_state: bool = False,
) -> Values:
    """Train a model that is wrapped: see ``trained``. Collective."""
    cls = library.FullyShardedDataParallel
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    seen: Values = {}
    for number, letter in enumerate(pattern):
        with model.no_sync() if letter == "n" else contextlib.nullcontext():
            loss = square(model, batch(generator))
            loss.backward()
        seen[f"{number}: loss"] = loss.detach()
        if letter == "s":
            optim.step()
            optim.zero_grad()
            seen |= {f"{number}: {name}": value for name, value in _parameters(cls, model).items()}
            if with_state:
                seen |= {f"{number}: {n}": v for n, v in _state(library, model, optim).items()}
    return seen


def _parameters(cls: Any, model: Any) -> Values:
    with cls.summon_full_params(model, writeback=False):
        return {
            f"parameter {plain_name(n)}": p.detach().clone() for n, p in model.named_parameters()
        }


def _state(library: Any, model: Any, optim: torch.optim.Optimizer) -> Values:
    cls = library.FullyShardedDataParallel
    # In torch, CPU copies of values that are on the CPU are freed memory, or other values.
    config = library.FullStateDictConfig(offload_to_cpu=False)
    optim_config = library.FullOptimStateDictConfig(offload_to_cpu=False)
    full = library.StateDictType.FULL_STATE_DICT
    with cls.state_dict_type(model, full, config, optim_config):
        state, values = cls.optim_state_dict(model, optim)["state"], model.state_dict()
    found = {f"state {name}": value.clone() for name, value in values.items()}
    for name, entry in state.items():
        found |= {f"{kind} of {name}": v.clone() for kind, v in entry.items() if v is not None}
    assert any(" of " in name for name in found)
    return found
