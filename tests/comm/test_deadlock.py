"""Ranks that wait for each other for ever get an error within seconds that says who waits for what,
and communication that has failed stays failed; slow ranks get no error."""

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
from fsdp_compat._comm import deadlock
from fsdp_compat._comm.communicator import communicator
from fsdp_compat._comm.mesh import Axis
from tests.support.models import DIM, Block
from tests.support.parity import Turn, backward, make_pair
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
PATIENCE = 0.5
PROMPT_S = 8.0  # of a diagnosis, on a busy machine; every time limit is far beyond it


@contextlib.contextmanager
def patience(seconds: float = PATIENCE) -> Iterator[None]:
    before, deadlock.PATIENCE = deadlock.PATIENCE, seconds
    try:
        yield
    finally:
        deadlock.PATIENCE = before


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
        assert re.match(r"Waiting for .* can never end: ranks wait for each other\.", message), (
            message
        )
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


def assert_stays_failed(model: nn.Module, forward: Callable[[], object]) -> None:
    """Every later use of the model says at once that communication has failed, and what failed
    first."""
    started = time.monotonic()
    for use in (forward, model.state_dict, lambda: model.clip_grad_norm_(1.0), forward):
        with pytest.raises(
            StateError, match=r"has failed before, and stays failed\.[\s\S]*rank \d waits for"
        ):
            use()
    assert time.monotonic() - started < PROMPT_S / 2


def fails_for_good(uses: tuple[str, ...], *, no_grad: bool, **options: Any) -> str:
    """Rank r uses what ``uses[r]`` says, which fails, and so does all that comes later. Over a new
    group the model trains."""
    pair = make_pair(Uses, **options)
    x = torch.ones(2, DIM)
    with torch.set_grad_enabled(not no_grad):

        def step() -> None:
            loss = pair.model(x, uses[pair.rank]).sum()
            if not no_grad:
                loss.backward()

        message = message_of(step)
    assert message, "no error"
    assert_stays_failed(pair.model, lambda: pair.model(x, "012"))
    if not options:  # else its process groups are new ones
        with pytest.raises(StateError, match="has failed before"):
            make_pair(Uses)
        again = make_pair(Uses, process_group=dist.new_group())
        again.step(lambda m, x, turn: backward(m(x, "012").pow(2).mean()))
    return message


@pytest.mark.parametrize(("ranks", "no_grad"), [(2, False), (3, True), (4, False)])
def test_a_unit_that_one_rank_skips_is_named_on_all_ranks_and_the_model_stays_failed(
    ranks: int, no_grad: bool
) -> None:
    uses = ("012", *["02"] * 1, *["012"] * (ranks - 2))
    messages = run_ranks(ranks, fails_for_good, uses, no_grad=no_grad)
    assert_alike(
        messages,
        "the parameters of unit 'blocks.1' from rank 1",
        "rank 1 waits for the parameters of unit 'blocks.2'",
    )


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
    return message_of(step_of(pair, lambda m, x, rank: m(x, "" if rank == 1 else "i")))


def test_a_unit_inside_of_a_unit_that_one_rank_skips_is_named() -> None:
    messages = run_ranks(2, skips_an_inner_unit)
    assert_alike(
        messages,
        "the parameters of unit 'nest.inner' from rank 1",
        "the parameters of unit 'nest.other' from rank 0",
    )


