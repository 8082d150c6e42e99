"""Features besides training, on a device with one real rank: whole parameters, state dicts,
scaling, copies, meta."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compat import CPUOffload, MixedPrecision, StateDictType
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.sharded_grad_scaler import ShardedGradScaler
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.models import Block, Stack
from tests.support.parity import assert_close, seeded
from tests.support.ranks import on_ranks
from tests.support.twin import Twin, device_named, group_of

pytestmark = pytest.mark.gpu

POLICY = ModuleWrapPolicy({Block})
MIXED = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "flat": {},
    "use_orig_params": {"use_orig_params": True},
    "mixed precision": {"mixed_precision": MIXED},
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
}
every_option = pytest.mark.parametrize("options", list(OPTIONS))


on_the_device = on_ranks(1)


@contextlib.contextmanager
def twins(device: str, options: dict[str, Any], *num_steps: int) -> Iterator[list[Twin]]:
    """Pairs that have trained for so many steps."""
    place = device_named(device)
    with group_of(1, place):
        found = []
        for number in num_steps or (2,):
            twin = Twin(Stack, place, 1, auto_wrap_policy=POLICY, **options)
            found.append(twin)
            for _ in range(number):
                twin.step()
        yield found


@every_option
@on_the_device
def test_whole_parameters_are_shown_and_written_back(device: str, options: str) -> None:
    with twins(device, OPTIONS[options]) as (twin,):
        expected = dict(twin.plain.named_parameters())
        with FSDP.summon_full_params(twin.model), torch.no_grad():
            found = dict(twin.model.named_parameters())
            assert found.keys() == expected.keys()
            for name, parameter in found.items():
                assert_close(parameter, expected[name], name, twin.tolerance)
                parameter.mul_(2)
                expected[name].mul_(2)
        twin.compare_parameters()
        twin.step()


@every_option
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@on_the_device
def test_training_goes_on_from_a_state_dict(device: str, kind: str, options: str) -> None:
    with twins(device, OPTIONS[options], 2, 1) as (twin, other):
        with FSDP.state_dict_type(twin.model, StateDictType[kind]):
            state, optim = twin.model.state_dict(), FSDP.optim_state_dict(twin.model, twin.optim)
        if kind == "FULL_STATE_DICT":
            plain = twin.plain.state_dict()
            assert list(state) == list(plain)
            for name, value in plain.items():
                assert_close(state[name], value, name, twin.tolerance)
        with FSDP.state_dict_type(other.model, StateDictType[kind]):
            other.model.load_state_dict(state)
            other.optim.load_state_dict(
                FSDP.optim_state_dict_to_load(other.model, other.optim, optim)
            )
        for x in twin.inputs(3):
            losses = []
            for trainee in (twin, other):
                loss = trainee.loss(x)
                loss.backward()
                trainee.optim.step()
                trainee.optim.zero_grad()
                losses.append(loss)
            assert_close(losses[1], losses[0], "loss after loading", 1e-6)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("use_orig_params", [False, True])
@on_the_device
def test_scaled_gradients_in_fp16_and_a_step_that_is_skipped(
    device: str, use_orig_params: bool, offload: bool
) -> None:
    options = {
        "use_orig_params": use_orig_params,
        "cpu_offload": CPUOffload(offload_params=offload),
        "mixed_precision": MixedPrecision(torch.float16, torch.float16),
    }
    with twins(device, options, 0) as (twin,):
        scaler = ShardedGradScaler(twin.device.type, init_scale=1024.0)
        for _ in range(3):
            twin.step(scaler=scaler)
        before = [p.detach().clone() for p in twin.model.parameters()]
        scaler.scale(twin.loss(twin.inputs()[0]) * float("inf")).backward()
        scaler.step(twin.optim)
        scaler.update()
        assert all(
            torch.equal(old, new) for old, new in zip(before, twin.model.parameters(), strict=True)
        )
        assert scaler.get_scale() == 512.0
        twin.optim.zero_grad()
        twin.step(scaler=scaler)


@every_option
@on_the_device
def test_a_copy_trains_by_itself(device: str, options: str) -> None:
    with twins(device, OPTIONS[options]) as (twin,):
        model = copy.deepcopy(twin.model)
        x = twin.inputs()[0]
        assert_close(model(x), twin.model(x), "output of the copy", 1e-6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(x).float().pow(2).mean().backward()
        optimizer.step()
        assert all(p.grad is None for p in twin.model.parameters())
        twin.compare_parameters()
        twin.step()


@pytest.mark.parametrize("with_function", [False, True])
@pytest.mark.parametrize("use_orig_params", [False, True])
@on_the_device
def test_models_from_the_meta_device(
    device: str, use_orig_params: bool, with_function: bool
) -> None:
    place = device_named(device)
    with group_of(1, place):
        with torch.device("meta"):
            module = Stack()

        def fill(child: nn.Module) -> None:
            child.to_empty(device=place, recurse=False)
            for parameter in child.parameters(recurse=False):
                nn.init.constant_(parameter, 0.5)

        options = {"auto_wrap_policy": POLICY, "use_orig_params": use_orig_params}
        function = fill if with_function else None
        model = FSDP(module, device_id=place, param_init_fn=function, **options)
        assert all(parameter.device == place for parameter in model.parameters())
        plain = seeded(Stack, 3).to(place)
        if with_function:
            plain.apply(fill)
        else:
            model.load_state_dict(plain.state_dict())
        x = torch.randn(4, 8, device=place)
        assert_close(model(x), plain(x), "output", 1e-5)
