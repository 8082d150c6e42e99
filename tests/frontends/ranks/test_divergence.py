"""Collective calls that only some ranks make, end to end: the error names the call, each rank's
location and the missing ranks, and every rank can continue. The mechanism is tested in
tests/comm/test_store_rendezvous.py."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import pickle
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compat import (
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    StateError,
    UsageError,
)
from fsdp_compat import FullyShardedDataParallel as FSDP
from fsdp_compat.wrap import ModuleWrapPolicy
from tests.support.collectives import checked_calls
from tests.support.errors import assert_told, limits, message_of
from tests.support.fully_sharded import OURS, shard_all
from tests.support.models import DIM, Block
from tests.support.pairwise import each_value
from tests.support.parity import Pair, make_pair, seeded
from tests.support.programs import launch
from tests.support.ranks import on_ranks, run_ranks
from tests.support.same_host import COPIED, MAPPED, MESSAGES, NOT_MAPPED, mapped_or_sent

HERE = re.escape(__file__)


def build(num_blocks: int = 3, *, in_place: bool = False, strategy: str = "FULL_SHARD") -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(num_blocks)))
    if in_place:
        return shard_all(model, library=OURS)
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy[strategy],
    )


def step(model: nn.Module) -> None:
    model(torch.ones(2, DIM)).sum().backward()


def assert_goes_on(model: FSDP) -> None:
    """Assert that collective calls work as if nothing had happened."""
    step(model)
    assert float(model.clip_grad_norm_(1e9)) > 0
    names = list(model.state_dict())
    assert len(names) == len(set(names)) > 0
    with FSDP.summon_full_params(model):
        assert next(model.parameters()).numel() > 0
    model.zero_grad()


@on_ranks(2)
def test_one_call_of_different_models_and_other_orders_are_refused() -> None:
    model, other, rank = build(), build(1), dist.get_rank()
    step(model)
    step(other)

    def state_dict() -> None:
        (model if rank == 0 else other).state_dict()

    def clip_grad_norm_() -> None:
        for each in (model, other) if rank == 0 else (other, model):
            each.clip_grad_norm_(1.0)

    for diverge in (state_dict, clip_grad_norm_):
        name, message = diverge.__name__, message_of(diverge)
        for number in range(2):
            assert_told(message, rf"rank {number} called {name}\(\) at {HERE}:\d+ in {name}\(\)")
    assert_goes_on(model)
    assert_goes_on(other)


@pytest.mark.parametrize("environment", [NOT_MAPPED, MAPPED])
@on_ranks(2)
def test_clipping_on_one_rank_while_another_trains_fails_on_both(
    environment: dict[str, str],
) -> None:
    """In the second step rank 0 clips, and the other one trains on."""
    model = build()
    step(model)
    model.clip_grad_norm_(1.0)
    step(model)
    message = message_of(
        lambda: model.clip_grad_norm_(1.0) if dist.get_rank() == 0 else step(model)
    )
    assert_told(message, "ranks wait for each other", "rank 0 waits for the norm of the gradients")


@on_ranks(2, environment=NOT_MAPPED)
def test_model_built_by_one_rank_alone_is_refused_and_all_ranks_go_on() -> None:
    """Rank 0 builds a model; rank 1 trains, waits in a barrier, and then builds too."""
    model, group, is_first = build(), dist.new_group(), dist.get_rank() == 0
    step(model)
    connect = r"connect\(\) over a process group"
    facts: tuple[str, ...] = (
        rf"^Not all ranks called {connect}\.",
        rf"rank 0 waits in {connect} for the ranks \[1\], at {HERE}:\d+ in <lambda>\(\)",
        rf"rank 1 waits for the parameters of unit '0' from rank 0, at {HERE}:\d+ in step\(\)",
    )
    with limits():
        if is_first:
            assert_told(message_of(lambda: FSDP(Block(), process_group=group)), *facts)
        step(model)
    facts = (
        rf"rank 0 called {connect} at {HERE}:\d+ in <lambda>\(\)",
        r"rank 1 has not arrived: it is at .*:\d+ in \w+\(\), and has made no progress",
    )
    with limits():
        if is_first:
            assert_told(message_of(lambda: FSDP(Block(), process_group=group)), *facts)
        dist.barrier()
    step(FSDP(Block(), process_group=group))
    assert_goes_on(model)


@on_ranks(2, environment={"FSDP_COMPAT_MEET": "0"}, group_timeout=2)
def test_model_built_by_one_rank_alone_without_the_check_fails_at_gloos_time_limit() -> None:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        with pytest.raises(StateError, match=r"^Waiting for connect\(\) failed: ") as caught:
            build()
        waits = rf"rank 0 waits in connect\(\) for ranks \[1\], at {HERE}:\d+ in "
        assert_told(str(caught.value), waits)
        store.set("caught", "")
    store.wait(["caught"])


# -- forward and backward: a warning, as the missing rank may still come


class _Recorder(logging.Handler):
    """Keeps the warnings of this rank, and lets the other one go on after the second."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store, self.found = store, list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())
        if len(self.found) == 2 and dist.get_rank() == 0:
            self.store.set("warned", "")


