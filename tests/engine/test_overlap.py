"""The order of collectives, of waits for them, and of computation, over a process group that only
records.

Three blocks, 0 to 2, are units, and so is the root, which has its own parameter. A wait makes the
computing stream wait, as on a device with streams; memory is in test_memory.py, streams are in
tests/gpu."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compat import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.fully_sharded import OURS, shard_all
from tests.support.ranks import on_ranks
from tests.support.recorded import in_words, recorded

WIDTH, BLOCKS, LARGE = 4, 3, 1 << 16  # elements of a gradient that moves by itself
Log = list[Any]


class Block(nn.Module):
    """Notes when its forward and backward begin. Blocks have different sizes."""

    def __init__(self, index: int, log: Log, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, width + 4 * index, bias=False)
        self.expert, self.has_tokens = nn.Parameter(torch.ones(WIDTH)), True
        self.register_forward_pre_hook(lambda *_: log.append(f"forward {index}"))
        self.register_full_backward_pre_hook(lambda *_: log.append(f"backward {index}"))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.up(x).mean() + memory
        return x * self.expert if self.has_tokens else x


class Model(nn.Module):
    def __init__(self, log: Log, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block(index, log, width) for index in range(BLOCKS))

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        x = x * self.scale
        memory = x.relu()  # an input of all blocks, as of a decoder's
        for index in used:
            x = self.blocks[index](x, memory)
        return x


def words(text: str) -> Log:
    """Events, separated by semicolons and the ends of lines."""
    return [event.strip() for event in text.replace("\n", ";").split(";") if event.strip()]


def steps(
    num_steps: int = 3,
    width: int = 3,
    used: Sequence[int] = range(BLOCKS),
    without_tokens: int | None = None,
    **options: Any,
) -> Log:
    """Return the events of the last step, which runs the blocks ``used``; others run all of them.
    without_tokens: the block that does not use its expert in that step."""
    is_hybrid = options.get("sharding_strategy") is ShardingStrategy.HYBRID_SHARD
    with recorded(ranks=4 if is_hybrid else 2) as log:
        if is_hybrid:
            options["device_mesh"] = init_device_mesh("cpu", (2, 2))
        module = Model(log, width)
        blocks = list(module.blocks)
        policy = ModuleWrapPolicy({Block})
        model = FullyShardedDataParallel(module, auto_wrap_policy=policy, **options)
        for number in range(num_steps):
            is_last = number == num_steps - 1
            if is_last and without_tokens is not None:
                blocks[without_tokens].has_tokens = False
            log.clear()
            model(torch.ones(1, WIDTH), used if is_last else range(BLOCKS)).sum().backward()
            model.zero_grad()
        found = list(log) if options.get("use_orig_params") else in_words(log, model)
        return found


STEPS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "no order is known in the first step": (
        {"num_steps": 1},
        "gather root",
        "reduce 2",
        """
        gather root; gathered root; gather 0; gathered 0; forward 0; gather 1; gathered 1; forward 1
        gather 2; gathered 2; forward 2; gather 2; gathered 2; backward 2
        """,
    ),
    "forward prefetches the next unit": (
        {},
        "gather root",
        "backward 2",
        """
        gather root; gather 0; gathered root; gather 1; gathered 0; forward 0
        gather 2; gathered 1; forward 1; gathered 2; forward 2; gather 1
        """,
    ),
    "reductions overlap the next gather and computation": (
        {},
        "backward 2",
        "",
        """
        backward 2; reduce 2; gather 0; gathered 1; backward 1; reduced 2; reduce 1; gathered 0
        backward 0; reduced 1; reduce 0; reduced 0; reduce root; reduced root
        """,
    ),
    "two reduce buffers let reductions overlap longer": (
        {"limit_all_gathers": False},
        "backward 2",
        "",
        """
        backward 2; reduce 2; gather 0; gathered 1; backward 1; reduce 1; gathered 0
        backward 0; reduced 2; reduce 0; reduced 1; reduce root; reduced 0; reduced root
        """,
    ),
    "a large gradient waits for the previous buffer only when it comes": (
        {"width": LARGE // WIDTH},
        "backward 1",
        "backward 0",
        "backward 1; reduced 2; reduce 1; gathered 0",
    ),
    "BACKWARD_POST gathers before the previous gradients are sent": (
        {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
        "backward 2",
        "backward 1",
        "backward 2; gather 1; reduce 2; gathered 1",
    ),
    "without a prefetch every unit is gathered when it is needed": (
        {"backward_prefetch": None},
        "forward 2",
        "backward 0",
        """
        forward 2; backward 2; reduce 2; gather 1; gathered 1
        backward 1; reduced 2; reduce 1; gather 0; gathered 0
        """,
    ),
    "an unused prefetch is waited for before it is freed": (
        {"used": [0, 1]},
        "forward 1",
        "backward 1",
        "forward 1; gathered 2; gather 1; gathered 1",
    ),
}


@pytest.mark.parametrize("name", STEPS)
@on_ranks(1)
def test_events_of_a_step_have_an_order(name: str) -> None:
    options, first, end, expected = STEPS[name]
    log = steps(**options)
    assert log[log.index(first) : log.index(end) if end else None] == words(expected)


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(1)
def test_order_does_not_depend_on_which_parameters_have_gradients(use_orig_params: bool) -> None:
    all_used = steps(use_orig_params=use_orig_params)
    for index in range(BLOCKS):
        assert steps(without_tokens=index, use_orig_params=use_orig_params) == all_used


REPLICAS = {
    ShardingStrategy.NO_SHARD: """
        backward 2; all-reduce 2; backward 1; all-reduce 1; backward 0; all-reduced 2
        all-reduce 0; all-reduced 1; all-reduce root; all-reduced 0; all-reduced root
        """,
    ShardingStrategy.HYBRID_SHARD: """
        backward 2; reduce 2; gather 0; gathered 1; backward 1
        reduced 2; all-reduce 2; reduce 1; gathered 0; backward 0
        reduced 1; all-reduce 1; all-reduced 2; reduce 0; reduced 0; all-reduce 0
        all-reduced 1; reduce root; all-reduced 0; reduced root; all-reduce root; all-reduced root
        """,
}


@pytest.mark.parametrize("strategy", REPLICAS)
@on_ranks(1)
def test_all_reduces_over_replicas_run_beside_backward(strategy: ShardingStrategy) -> None:
    log = steps(sharding_strategy=strategy)
    assert log[log.index("backward 2") :] == words(REPLICAS[strategy])


class Letters(nn.Module):
    """Runs the layers that a text names."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        for letter, layer in self.layers():
            layer.register_forward_pre_hook(lambda *_, letter=letter: log.append(letter))
            setattr(self, letter, layer)

    @staticmethod
    def layers() -> list[tuple[str, nn.Linear]]:
        return [(letter, nn.Linear(1, 8 * number)) for number, letter in enumerate("abc", 1)]

    def forward(self, x: Tensor, letters: str) -> Tensor:
        for letter in letters:
            x = x + getattr(self, letter)(x).sum()
        return x


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        ("abc", "AaBbCc"),
        ("abc abc", "ABaCbc"),
        ("abab abab", "ABaAbBab"),
        ("abc bc", "ABbCc"),  # b came instead of a: later positions do not match
        ("abc acb", "ABaCcb"),
        ("abc abca", "ABaCbcAa"),
        ("ab abc", "ABabCc"),
        ("abc cbc", "ACcBCbc"),
        ("abc cba cba", "CBcAba"),  # the latest pass
    ],
)
@pytest.mark.parametrize("front_end", ["flat", "fully_shard"])
@on_ranks(1)
def test_units_are_guessed_from_the_latest_pass_while_positions_match(
    front_end: str, passes: str, expected: str
) -> None:
    """expected: in the last pass, the gather of a unit in upper case, its computation in lower."""
    units = {layer.weight.numel(): letter for letter, layer in Letters.layers()}
    with recorded(ranks=2) as log, torch.no_grad():
        module: Any = Letters(log)
        if front_end == "fully_shard":
            model = shard_all(module, (nn.Linear,), OURS)
        else:
            model = FullyShardedDataParallel(module, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        for letters in passes.split():
            log.clear()
            model(torch.ones(1, 1), letters)
        events = [event for event in log if isinstance(event, str) or event.what == "gather"]
        found = [
            event if isinstance(event, str) else units[event.numel].upper() for event in events
        ]
    assert "".join(found) == expected


class Two(nn.Module):
    """Returns an output, and what depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layer(x.tanh())
        return x, x.square().mean()


@on_ranks(1)
def test_a_graph_is_freed_with_its_outputs_also_if_one_depends_on_another() -> None:
    with recorded(ranks=2):
        model = FullyShardedDataParallel(Two())
        outputs = model(torch.ones(1, WIDTH, requires_grad=True))
        mark = outputs[0].grad_fn.metadata["mark"] = torch.nn.Identity()
        graph = weakref.ref(mark)
        del mark
        assert graph() is not None
        del outputs
        assert graph() is None