class Joined(nn.Module):
    """Two units beside each other, between two that every backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.last = Block(), Block(), Block(), Block()

    def forward(self, x: Tensor, detached: bool) -> Tensor:
        x = self.first(x)
        right = self.right(x)
        return self.last(self.left(x) + (right.detach() if detached else right))


def detaches_one_output(**options: Any) -> str:
    pair = make_pair(Joined, **options)
    message = message_of(step_of(pair, lambda m, x, rank: m(x, rank == 1)))
    assert_stays_failed(pair.model, lambda: pair.model(torch.ones(2, DIM), False).sum().backward())
    return message


def test_a_unit_skipped_in_backward_only_is_named() -> None:
    messages = run_ranks(2, detaches_one_output)
    assert_alike(
        messages,
        "the parameters of unit 'right' from rank 1",
        "the parameters of unit 'first' from rank 0",
    )


def test_a_unit_without_a_gradient_on_one_rank_is_named_if_backward_gathers_nothing() -> None:
    messages = run_ranks(2, detaches_one_output, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    assert_alike(messages, "rank 0 waits for the gradients of unit 'right' from rank 1")


def test_units_in_other_orders_are_named() -> None:
    messages = run_ranks(2, fails_for_good, ("012", "021"), no_grad=False)
    assert_alike(messages, "unit 'blocks.1' from rank 1", "unit 'blocks.2' from rank 0")


def test_all_ranks_of_a_hybrid_mesh_are_told() -> None:
    """The replicas 2 and 3 wait for 0 and 1 in backward only."""
    messages = run_ranks(4, fails_for_good, ("02", "012", "012", "012"), no_grad=False, replicas=2)
    assert_alike(messages, "unit 'blocks.1' from rank 0", "unit 'blocks.2' from rank 1")


def comes_late() -> str:
    """Ranks 0 and 1 have failed, and their error was caught, long before rank 2 comes."""
    pair = make_pair(Uses)
    if pair.rank == 2:
        time.sleep(6 * PATIENCE)
    return message_of(step_of(pair, lambda m, x, rank: m(x, "021" if rank == 0 else "012")))


def test_a_rank_that_comes_later_to_those_that_failed_fails_too() -> None:
    assert_alike(run_ranks(3, comes_late), "unit 'blocks.")


def is_interrupted_while_it_waits() -> tuple[str, str]:
    """Rank 0 is interrupted in the middle of its communication, rank 1 goes on to wait for it."""
    pair, error = make_pair(Uses), ""
    x = torch.ones(2, DIM)
    if pair.rank == 0:
        wire = pair.model._runtime.groups[0].shard
        read, wire._wait = wire._wait, interrupt
        try:
            pair.model(x, "012")
        except KeyboardInterrupt:
            error = "interrupted"
        wire._wait = read
    else:
        error = message_of(lambda: pair.model(x, "012"))
    with pytest.raises(StateError, match="stays failed") as again:
        pair.model(x, "012")
    return error, str(again.value)


def interrupt(*args: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_in_the_middle_of_communication_fails_on_all_ranks_at_once_and_for_good() -> (
    None
):
    (first, first_again), (second, second_again) = run_ranks(2, is_interrupted_while_it_waits)
    assert first == "interrupted"
    for message in (first_again, second, second_again):
        assert "rank 0 left its communication with KeyboardInterrupt" in message


def fails_before_it_waits() -> str:
    """An exception where a gather would be waited for: its memory may be freed only when nothing is
    received any more."""
    pair = make_pair(Uses)
    x = torch.ones(2, DIM)
    pair.model(x, "012")
    wire = pair.model._runtime.groups[0].shard
    end, wire.end_gather = wire.end_gather, interrupt
    with pytest.raises(KeyboardInterrupt):
        pair.model(x, "012")
    wire.end_gather = end
    pair.step(lambda m, x, turn: backward(m(x, "012").pow(2).mean()))
    return "trains"


def test_an_interrupt_before_a_wait_on_all_ranks_loses_nothing() -> None:
    assert run_ranks(2, fails_before_it_waits) == ["trains"] * 2


# -- no error


def is_slow(pause_s: float) -> list[int]:
    """Returns how often the watch looked for a circle on this rank."""
    pair, looked, search = make_pair(Uses), [0], deadlock._find_cycle

    def counted(*args: Any) -> Any:
        looked[0] += 1
        return search(*args)

    def step(m: nn.Module, x: Tensor, turn: Turn) -> Tensor:
        if turn.rank == 1 == pair.rank and m is pair.model:
            time.sleep(pause_s)
        return backward(m(x, "012").pow(2).mean())

    deadlock._find_cycle = counted
    try:
        with patience(0.2):
            for _ in range(2):
                pair.step(step)
    finally:
        deadlock._find_cycle = search
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
    line.flush_sends("what was sent")
    return full


def empty_messages() -> str:
    line = own_line()
    return message_of(lambda: gathers(line, 4 + 4 * line.rank, numel=0))


def test_waits_for_messages_without_content_are_ended_too() -> None:
    assert_alike(run_ranks(2, empty_messages), "tag 4 from rank 1", "tag 8 from rank 0")


def leaves_what_is_on_its_way() -> list[float]:
    line = own_line()
    full = torch.empty(6)
    line.begin_gather(
        torch.full((3,), 7.0), full, full.chunk(2), 4
    )  # and an exception comes before anybody waits for it
    del full
    assert gathers(line, 8).tolist() == [0, 0, 0, 1, 1, 1]
    line.begin_gather(torch.full((3,), 7.0), torch.empty(6), torch.empty(6).chunk(2), 4)
    return gathers(line, 4).tolist()


def test_a_message_that_nobody_waited_for_is_not_taken_for_the_next_one() -> None:
    assert run_ranks(2, leaves_what_is_on_its_way) == [[0, 0, 0, 1, 1, 1]] * 2


def skips_a_sum() -> str:
    pair = make_pair(Uses)

    def step() -> None:
        pair.model(torch.ones(2, DIM), "012").sum().backward()
        if pair.rank == 0:
            pair.model._runtime.groups[0].shard.sum_of(torch.ones(()))
        pair.model(torch.ones(2, DIM), "012")

    return message_of(step)


def test_a_rank_that_skips_a_sum_over_the_ranks_is_told_and_so_are_the_others() -> None:
    assert_alike(
        run_ranks(2, skips_a_sum),
        "rank 0 waits in a sum over the ranks for ranks [1]",
        "rank 1 waits for the parameters of unit 'blocks.0' from rank 0",
    )


def abandons_a_sum() -> tuple[str, float]:
    """Rank 1 raises before a sum that rank 0 has begun; both catch it, and then communicate over
    their own process group."""
    pair = make_pair(Uses)
    pair.model(torch.ones(2, DIM), "012").sum().backward()
    error = ""
    if pair.rank == 0:
        error = message_of(
            lambda: pair.model._runtime.groups[0].shard.sum_of(torch.full((), 100.0))
        )
    else:
        error = message_of(lambda: pair.model(torch.ones(2, DIM), "012"))
    mine = torch.full((), float(pair.rank + 1))
    dist.all_reduce(mine)
    return error, mine.item()


def test_an_abandoned_sum_does_not_meet_a_message_of_the_users() -> None:
    for error, total in run_ranks(2, abandons_a_sum):
        assert error and total == 3.0


# -- the thread


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fsdp_compat watch"]


def outlives() -> tuple[int, int, int]:
    """How many threads there are with a model, after it and its process group have gone, and with
    the next one."""
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
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world
        )
        make_pair(Uses).step(lambda m, x, turn: backward(m(x, "012").pow(2).mean()))
        found.append(len(threads()))
    return tuple(found)


def test_one_thread_watches_while_there_are_process_groups() -> None:
    assert run_ranks(2, outlives) == [(1, 0, 1)] * 2


PROGRAM = """
    import sys, torch, torch.distributed as dist
    from fsdp_compat import FullyShardedDataParallel as FSDP
    from fsdp_compat._comm import deadlock as watch
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


