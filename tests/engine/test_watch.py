"""Ranks that wait for each other for ever get an error within seconds that says who waits for what; slow ranks get none."""

from __future__ import annotations

import contextlib
import gc
import re
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compat import ShardingStrategy, StateError
from fsdp_compat._engine import watch
from fsdp_compat._engine.collectives import communicator
from fsdp_compat._engine.mesh import Axis
from tests.support.models import DIM, Block
from tests.support.parity import Turn, backward, make_pair
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
PATIENCE = 0.5
PROMPT_S = 8.0  # of a diagnosis, on a busy machine; every time limit is far beyond it


@contextlib.contextmanager
def patience(seconds: float = PATIENCE) -> Iterator[None]:
    before, watch.PATIENCE = watch.PATIENCE, seconds
    try:
        yield
    finally:
        watch.PATIENCE = before


def message_of(call: Callable[[], object]) -> str:
    """The message of the StateError that ``call`` raises soon, or nothing."""
    started = time.monotonic()
    with patience():
        try:
            call()
        except StateError as error:
            assert time.monotonic() - started < PROMPT_S, f"late: {error}"
            return str(error)
    return ""


def assert_alike(messages: list[str], *facts: str) -> None:
    """Every rank was told the same: who waits for what from whom."""
    assert all(messages), f"not all ranks noticed: {messages}"
    for message in messages:
        assert re.match(r"Waiting for .* can never end: ranks wait for each other\.", message), message
        assert "allow_unused_units=True" in message
        for fact in facts:
            assert fact in message, f"{fact!r} is not in\n{message}"


class Uses(nn.Module):
    """Runs the blocks that ``use`` names by digits."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x: Tensor, use: str) -> Tensor:
        for digit in use:
            x = self.blocks[int(digit)](x)
        return x


def fails_then_trains(uses: tuple[str, ...], everything: str, *, no_grad: bool, **options: Any) -> str:
    """Rank r uses what ``uses[r]`` says, which fails; then all use everything, as the unsharded copy does."""
    pair = make_pair(Uses, **options)
    with torch.set_grad_enabled(not no_grad):

        def step() -> None:
            loss = pair.model(torch.ones(2, DIM), uses[pair.rank]).sum()
            if not no_grad:
                loss.backward()

        message = message_of(step)
    assert message, "no error"
    pair.optim.zero_grad()
    for _ in range(2):
        pair.step(lambda m, x, turn: backward(m(x, everything).pow(2).mean()))
    return message


@pytest.mark.parametrize(("ranks", "no_grad"), [(2, False), (3, True), (4, False)])
def test_a_unit_that_one_rank_skips_is_named_on_all_ranks_and_the_next_step_is_right(ranks: int, no_grad: bool) -> None:
    uses = ("012", *["02"] * 1, *["012"] * (ranks - 2))
    messages = run_ranks(ranks, fails_then_trains, uses, "012", no_grad=no_grad)
    assert_alike(messages, "the parameters of unit 'blocks.1' from rank 1", "rank 1 waits for the parameters of unit 'blocks.2'")


class Nest(nn.Module):
    """A unit around units."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other, self.linear = Block(), Block(), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, use: str) -> Tensor:
        x = self.linear(x)
        return self.other(self.inner(x) if "i" in use else x)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.nest, self.last = Block(), Nest(), Block()

    def forward(self, x: Tensor, use: str) -> Tensor:
        return self.last(self.nest(self.first(x), use))


def step_of(pair: Any, forward: Callable[[nn.Module, Tensor, int], Tensor]) -> Callable[[], None]:
    """A step on the sharded copy, on a batch that does not matter."""
    return lambda: forward(pair.model, torch.ones(2, DIM), pair.rank).sum().backward()


def skips_an_inner_unit() -> str:
    pair = make_pair(Nested, (Nest, Block))
    message = message_of(step_of(pair, lambda m, x, rank: m(x, "" if rank == 1 else "i")))
    pair.optim.zero_grad()
    pair.step(lambda m, x, turn: backward(m(x, "i").pow(2).mean()))
    return message


def test_a_unit_inside_of_a_unit_that_one_rank_skips_is_named() -> None:
    messages = run_ranks(2, skips_an_inner_unit)
    assert_alike(messages, "the parameters of unit 'nest.inner' from rank 1", "the parameters of unit 'nest.other' from rank 0")


