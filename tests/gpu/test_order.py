"""No two accesses of the same bytes are left unordered, by streams or by the host.

The emulated device, or fakecuda, records the bytes that each operation reads and writes, and the
waits, so a missing wait is found whether or not it changes a number. The models also train as the
unsharded one does."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat import MixedPrecision
from tests.examples.test_readme import blocks
from tests.gpu.test_streams import checkpointed, large_stack
from tests.support import twin as twins
from tests.support.devices import Recording, all_ranks_have_the_same, streams
from tests.support.devices import in_order as recorded_in_order
from tests.support.fully_sharded import OURS, sharded_modules
from tests.support.models import Block, Large, Stack
from tests.support.order import HOST, Op
from tests.support.pairwise import pairwise
from tests.support.parity import assert_close, local
from tests.support.ranks import on_ranks
from tests.support.twin import FRONT_ENDS, Step, Twin, device_named, group_of, sharded

RANKS = 8


def twin_of(
    device: str,
    front_end: str = "flat",
    strategy: str = "FULL_SHARD",
    offload: bool = False,
    mixed: bool = False,
    build: Callable[[], nn.Module] = Stack,
    **options: Any,
) -> contextlib.AbstractContextManager[Twin]:
    how = {"front_end": front_end, "strategy": strategy, "offload": offload}
    options["front_end"] = functools.partial(sharded, units=(Block, Large), **how)
    low = MixedPrecision(torch.bfloat16, torch.float32) if mixed else None
    return twins.twin_of(device, RANKS, build, mixed_precision=low, **options)


def ops(recording: Recording, name: str = "", stream: int | None = None) -> list[Op]:
    """The recorded operations, or those of a name, on a stream."""
    every = [happening for happening in recording.happenings if isinstance(happening, Op)]
    named = [op for op in every if name in ("", op.name)]
    return [op for op in named if stream in (None, op.stream)]


in_order = functools.partial(recorded_in_order, streams=2)
on_the_device = on_ranks(1)
both_front_ends = pytest.mark.parametrize("front_end", ["flat", "fully_shard"])
every_front_end = pytest.mark.parametrize("front_end", FRONT_ENDS)


# -- training


@pairwise
@every_front_end
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("backwards", [1, 2])
@on_the_device
def test_training(
    recorded_device: str,
    front_end: str,
    strategy: str,
    offload: bool,
    mixed: bool,
    recomputes: bool,
    backwards: int,
) -> None:
    options = {"prepare": checkpointed} if recomputes else {}
    made = twin_of(recorded_device, front_end, strategy, offload, mixed, **options)
    with made as twin, in_order():
        twin.steps_together(3, Step(backwards))


@pytest.mark.parametrize(
    ("front_end", "strategy"),
    [*((name, "FULL_SHARD") for name in FRONT_ENDS), ("fully_shard", "SHARD_GRAD_OP")],
)
@pytest.mark.parametrize("offload", [False, True])
@on_the_device
def test_training_with_large_gradients_that_move_by_themselves_or_with_the_others(
    recorded_device: str, offload: bool, front_end: str, strategy: str
) -> None:
    made = twin_of(recorded_device, front_end, strategy, offload, True, large_stack)
    with made as twin, in_order():
        twin.steps_together(2, Step(2))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@every_front_end
@on_the_device
def test_a_penalty_on_gradients(recorded_device: str, strategy: str, front_end: str) -> None:
    with twin_of(recorded_device, front_end, strategy) as twin:
        x = twin.inputs()[0].requires_grad_()
        with in_order():
            (grad,) = torch.autograd.grad(twin.loss(x), x, create_graph=True)
            grad.pow(2).sum().backward()
        (grad,) = torch.autograd.grad(twin.plain_loss(x), x, create_graph=True)
        grad.pow(2).sum().backward()
        twin.compare_gradients()


class Lora(Block):
    """A frozen block with trainable adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.b(self.a(x)))


