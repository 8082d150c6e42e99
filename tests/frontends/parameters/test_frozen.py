"""Frozen parameters of any dtype are kept byte for byte, cost no memory for gradients, and may
become trainable between steps."""

from __future__ import annotations

import copy
import itertools
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_compat import (
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    StateError,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.memory import NewBytes
from tests.support.models import DIM, WIDE, Lora, Stack, chain
from tests.support.pairwise import each_value
from tests.support.parity import both_forms, make_pair, seeded, square, wide_vectors
from tests.support.ranks import on_ranks
from tests.support.same_host import MESSAGES

BF16 = torch.bfloat16
FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, *_ = ShardingStrategy


# -- bytes


def _patterns(dtype: torch.dtype) -> Tensor:
    """Every bit pattern in an odd shape; for bfloat16 all 65,536, including NaNs with payloads."""
    if dtype is torch.bool:
        return (torch.arange(255) % 3 == 0).view(5, 51)
    bits = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int32)
    codes = bits.to(torch.uint8 if dtype.itemsize == 1 else torch.uint16)
    codes = torch.cat([codes, codes[:1], codes[-5:-1]])
    return codes.view(dtype).view(-1, 9 if dtype.itemsize == 1 else 3).clone()


DTYPES = [torch.uint8, torch.int8, torch.int16, torch.bool, torch.bfloat16]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2]
VALUES = {f"of_{str(dtype).removeprefix('torch.')}": _patterns(dtype) for dtype in DTYPES}
VALUES["more"] = torch.tensor([250, 251, 252], dtype=torch.uint8)


class Codes(nn.Module):
    """One frozen parameter of every dtype, two of one dtype, next to trainable ones."""

    def __init__(self, filled: bool = True) -> None:
        super().__init__()
        self.linear, self.expected = nn.Linear(DIM, DIM), VALUES
        for name, value in VALUES.items():
            value = value.clone() if filled else torch.zeros_like(value)
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        self.assert_kept()
        return self.linear(x).tanh()

    def assert_kept(self) -> None:
        for name, value in self.expected.items():
            found = getattr(self, name)
            assert (found.dtype, found.shape) == (value.dtype, value.shape), name
            assert torch.equal(found.view(torch.uint8), value.view(torch.uint8)), name


def _codes(filled: bool = True, **options: Any) -> FSDP:
    build = partial(chain, *[partial(Codes, filled)] * 2)
    return FSDP(seeded(build), auto_wrap_policy=ModuleWrapPolicy({Codes}), **options)


LOW = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32, buffer_dtype=BF16)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed precision": {"mixed_precision": LOW},
    "low gradients": {
        "mixed_precision": MixedPrecision(param_dtype=BF16, keep_low_precision_grads=True)
    },
    "kept": {"sharding_strategy": SHARD_GRAD_OP, "mixed_precision": LOW},
    "replicated": {"sharding_strategy": NO_SHARD},
    "offloaded": {"cpu_offload": CPUOffload(offload_params=True), "mixed_precision": LOW},
}


@each_value
@both_forms
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_ranks", [1, 3])
@on_ranks("num_ranks")
def test_frozen_parameters_of_every_dtype_are_gathered_byte_for_byte(
    num_ranks: int, way: str, use_orig_params: bool
) -> None:
    model, x = _codes(use_orig_params=use_orig_params, **WAYS[way]), torch.ones(2, DIM)
    optim = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(2):
        square(model, x).backward()
        optim.step()
        optim.zero_grad()
    with torch.no_grad():
        model(x)
    first, second = (unit.module for unit in model.module)
    for writeback, to_cpu in itertools.product((False, True), repeat=2):
        options = {"writeback": writeback, "offload_to_cpu": to_cpu, "with_grads": True}
        with FSDP.summon_full_params(model, **options):
            first.assert_kept()
            second.assert_kept()
    first.expected = {name: torch.zeros_like(value) for name, value in VALUES.items()}
    first.expected["of_uint8"][0, 1] = 7
    with FSDP.summon_full_params(model):
        for name, value in first.expected.items():
            first.get_parameter(name).data.copy_(value)
    model(x)


@both_forms
@on_ranks(2)
def test_broadcasts_and_copies_keep_every_byte(use_orig_params: bool) -> None:
    is_first = torch.distributed.get_rank() == 0
    model = _codes(is_first, sync_module_states=True, use_orig_params=use_orig_params)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        each(torch.ones(2, DIM))


# -- subclasses of Parameter