@contextlib.contextmanager
def recorded() -> Iterator[list[str]]:
    """Yield a list of the warnings of this rank; rank 1 may wait until rank 0 has logged two."""
    recorder = _Recorder(dist.distributed_c10d._get_default_store())
    logging.getLogger("fsdp_compat.waits").addHandler(recorder)
    yield recorder.found
    logging.getLogger("fsdp_compat.waits").removeHandler(recorder)


def wait_for_warnings() -> None:
    dist.distributed_c10d._get_default_store().wait(["warned"])


WARNS = {"FSDP_COMPAT_WARN_AFTER": "0.3"}
_WARNING = (
    r"rank 1 has not begun (the all-gather of (the root unit|unit '0')|"
    r"the barrier at the beginning of a forward of the root unit).*, "
    r"which rank 0 waits for \((?P<waited_s>[\d.]+) s so far\)\.\n"
    rf"  rank 0: waits for .* from rank 1, at {HERE}:\d+ in \w+\(\), after the \w+ of .*\n"
    rf"  rank 1: is at {HERE}:\d+ in wait_for_warnings\(\), after the \w+ of .*\n"
    r"  Every rank must run the same forwards and backwards, .*"
)


@each_value
@pytest.mark.parametrize("mistake", ["has a batch less", "evaluates"])
@pytest.mark.parametrize(
    ("in_place", "environment"),
    [
        (False, WARNS | MESSAGES),
        (True, WARNS | COPIED),
        (False, WARNS | MAPPED),
        (True, WARNS | MAPPED),
    ],
    ids=["messages", "counters", "mapped", "mapped in place"],
)
@on_ranks(2)
def test_waiting_rank_warns_and_says_where_the_missing_one_is(
    in_place: bool, environment: dict[str, str], mistake: str
) -> None:
    """Rank 1 does something else than rank 0 until rank 0 has warned, and then the same."""
    model = build(in_place=in_place)
    with recorded() as found:
        step(model)
        if dist.get_rank() == 1:
            wait_for_warnings()
        if mistake == "evaluates":
            with torch.no_grad():
                model(torch.ones(2, DIM))
        else:
            step(model)
    assert len(found) >= 2 - dist.get_rank()
    told = [re.fullmatch(_WARNING, text) for text in found]
    assert all(told), "\n".join(found)
    waited = [float(each["waited_s"]) for each in told if each]
    assert waited[0] >= 0.3 and waited[-1] >= 0.3 * len(waited)


@on_ranks(2, environment=NOT_MAPPED | WARNS, group_timeout=3)
def test_waiting_rank_says_which_error_the_missing_one_has_raised() -> None:
    """Rank 1 alone has other memory for its parameters in backward, and catches the error."""
    model, is_missing = build(strategy="SHARD_GRAD_OP"), dist.get_rank() == 1
    loss = model(torch.ones(2, DIM)).sum()
    if is_missing:
        for parameter in model.parameters():
            parameter.data = torch.ones_like(parameter)
    with recorded() as found:
        with pytest.raises(StateError):  # rank 0 waits up to the time limit
            loss.backward()
        if is_missing:
            wait_for_warnings()
        else:
            raised = r"AssertedStateError in its last pass \(Parameters were changed between .*\)"
            assert_told(found[0], rf"rank 1: has raised {raised}, and is at {HERE}:\d+ in ")


@on_ranks(2, environment=WARNS)
def test_a_rank_that_polls_for_what_the_others_have_not_begun_is_named_on_all_ranks() -> None:
    model = build()
    with recorded() as found, limits():
        if dist.get_rank() == 1:
            end = time.monotonic() + 20.0
            while not found and time.monotonic() < end:
                time.sleep(0.05)  # for a file of rank 0, say
        model.state_dict()
    assert_told("\n".join(found), rf"rank 1\b.* at {HERE}:\d+ in ")