def wait(rank: int, *peers: int, number: int = 1, tag: int = 4) -> deadlock.Wait:
    return deadlock.Wait(rank, peers, "line", tag, number, f"{rank} waits for {peers}")


def post(of: deadlock.Wait, begun: dict[int, int] | None = None) -> deadlock._Post:
    return deadlock._Post(of, {"line": begun or {}})


def doom(
    *posts: deadlock._Post, broken: dict[int, deadlock.Report] | None = None
) -> deadlock.Report | None:
    """What the rank of the first post makes of them."""
    board = deadlock.StatusStore(dist.HashStore())
    for one in posts:
        board.post(one.wait.rank, one)
    for rank, report in (broken or {}).items():
        line = types.SimpleNamespace(name="line", rank=rank, members=range(9))
        board.break_line(line, report)
    return deadlock._find_cycle(board, posts[0])


def test_a_circle_is_doomed_and_so_is_who_waits_for_it() -> None:
    circle = post(wait(1, 2)), post(wait(2, 1))
    assert doom(*circle) == deadlock.Report(True, {1: "1 waits for (2,)", 2: "2 waits for (1,)"})
    found = doom(post(wait(0, 1)), *circle)
    assert found is not None and set(found.lines) == {0, 1, 2}


def test_a_chain_that_ends_at_a_rank_that_computes_is_not() -> None:
    assert doom(post(wait(0, 1)), post(wait(1, 2))) is None