class Scaled(nn.Parameter):
    """Represents weights through an attribute and a method, as quantization libraries do."""

    scale: float
    num_calls = 0

    def scaled(self) -> Tensor:
        return self.as_subclass(Tensor).float() * self.scale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            cls.num_calls += 1
            args = (args[0], args[1].scaled(), *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _made(data: Tensor, requires_grad: bool, attributes: dict[str, Any]) -> Any:
    parameter = torch.Tensor._make_subclass(Scaled, data, requires_grad)
    parameter.__dict__.update(attributes)
    return parameter


class PackedLinear(nn.Module):
    """A frozen weight of a subclass with functions of its own, and a trainable gain of one."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(256, (DIM, DIM), dtype=torch.uint8)
        self.weight = _made(codes, False, {"scale": 0.01})
        self.gain = _made(torch.randn(DIM), True, {"scale": 1.5})
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.weight) is type(self.gain) is Scaled
        self.weight.uses = getattr(self.weight, "uses", 0) + 1
        self.gain.last = x.shape[0]
        return self.linear(F.linear(x, self.weight) * self.gain.scaled()).tanh()


def _rescale(module: nn.Module, args: Any) -> None:
    module.weight.scale = 0.03  # type: ignore[union-attr]


@each_value
@both_forms
@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (1, {}),
        (2, {}),
        (2, {"sharding_strategy": NO_SHARD}),
        (2, {"cpu_offload": CPUOffload(offload_params=True)}),
    ],
)
@on_ranks("num_ranks")
def test_parameter_subclasses_survive_with_attributes_methods_and_functions(
    num_ranks: int, options: dict[str, Any], use_orig_params: bool
) -> None:
    build = partial(chain, PackedLinear, PackedLinear)
    pair = make_pair(build, (PackedLinear,), use_orig_params=use_orig_params, **options)
    first = pair.model.module[0].module
    Scaled.num_calls = 0
    for _ in range(2):
        pair.step()
    assert Scaled.num_calls == 2 * 2 * (1 + pair.ranks), "F.linear passed by the weight's class"
    pair.step(as_a_user=True)
    with FSDP.summon_full_params(pair.model):  # set on the parameters shown there ...
        assert (type(first.weight), first.weight.uses, first.gain.last) == (Scaled, 3, 4)
        first.weight.scale = 0.02
    pair.plain[0].weight.scale = 0.02
    pair.step()
    for module in (pair.plain[0], pair.plain[1], first, pair.model.module[1].module):
        module.register_forward_pre_hook(_rescale)  # ... and in forward
    pair.step()
    if use_orig_params:
        assert type(first.weight) is type(first.gain) is Scaled
        assert first.weight.scale == 0.03


# -- memory for gradients


@both_forms
@on_ranks(2, environment=MESSAGES)  # the buffers lie in memory that the process allocates
def test_gradients_use_memory_for_trainable_elements_only(use_orig_params: bool) -> None:
    """What is reduced is what is kept: 3 * 256 elements beside 3 * 4096 frozen ones."""
    pair = make_pair(partial(chain, Lora, Lora, Lora), (Lora,), use_orig_params=use_orig_params)
    pair.step(batch=wide_vectors)
    x = torch.ones(2, WIDE)
    with NewBytes() as new, pair.model.no_sync():
        square(pair.model, x).backward()
    assert 3 * 256 * 4 <= new.now <= 2 * 3 * 256 * 4
    square(pair.model, x).backward()
    assert sum(p.grad.nbytes for p in pair.model.parameters() if p.grad is not None) == 3 * 128 * 4


# -- requires_grad between steps


@on_ranks(2)
def test_freezing_between_accumulated_backwards_keeps_all_gradients() -> None:
    """They are still reduced, as they would stay in ``.grad`` without sharding, unless the user
    clears them: momentum does not move what is frozen then."""
    pair = make_pair(Stack, use_orig_params=True)
    for clears in (False, True):
        pair.step()  # so that there is momentum
        with pair.model.no_sync():
            pair.backwards()
        for model in (pair.plain, pair.model):
            model.head.requires_grad_(False)
        with pair.model.no_sync():
            pair.backwards()
        for model in (pair.plain, pair.model) if clears else ():
            model.head.zero_grad()
        pair.step()
        for model in (pair.plain, pair.model):
            model.head.requires_grad_(True)


@on_ranks(2)
def test_freezing_some_of_a_flat_parameter_raises_and_whole_units_follow() -> None:
    pair = make_pair(Stack)
    block, inner = pair.model.module.blocks[0], pair.model.module.blocks[0].module.up

    def assigns() -> None:
        inner.weight.requires_grad = False

    def in_summon() -> None:
        with FSDP.summon_full_params(pair.model):
            inner.requires_grad_(False)

    for freeze in (partial(inner.requires_grad_, False), assigns, in_summon):
        with pytest.raises(StateError, match="use_orig_params=True"):
            freeze()
    inner.requires_grad_(True)  # as it is
    assert all(p.requires_grad for p in pair.model.parameters())
    block.requires_grad_(False)
    pair.plain.blocks[0].requires_grad_(False)
    pair.step()
    with FSDP.summon_full_params(pair.model):
        block.requires_grad_(True)
        pair.model.module.blocks[1].requires_grad_(False)
    pair.plain.blocks[0].requires_grad_(True)
    pair.plain.blocks[1].requires_grad_(False)
    pair.step()