@on_ranks(2, environment=NOT_MAPPED)
def test_error_of_another_process_group_says_which_one_has_failed() -> None:
    other = FSDP(Block(), process_group=dist.new_group())
    model = build()
    step(model)
    step(other)
    model.clip_grad_norm_(1.0)
    assert message_of(lambda: model.clip_grad_norm_(1.0) if dist.get_rank() else step(model))
    message = message_of(lambda: step(other))
    assert message and "this process group" not in message


# -- models that differ


class Net(nn.Module):
    """Blocks between two layers. ``change`` is what one rank has otherwise."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        width = 9 if change == "width" else 4
        self.up = nn.Linear(DIM, width, dtype=torch.float64 if change == "dtype" else None)
        self.blocks = nn.Sequential(*(Block() for _ in range(3 if change == "depth" else 2)))
        self.down = nn.Linear(width, DIM)
        self.up.bias.requires_grad_(change != "requires_grad")
        if change == "name":
            self.other, self.down = self.down, nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.blocks(x)))


def sharded(front_end: str, model: nn.Module, **options: Any) -> Any:
    if front_end == "fully_shard":
        return shard_all(model, library=OURS, **options)
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


DIFFERENCES = {
    "width": "in the root unit: parameter 'up.weight' [4, 8], torch.float32, requires_grad=True on "
    "the ranks [0, 2]; parameter 'up.weight' [9, 8], torch.float32, requires_grad=True on rank 1",
    "dtype": "'up.weight' [4, 8], torch.float64, requires_grad=True on rank 1",
    "requires_grad": "'up.bias' [4], torch.float32, requires_grad=False on rank 1",
    "name": "parameter 'other.weight' [8, 4], torch.float32, requires_grad=True on rank 1",
}
FLAT_DIFFERENCES = {
    "depth": "the root unit on the ranks [0, 2]; unit 'blocks.2' on rank 1",
    "strategy": "in unit 'blocks.0': sharding_strategy=FULL_SHARD on the ranks [0, 2]; "
    "sharding_strategy=SHARD_GRAD_OP on rank 1",
    "precision": "param_dtype=None, reduce_dtype=torch.bfloat16 on rank 1",
}
FULLY_SHARD_DIFFERENCES = {
    "depth": "nothing more on the ranks [0, 2]; unit 'blocks.2' on rank 1",
    "strategy": "reshard_after_forward=False on rank 1",
    "precision": "param_dtype=None, reduce_dtype=torch.bfloat16 on rank 1",
}


def options_of(front_end: str, change: str) -> dict[str, Any]:
    """Return the arguments of a rank that has changed something. Collective."""
    low = {"reduce_dtype": torch.bfloat16}
    if front_end == "fully_shard":
        changes: dict[str, dict[str, Any]] = {
            "strategy": {"reshard_after_forward": False},
            "precision": {"mp_policy": OURS.MixedPrecisionPolicy(**low)},
        }
        return changes.get(change, {})
    changes = {
        "strategy": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        "precision": {"mixed_precision": MixedPrecision(**low)},
    }
    syncs = front_end == "flat, synchronised"
    group = dist.new_group()
    return {"sync_module_states": syncs, "process_group": group, **changes.get(change, {})}


@pytest.mark.parametrize(
    ("front_end", "own"),
    [
        ("flat", {}),
        ("flat, synchronised", FLAT_DIFFERENCES),
        ("fully_shard", FULLY_SHARD_DIFFERENCES),
    ],
    ids=["flat", "flat, synchronised", "fully_shard"],
)
@on_ranks(3)
def test_models_that_differ_are_refused_before_anything_is_sent(
    front_end: str, own: dict[str, str]
) -> None:
    """Rank 1 builds another model than the others. Then all build the same one and train it."""
    for change, difference in {**DIFFERENCES, **own}.items():
        mine = change if dist.get_rank() == 1 else ""
        options = options_of(front_end, mine)
        with pytest.raises(UsageError) as caught:
            step(sharded(front_end, Net(mine), **options))
        message = str(caught.value)
        assert_told(
            message, r"^The models of the ranks differ\.", re.escape(difference), f"at {HERE}"
        )
    step(sharded(front_end, Net()))


@on_ranks(4)
def test_ranks_of_other_process_groups_may_have_other_modules() -> None:
    """Two ranks share an expert that has another width than that of the other two."""
    rank, groups = dist.get_rank(), [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, 4 + rank // 2))
    model[1] = FSDP(model[1], process_group=groups[rank // 2])
    model = FSDP(model)
    step(model)
    assert all(p.grad.sum() for p in model.parameters() if p.grad is not None)


# -- models that one rank alone has made


def pair_of(seed: int, in_place: bool) -> Pair:
    def make() -> nn.Module:
        return nn.Sequential(Block(), Block())

    if in_place:
        return Pair(seeded(make, seed), shard_all(seeded(make, seed), library=OURS))
    return make_pair(make, seed=seed)


def assert_train(*pairs: Pair) -> None:
    """Assert that sharded models train as plain ones do, each for a step in turns."""
    for pair in (*pairs, *pairs):
        pair.step()


def fail_in_the_second_unit() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Block(), Block())
    below = set(model[1].modules())

    def fill(module: nn.Module) -> None:
        if module in below:
            raise ValueError("no values")
        module.to_empty(device="cpu", recurse=False)

    with pytest.raises(ValueError, match="no values"):
        FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), param_init_fn=fill)


@pytest.mark.parametrize("in_place", [False, True], ids=["flat", "fully_shard"])
@mapped_or_sent
@on_ranks(3)
def test_models_train_whatever_one_rank_has_made_alone(
    environment: dict[str, str], in_place: bool
) -> None:
    """Rank 1 makes models of its own before, between and after others that all ranks use."""
    first, kept, is_alone = pair_of(0, in_place), list[Any](), dist.get_rank() == 1
    flat = build()
    if is_alone:
        kept += [build(), copy.deepcopy(flat), pickle.loads(pickle.dumps(flat))]
        for _ in range(3):
            build(1)  # deleted at once
        fail_in_the_second_unit()
    second, third = pair_of(1, in_place), pair_of(2, in_place)
    if dist.get_rank() == 2:
        kept += [build(), copy.deepcopy(flat), build()]  # as many as rank 1 has kept
    assert len(flat.state_dict()) == len(build().state_dict())
    assert_train(third, first)  # in another order than they were made
    assert_train(second, third, first)
    assert_goes_on(flat)


@on_ranks(2)
def test_ranks_that_use_different_models_of_one_structure_are_refused() -> None:
    for use in (step, FSDP.state_dict):
        models = [build(), build()]
        with pytest.raises(UsageError) as caught:
            use(models[dist.get_rank()])
        assert_told(
            str(caught.value),
            "^The ranks use different models, or have made them in different orders",
            r"unit '0', made after \d+ of \d+ unused groups on this rank",
            rf"where: +{HERE}:\d+ in ",
        )
    assert_train(pair_of(0, False))


# -- no error


def meets() -> dict[str, list[str]]:
    model, found = build(), dict[str, list[str]]()
    optim = torch.optim.Adam(model.parameters())
    step(model)
    optim.step()

    @contextlib.contextmanager
    def counted(name: str) -> Iterator[None]:
        with checked_calls() as calls:
            yield
        found[name] = [call.removesuffix("()") for call, _ in calls]

    def clip() -> None:
        model.clip_grad_norm_(1.0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def show() -> None:
        model.apply(lambda module: None)
        with FSDP.summon_full_params(model):
            pass

    with counted("full"):
        full = {name: value.clone() for name, value in model.state_dict().items()}
        FSDP.optim_state_dict(model, optim)
    with counted("other calls"):
        clip()
        show()
    with counted("clips again"):
        clip()
    with FSDP.summon_full_params(model), counted("whole already"):
        model.state_dict()
        show()
    sharded_type = functools.partial(
        FSDP.state_dict_type, state_dict_type=StateDictType.SHARDED_STATE_DICT
    )
    with counted("loads"):
        state = FSDP.optim_state_dict_to_load(model, optim, FSDP.optim_state_dict(model, optim))
        optim.load_state_dict(state)
        rank_0 = FullStateDictConfig(rank0_only=True)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, rank_0):
            model.load_state_dict(full if dist.get_rank() == 0 else {})
        cut_otherwise = FSDP(nn.Sequential(*(Block() for _ in range(3))))
        with sharded_type(cut_otherwise):
            model.load_state_dict(cut_otherwise.state_dict())
    with counted("nothing sent"):
        model.load_state_dict(full)
        with sharded_type(model):
            model.load_state_dict(model.state_dict())
        step(model)
    with counted("said, not sent"), sharded_type(model):
        FSDP.optim_state_dict(model, optim)
    return found


def test_calls_are_checked_once_and_only_if_they_communicate() -> None:
    calls = ["clip_grad_norm_", "torch.nn.utils.clip_grad_norm_", "apply", "summon_full_params"]
    loads = ["optim_state_dict", "load_state_dict", "load_state_dict"]  # a whole state meets none
    found = {
        "full": ["state_dict", "optim_state_dict"],
        "other calls": calls,
        "clips again": [],
        "whole already": [],
        "loads": loads,
        "nothing sent": [],
        "said, not sent": ["optim_state_dict"],
    }
    assert run_ranks(2, meets, environment=NOT_MAPPED) == [found] * 2
    assert run_ranks(1, meets) == [{what: [] for what in found}]


# -- programs


LOST = """
import contextlib, os, signal, sys, time, torch, torch.distributed as dist
from fsdp_compat import FullyShardedDataParallel as FSDP
from tests.support.errors import limits
from tests.support.hosts import hosts
from torch import nn