class Joined(nn.Module):
    """Two units beside each other, between two that every backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.last = Block(), Block(), Block(), Block()

    def forward(self, x: Tensor, detached: bool) -> Tensor:
        x = self.first(x)
        right = self.right(x)
        return self.last(self.left(x) + (right.detach() if detached else right))


def detaches_one_output(num_steps_after: int, **options: Any) -> str:
    pair = make_pair(Joined, **options)
    message = message_of(step_of(pair, lambda m, x, rank: m(x, rank == 1)))
    pair.optim.zero_grad()
    for _ in range(num_steps_after):
        pair.step(lambda m, x, turn: backward(m(x, False).pow(2).mean()))
    return message


def test_a_unit_skipped_in_backward_only_is_named() -> None:
    messages = run_ranks(2, detaches_one_output, 2)
    assert_alike(messages, "the parameters of unit 'right' from rank 1", "the parameters of unit 'first' from rank 0")


def test_a_unit_without_a_gradient_on_one_rank_is_named_where_no_parameters_travel_in_backward() -> None:
    messages = run_ranks(2, detaches_one_output, 0, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    assert_alike(messages, "rank 0 waits for the gradients of unit 'right' from rank 1")


def test_units_in_other_orders_are_named() -> None:
    messages = run_ranks(2, fails_then_trains, ("012", "021"), "012", no_grad=False)
    assert_alike(messages, "unit 'blocks.1' from rank 1", "unit 'blocks.2' from rank 0")


@pytest.mark.parametrize("no_grad", [False])
def test_all_ranks_of_a_hybrid_mesh_are_told_and_can_go_on(no_grad: bool) -> None:
    """The replicas 2 and 3 wait for 0 and 1 in backward only."""
    messages = run_ranks(4, fails_then_trains, ("02", "012", "012", "012"), "012", no_grad=no_grad, replicas=2)
    assert_alike(messages, "unit 'blocks.1' from rank 0", "unit 'blocks.2' from rank 1")


def comes_late() -> str:
    """Ranks 0 and 1 have failed, and their error was caught, long before rank 2 comes."""
    pair = make_pair(Uses)
    if pair.rank == 2:
        time.sleep(6 * PATIENCE)
    message = message_of(step_of(pair, lambda m, x, rank: m(x, "021" if rank == 0 else "012")))
    pair.optim.zero_grad()
    pair.step(lambda m, x, turn: backward(m(x, "012").pow(2).mean()))
    return message


def test_a_rank_that_comes_later_to_those_that_failed_fails_too() -> None:
    assert_alike(run_ranks(3, comes_late), "unit 'blocks.")


def fails_twice() -> list[str]:
    pair = make_pair(Uses)
    uses = [("02", "012"), ("012", "02")]
    return [message_of(step_of(pair, lambda m, x, rank, uses=uses: m(x, uses[rank]))) for uses in uses]


def test_a_second_mistake_is_found_like_the_first() -> None:
    first, second = zip(*run_ranks(2, fails_twice), strict=True)
    assert_alike(first, "unit 'blocks.1' from rank 0")
    assert_alike(second, "unit 'blocks.1' from rank 1")


# -- no error


def is_slow(pause_s: float) -> list[int]:
    """Returns how often the watch looked for a circle on this rank."""
    pair, looked, search = make_pair(Uses), [0], watch._doom

    def counted(*args: Any) -> Any:
        looked[0] += 1
        return search(*args)

    def step(m: nn.Module, x: Tensor, turn: Turn) -> Tensor:
        if turn.rank == 1 == pair.rank and m is pair.model:
            time.sleep(pause_s)
        return backward(m(x, "012").pow(2).mean())

    watch._doom = counted
    try:
        with patience(0.2):
            for _ in range(2):
                pair.step(step)
    finally:
        watch._doom = search
    return looked


def test_a_slow_rank_is_waited_for() -> None:
    looked = run_ranks(3, is_slow, 2.0)
    assert all(n >= 1 for rank, (n,) in enumerate(looked) if rank != 1), "the pause was no test"


# -- waits of other kinds


def own_line() -> Any:
    """Connections of two ranks, without a model."""
    return communicator(Axis(dist.group.WORLD, dist.get_rank(), 2, (0, 1)), torch.device("cpu"))


def gathers(line: Any, tag: int, numel: int = 3) -> Tensor:
    own, full = torch.full((numel,), float(line.rank)), torch.empty(2 * numel)
    pending = line.begin_gather(own, full, full.chunk(2), tag)
    line.end_gather(pending, f"tag {tag}")
    line.drain("what was sent")
    return full


def sends_only() -> tuple[str, list[float]]:
    line = own_line()

    def step() -> None:
        full = torch.empty(6)
        line.begin_gather(torch.ones(3), full, full.chunk(2), 4 + 4 * line.rank)
        line.drain("what was sent")

    return message_of(step), gathers(line, 4).tolist()


def test_sends_that_nobody_takes_are_named_too() -> None:
    answers = run_ranks(2, sends_only)
    assert_alike(
        [message for message, _ in answers], "rank 0 waits for rank 1 to take what was sent", "rank 1 waits for rank 0 to take"
    )
    assert [full for _, full in answers] == [[0, 0, 0, 1, 1, 1]] * 2


def empty_messages() -> tuple[str, list[float]]:
    line = own_line()
    return message_of(lambda: gathers(line, 4 + 4 * line.rank, numel=0)), gathers(line, 4).tolist()


def test_waits_for_messages_without_content_are_ended_too() -> None:
    answers = run_ranks(2, empty_messages)
    assert_alike([message for message, _ in answers], "tag 4 from rank 1", "tag 8 from rank 0")
    assert [full for _, full in answers] == [[0, 0, 0, 1, 1, 1]] * 2


def reduces_through_two_axes() -> tuple[bool, list[bool]]:
    """A reduction whose first half was lost goes through its second half without waiting for anybody."""
    shard, replica = own_line(), own_line_of(dist.new_group([0, 1]))
    buffer = torch.ones(4)
    pending = shard.begin_reduce(buffer, buffer.chunk(2), 4)
    total = torch.ones(3)
    also = replica.begin_total(total, 8)
    assert message_of(lambda: gathers(shard, 8 + 4 * shard.rank))
    lost = shard.end_reduce(pending, buffer.chunk(2)[shard.rank], torch.float32, "gradients")
    second = replica.begin_total(lost, 4)
    third = replica.continue_total(second, lost, 4, "gradients")
    replica.end_total(third, lost, "gradients")
    replica.end_total(replica.continue_total(also, total, 8, "gradients"), total, "gradients")
    shard.drain("what was sent")
    return lost.shape == (2,), [pending.lost, second.lost, third.lost, also.lost]


def own_line_of(group: Any) -> Any:
    return communicator(Axis(group, dist.get_rank(), 2, (0, 1)), torch.device("cpu"))


def test_what_travelled_when_connections_were_given_up_is_waited_for_no_more() -> None:
    assert run_ranks(2, reduces_through_two_axes) == [(True, [True] * 4)] * 2


def skips_a_sum() -> str:
    pair = make_pair(Uses)

    def step() -> None:
        pair.model(torch.ones(2, DIM), "012").sum().backward()
        if pair.rank == 0:
            pair.model._runtime.groups[0].shard.sum_of(torch.ones(()))
        pair.model(torch.ones(2, DIM), "012")

    return message_of(step)


def test_a_rank_that_skips_a_sum_over_the_ranks_is_told_and_the_others_get_an_error_of_ours_at_the_time_limit() -> None:
    other, own = run_ranks(2, skips_a_sum, group_timeout=4)
    assert_alike(
        [own],
        "rank 0 waits in a sum over the ranks for ranks [1]",
        "rank 1 waits for the parameters of unit 'blocks.0' from rank 0",
    )
    assert other.startswith("Waiting for a sum over the ranks")


# -- the thread


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fsdp_compat watch"]


def outlives() -> tuple[int, int, int]:
    """How many threads there are with a model, after it and its process group have gone, and with the next one."""
    with patience(0.1):
        first = make_pair(Uses)
        running = threads()
        found = [len(running)]
        store, world = dist.distributed_c10d._get_default_store(), dist.get_world_size()
        rank = dist.get_rank()
        dist.destroy_process_group()
        del first
        gc.collect()
        for thread in running:
            thread.join(5)
        found.append(len(threads()))
        dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world)
        make_pair(Uses).step(lambda m, x, turn: backward(m(x, "012").pow(2).mean()))
        found.append(len(threads()))
    return tuple(found)


def test_one_thread_watches_while_there_are_process_groups() -> None:
    assert run_ranks(2, outlives) == [(1, 0, 1)] * 2


PROGRAM = """
    import sys, torch, torch.distributed as dist
    from fsdp_compat import FullyShardedDataParallel as FSDP
    from fsdp_compat._engine import watch
    from torch import nn

    rank, path, skips = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "skips"
    watch.PATIENCE = 0.5
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    parts = [FSDP(nn.Linear(4, 4)) for _ in range(3)]
    model = FSDP(nn.Sequential(*parts))
    x = torch.ones(2, 4)
    model(x).sum().backward()
    if skips and rank == 1:
        model.module[1].forward = lambda x: x
        del model.module[1]
    model(x).sum().backward()
    print("done")