@pytest.mark.parametrize("front_end", ["flat", "original parameters"])
@pytest.mark.parametrize(
    ("strategy", "all_gathers"),  # backward needs the root and the last block first
    [("FULL_SHARD", 1 + 2 + 2 + 1), ("SHARD_GRAD_OP", 4), ("HYBRID_SHARD", 1 + 2 + 2 + 1)],
)
@pytest.mark.parametrize(
    "options", [{}, {"mixed": True}, {"mixed": True, "offload": True}], ids=str
)
@on_the_device
def test_frozen_and_trainable_parameters_are_gathered_together(
    recorded_device: str, front_end: str, strategy: str, all_gathers: int, options: dict[str, Any]
) -> None:
    build = functools.partial(Stack, 3, Lora)
    with twin_of(recorded_device, front_end, strategy, build=build, **options) as twin, in_order():
        twin.steps_together(2, Step())
        twin.transfers.num_all_gathers = 0
        twin.steps_together(1, Step())
        assert twin.transfers.num_all_gathers == all_gathers


# -- several streams


@both_front_ends
@pytest.mark.parametrize("in_graph", [False, True])
@on_the_device
def test_two_forwards_on_streams_that_the_program_does_not_order(
    recorded_device: str, in_graph: bool, front_end: str
) -> None:
    with twin_of(recorded_device, front_end) as twin:
        main = torch.accelerator.current_stream()
        inputs = twin.inputs(2)
        one, two = torch.Stream(recorded_device), torch.Stream(recorded_device)
        with in_order():
            one.wait_stream(main)
            two.wait_stream(main)
            losses = []
            for stream, x in zip((one, two), inputs, strict=True):
                with stream, torch.set_grad_enabled(in_graph):
                    losses.append(twin.loss(x))
            main.wait_stream(one)
            main.wait_stream(two)
            if in_graph:
                (losses[0] + losses[1]).backward()
        for loss, x in zip(losses, inputs, strict=True):
            assert_close(loss, twin.plain_loss(x), "loss", twin.tolerance)


@both_front_ends
@pytest.mark.parametrize("offload", [False, True])
@on_the_device
def test_a_stream_for_forward_and_another_for_backward(
    recorded_device: str, offload: bool, front_end: str
) -> None:
    with twin_of(recorded_device, front_end, offload=offload) as twin:
        one, two = streams(twin.device, 2)
        with in_order():
            for forward, backward in ((one, two), (two, one), (one, one)):
                twin.steps_together(2, Step(2, forward_in=forward, backward_in=backward))


@on_the_device
def test_an_all_reduce_hook_on_a_stream_of_its_own(recorded_device: str) -> None:
    with twin_of(recorded_device, "fully_shard") as twin:
        stream, seen = torch.Stream(recorded_device), []

        def halve(total: torch.Tensor) -> None:
            seen.append(torch.accelerator.current_stream())
            total.mul_(0.5)

        for module in sharded_modules(twin.model, OURS):
            module.set_all_reduce_hook(halve, stream=stream)
        inputs = twin.inputs(3)
        with in_order():
            twin.quiet_steps(inputs)
        assert seen and set(seen) == {stream}


# -- the host


@every_front_end
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_the_device
def test_the_recipe_moves_shards_and_optimizer_state_to_the_host_and_back(
    recorded_device: str, strategy: str, front_end: str
) -> None:
    names: dict[str, Any] = {"torch": torch, "FSDP": FSDP}
    [recipe] = [
        each for each in blocks("examples/README.md", "python") if "def move(model, optim" in each
    ]
    exec(recipe.partition("\n\n\n")[0], names)
    with twin_of(recorded_device, front_end, strategy) as twin, in_order():
        twin.step()
        for place in ("cpu", twin.device):
            names["move"](twin.model, twin.optim, place)
            held = [
                *twin.model.parameters(),
                *torch.utils._pytree.tree_leaves(dict(twin.optim.state)),
            ]
            assert {each.device.type for each in held if torch.is_tensor(each)} == {
                torch.device(place).type
            }
        twin.step()