rank, path, fate, of_ranks = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
ranks, last = len(of_ranks), len(of_ranks) - 1
os.environ["FSDP_COMPAT_SAME_HOST"], limit_s = sys.argv[5], float(sys.argv[6])
dist.init_process_group("gloo", store=dist.FileStore(path, ranks), rank=rank, world_size=ranks)
everywhere = contextlib.ExitStack()
everywhere.enter_context(hosts(of_ranks))
everywhere.enter_context(limits(idle_s=0.5, patience_s=0.5))
model = FSDP(nn.Linear(4, 4))
x = torch.ones(2, 4)
model(x).sum().backward()
if rank == last and fate == "killed":
    if not os.fork():  # holds the connections of its parent, until all others have noticed
        for _ in range(int(10 * limit_s)):
            time.sleep(0.1)
            if all(os.path.exists(f"{path}.{other}") for other in range(last)):
                os._exit(0)
        open(f"{path}.late", "w")
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
if rank == last and fate == "exec":
    noticed = f"[ -e {path}.0 ] && [ -e {path}.1 ]"
    os.execv("/bin/sh", ["sh", "-c", f"for i in `seq 200`; do {noticed} && exit; sleep 0.1; done"])
if rank == last:
    raise KeyError("no such file")
try:
    model.state_dict() if fate == "save" else model(x)