def test_a_circle_in_which_something_is_on_its_way_is_not() -> None:
    assert doom(post(wait(0, 1, tag=4), {4: 1}), post(wait(1, 0, tag=8), {4: 1, 8: 1})) is None
    assert (
        doom(post(wait(0, 1, tag=4, number=2), {4: 2}), post(wait(1, 0, tag=8), {4: 1, 8: 1}))
        is not None
    )


def test_in_a_circle_only_the_waits_in_which_nothing_was_sent_are_refused() -> None:
    refused, sent = (
        post(wait(0, 1, tag=deadlock.RENDEZVOUS), {deadlock.RENDEZVOUS: 1}),
        post(wait(1, 0), {4: 1}),
    )
    assert doom(refused, sent) is not None
    assert doom(sent, refused) is None
    assert doom(post(wait(2, 1), {4: 1}), refused, sent) is None, "rank 1 goes on, and then rank 2"
    assert (
        doom(post(wait(0, 1, tag=deadlock.RENDEZVOUS)), post(wait(1, 2)), post(wait(2, 1)))
        is not None
    ), "a circle beyond it"


def test_a_rank_that_waits_for_all_is_doomed_with_any_of_them() -> None:
    together = post(wait(0, 1, 2, 3, tag=deadlock.TOGETHER), {deadlock.TOGETHER: 1})
    assert doom(together, post(wait(2, 0))) is not None
    assert doom(together, post(wait(2, 1))) is None
    assert doom(together, post(wait(2, 0), {deadlock.TOGETHER: 1})) is None


def test_who_waits_for_a_rank_that_gave_up_is_told_what_it_said() -> None:
    report = deadlock.Report(False, {1: "1 has waited for 5"})
    assert doom(post(wait(0, 1)), broken={1: report}) == deadlock.Report(
        False, {0: "0 waits for (1,)", 1: "1 has waited for 5"}
    )


def test_a_post_that_was_withdrawn_is_gone() -> None:
    board = deadlock.StatusStore(dist.HashStore())
    board.post(0, post(wait(0, 1)))
    assert board.post_of(0) == post(wait(0, 1))
    board.post(0, None)
    assert board.post_of(0) is None


def takes_turns() -> str:
    """A line is used by one thread, by another, and by the first again."""
    line = own_line()
    for in_thread in (False, True, False):
        use = threading.Thread(target=gathers, args=(line, 4))
        use.start() if in_thread else use.run()
        if in_thread:
            use.join()
    return message_of(lambda: gathers(line, 8 + 4 * line.rank))


def test_threads_may_take_turns_and_a_circle_is_still_found() -> None:
    assert_alike(run_ranks(2, takes_turns), "tag 8 from rank 1", "tag 12 from rank 0")


def two_models_in_two_threads(groups: int) -> list[str]:
    """Two models train at once, each in a thread, over as many process groups."""
    group = [dist.new_group() for _ in range(groups)]
    pairs = [make_pair(Uses, process_group=group[n % groups]) for n in range(2)]
    found = ["", ""]

    def trains(n: int) -> None:
        x = torch.ones(2, DIM)
        try:
            for _ in range(200):
                pairs[n].model(x, "012").sum().backward()
        except StateError as error:
            found[n] = str(error)

    threads = [threading.Thread(target=trains, args=(n,)) for n in range(2)]
    with patience():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found


def test_two_models_in_two_threads_need_a_process_group_each_and_otherwise_get_an_error() -> None:
    assert run_ranks(2, two_models_in_two_threads, 2) == [["", ""]] * 2
    found = run_ranks(2, two_models_in_two_threads, 1)
    assert all(any(messages) for messages in found)
    assert any(
        "Two threads communicate over one process group at once" in message
        for messages in found
        for message in messages
    )