@every_front_end
@pytest.mark.parametrize("mixed", [False, True])
@on_the_device
def test_the_host_writes_offloaded_parameters_after_an_evaluation(
    recorded_device: str, mixed: bool, front_end: str
) -> None:
    with twin_of(recorded_device, front_end, offload=True, mixed=mixed) as twin:
        (x,) = twin.inputs()
        parameters = [local(parameter) for parameter in twin.model.parameters()]
        assert all(parameter.device.type == "cpu" for parameter in parameters)
        with in_order() as recording, torch.no_grad():
            for _ in range(2):
                twin.loss(x)
                for parameter in parameters:
                    parameter.mul_(2)
        writes = ops(recording, "aten::mul_", HOST)
        assert len(writes) == 2 * sum(parameter.numel() > 0 for parameter in parameters)


@every_front_end
@on_the_device
def test_a_step_after_a_forward_without_a_backward_waits_for_copies(
    recorded_device: str, front_end: str
) -> None:
    with twin_of(recorded_device, front_end, offload=True) as twin:
        x, y = twin.inputs(2)
        twin.loss(x).backward()
        with in_order() as recording:
            kept = twin.loss(y)
            twin.optim.step()
        assert kept.requires_grad and any(op.writes for op in ops(recording, stream=HOST))


@every_front_end
@on_the_device
def test_the_host_reads_offloaded_gradients_after_a_backward(
    recorded_device: str, front_end: str
) -> None:
    with twin_of(recorded_device, front_end, offload=True) as twin:
        (x,) = twin.inputs()
        with in_order() as recording:
            twin.loss(x).backward()
            for parameter in twin.model.parameters():
                if parameter.grad is not None:
                    local(parameter.grad).sum()
        assert ops(recording, "aten::sum", HOST)


@on_the_device
def test_hooks_on_offloaded_gradients_read_them_at_once(recorded_device: str) -> None:
    """A user's hook steps on the host as soon as a gradient is there."""
    with twin_of(recorded_device, "fully_shard", offload=True) as twin:
        (x,) = twin.inputs()

        def hook(parameter: torch.Tensor) -> None:
            local(parameter).sub_(local(parameter.grad), alpha=0.1)

        for parameter in twin.model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        with in_order() as recording:
            twin.loss(x).backward()
        assert ops(recording, "aten::sub_", HOST)


@pytest.mark.parametrize("front_end", ["flat", "original parameters"])
@on_the_device
def test_the_host_writes_offloaded_parameters_after_they_were_shown_whole(
    recorded_device: str, front_end: str
) -> None:
    made = twin_of(recorded_device, front_end, offload=True)
    with made as twin, all_ranks_have_the_same():
        parameters = list(twin.model.parameters())
        with in_order() as recording, torch.no_grad():
            with FSDP.summon_full_params(twin.model, writeback=False):
                total = sum(parameter.sum() for parameter in twin.model.parameters())
            for parameter in parameters:
                parameter.mul_(2)
        assert isinstance(total, torch.Tensor) and total.device == twin.device
        assert any(op.writes for op in ops(recording, stream=HOST))


# -- inputs


@both_front_ends
@on_the_device
def test_the_host_overwrites_an_input_after_a_forward(recorded_device: str, front_end: str) -> None:
    with twin_of(recorded_device, front_end) as twin:
        x = twin.inputs()[0].cpu().pin_memory()
        with in_order() as recording:
            twin.loss(x)
            x.zero_()
        assert any(op.writes for op in ops(recording, stream=HOST))


@on_the_device
def test_inputs_that_are_moved_to_the_host_are_read_there(recorded_device: str) -> None:
    x = torch.ones(4, 8, device=device_named(recorded_device))
    with group_of(1, torch.device("cpu")):
        model = FSDP(Stack(), device_id=torch.device("cpu"))
        expected = model(torch.ones(4, 8))
        with in_order(streams=1):
            assert torch.equal(model(x), expected)