"""


@pytest.mark.parametrize("skips", [False, True])
def test_programs_end_by_themselves(tmp_path: Path, skips: bool) -> None:
    arguments = [str(tmp_path / "store"), "skips" if skips else "uses all"]
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    processes = [subprocess.Popen([*program, str(rank), *arguments], **pipe) for rank in range(2)]
    try:
        ended = [(*process.communicate(timeout=50), process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for out, err, code in ended:
        assert "terminate called" not in err and "Fatal" not in err
        if skips:
            assert code == 1 and "can never end" in err, err
        else:
            assert code == 0 and out == "done\n", err


# -- what a chain of posts says, without processes


def wait(rank: int, *peers: int, number: int = 1, generation: int = 0, tag: int = 4) -> watch.Wait:
    return watch.Wait(rank, peers, "line", generation, rank, tag, number, 12, False, f"{rank} waits for {peers}")


def post(of: watch.Wait, begun: dict[int, int] | None = None, generation: int | None = None) -> watch._Post:
    return watch._Post(of, {"line": (of.generation if generation is None else generation, begun or {})})


def doom(*posts: watch._Post, broken: dict[int, watch.Report] | None = None) -> watch.Report | None:
    """What the rank of the first post makes of them."""
    board = watch.Board(dist.HashStore())
    for one in posts:
        board.post(one.wait.rank, one)
    for rank, report in (broken or {}).items():
        line = types.SimpleNamespace(name="line", generation=0, rank=rank, members=range(9))
        board.break_line(line, report)
    return watch._doom(board, posts[0])


def test_a_circle_is_doomed_and_so_is_who_waits_for_it() -> None:
    circle = post(wait(1, 2)), post(wait(2, 1))
    assert doom(*circle) == watch.Report(True, {1: "1 waits for (2,)", 2: "2 waits for (1,)"})
    found = doom(post(wait(0, 1)), *circle)
    assert found is not None and set(found.lines) == {0, 1, 2}


def test_a_chain_that_ends_at_a_rank_that_computes_is_not() -> None:
    assert doom(post(wait(0, 1)), post(wait(1, 2))) is None


def test_a_circle_in_which_something_is_on_its_way_is_not() -> None:
    assert doom(post(wait(0, 1, tag=4), {4: 1}), post(wait(1, 0, tag=8), {4: 1, 8: 1})) is None
    assert doom(post(wait(0, 1, tag=4, number=2), {4: 2}), post(wait(1, 0, tag=8), {4: 1, 8: 1})) is not None


def test_a_rank_that_has_not_come_to_this_generation_lacks_what_was_begun_in_it() -> None:
    new, old = wait(0, 1, generation=1), wait(1, 0, generation=0)
    assert doom(post(new, {4: 1}), post(old, {4: 7})) is None  # rank 0 has given up what rank 1 waits for, and will say so
    assert doom(post(new, {4: 1}), post(wait(1, 0, generation=2), {}, generation=0)) is not None


def test_a_rank_that_waits_for_all_is_doomed_with_any_of_them() -> None:
    together = post(wait(0, 1, 2, 3, tag=watch.TOGETHER), {watch.TOGETHER: 1})
    assert doom(together, post(wait(2, 0))) is not None
    assert doom(together, post(wait(2, 1))) is None
    assert doom(together, post(wait(2, 0), {watch.TOGETHER: 1})) is None


def test_who_waits_for_a_rank_that_gave_up_is_told_what_it_said() -> None:
    report = watch.Report(False, {1: "1 has waited for 5"})
    assert doom(post(wait(0, 1)), broken={1: report}) == watch.Report(False, {0: "0 waits for (1,)", 1: "1 has waited for 5"})


def test_a_post_that_was_withdrawn_is_gone() -> None:
    board = watch.Board(dist.HashStore())
    board.post(0, post(wait(0, 1)))
    assert board.post_of(0) == post(wait(0, 1))
    board.post(0, None)
    assert board.post_of(0) is None


def takes_turns() -> list[bool]:
    """Whether a line knows that several threads use it: after a move to another thread, and after a return."""
    line, found = own_line(), []
    for in_thread in (False, True, False):
        use = threading.Thread(target=gathers, args=(line, 4))
        use.start() if in_thread else use.run()
        if in_thread:
            use.join()
        found.append(line.many_threads)
    return found


def test_threads_that_take_turns_are_seen_as_the_watch_could_be_wrong_then() -> None:
    assert run_ranks(2, takes_turns) == [[False, False, True]] * 2