finally:
    open(f"{path}.{rank}", "w")
"""


def test_rank_that_is_gone_is_noticed_on_every_host_of_several_ranks(tmp_path: Path) -> None:
    path = tmp_path / "store"
    arguments = [(rank, path, "killed", "0011", "messages", 4) for rank in range(4)]
    launch(LOST, arguments, tmp_path)
    assert not Path(f"{path}.late").exists()


def test_rank_that_is_gone_is_named_on_every_host_even_if_its_connections_are_open(
    tmp_path: Path,
) -> None:
    raised = r"ended with KeyError: 'no such file'"
    forward = r"Waiting for the parameters of the root unit \(a Linear\) failed: "
    gone = rf"{forward}rank 2 was killed, or runs another program now \(exec\)\."
    first = "to do:    look at rank 2's own error first"
    save = r"rank \d called state_dict\(\) at <program>:\d+ in <module>\(\)"
    told: dict[tuple[str, str], tuple[str, ...]] = {
        ("killed", "messages"): (gone, first),
        ("killed", "counters"): (gone, first),
        ("exec", "counters"): (gone, first),
        ("raises", "messages"): (f"{forward}rank 2 has {raised}", first),
        ("save", "messages"): (save, f"rank 2 .*{raised}"),
    }
    arguments = [
        (rank, tmp_path / f"{fate}-{how}", fate, "011", how, 20)
        for fate, how in told
        for rank in range(3)
    ]
    ended = launch(LOST, arguments, tmp_path)
    assert not [*tmp_path.glob("*.late")]
    for number, facts in enumerate(told.values()):
        *others, lost = ended[3 * number : 3 * number + 3]
        for each in others:
            assert each.code == 1
            assert_told(each.err, *facts)
        assert "StateError" not in lost.err
