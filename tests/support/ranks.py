"""Run a function on several ranks, in processes that live as long as pytest, or its worker.

    def sums(value: float) -> float:  # at module level: it is sent by name
        total = torch.tensor(value + dist.get_rank())
        dist.all_reduce(total)
        return total.item()

    def test_sums() -> None:
        assert run_ranks(2, sums, 10.0) == [21.0, 21.0]

    @on_ranks(2)  # the body is what every rank does
    def test_rank() -> None:
        assert dist.get_world_size() == 2

Importing torch costs seconds, so rank processes are forks of one that has imported it, and are
kept. Every call gets its own default group. State that a call may change is restored before the
next one: the group and its subgroups, seeds, torch's global modes, warning filters, environment
variables, the working directory. If a process died, hangs or cannot clean up, all are killed and
the next call starts new ones.

The messages of one call:

    pytest -> rank   Call                                   pytest <- rank   Returned | Raised
    pytest -> rank   "release", once all ranks answered     pytest <- rank   Released

A rank keeps its group until all have answered, because a closed connection would lose messages. A
rank that raised drops it at once, so that peers that wait in a collective fail too, instead of
waiting for the time limit."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import queue
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from tests.support.time_limit import limit_s

# On a quiet machine: see limit_s.
GRACE_S = 3.0  # for the other ranks to answer, after one has raised
DEATH_S = 0.5  # for noticing a death
RELEASE_LIMIT_S = 20.0  # for cleaning up after a call
STACK_LIMIT_S = 5.0  # for writing stacks
GROUP_SHARE = 0.6  # of a call's time limit: the default limit of its process group

ROOT = str(Path(__file__).parents[2])
# Rank processes are forked from one that has imported these. It runs nothing else.
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    [
        *("torch._dynamo", "torch.distributed.checkpoint.state_dict", "hypothesis", "pytest"),
        *("tests.support.case", "tests.support.checkpoints", "tests.support.twin"),
    ]
)


class RankError(AssertionError):
    """A call of ``run_ranks`` failed. ``failed`` are the ranks to blame, the first one first."""

    def __init__(self, message: str, failed: Sequence[int]) -> None:
        super().__init__(message)
        self.failed = tuple(failed)


def run_ranks(
    n: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float | None = None,
    group_timeout: float | None = None,
    environment: Mapping[str, str] | None = None,
    backend: str = "gloo",
    **kwargs: Any,
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on ``n`` ranks and return what they return, by rank.

    function: at the top level of an importable module; arguments and results are pickled. In it
    ``torch.distributed`` is initialised: world size ``n``, a time limit of ``group_timeout``
    seconds (default: 0.6 of ``timeout``).
    environment: variables that are set during the call.
    backend: of the group. With NCCL in it, each rank also has a CUDA device as its current one.

    Raises RankError when a rank raises (with every traceback), dies (with its exit code or signal),
    or does not answer within ``timeout`` seconds (with the Python stacks of all ranks). By default
    that is ``limit_s()``; give it only to test what happens then.
    """
    __tracebackhide__ = True
    call = functools.partial(function, *args, **kwargs)
    limit = limit_s() if timeout is None else timeout
    return _pool.run(n, function, call, limit, group_timeout, dict(environment or {}), backend)


def on_ranks(n: int | str, **limits: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the body of a test on ``n`` ranks. n: a number, or the name of the parameter that has it.
    limits: for ``run_ranks``, which also takes a parameter ``environment`` of the test."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            __tracebackhide__ = True
            ranks = arguments[n] if isinstance(n, str) else n
            body = _Body(test.__module__, test.__name__, arguments)
            run_ranks(ranks, body, **{"environment": arguments.get("environment"), **limits})

        return run

    return decorate


class _Body:
    """The body of a test, sent by its name."""

    def __init__(self, module: str, name: str, arguments: dict[str, Any]) -> None:
        self.__module__, self.__qualname__, self._arguments = module, name, arguments

    def __call__(self) -> None:
        test = getattr(importlib.import_module(self.__module__), self.__qualname__)
        test.__wrapped__(**self._arguments)


def close_pool() -> None:
    """End all rank processes; a later ``run_ranks`` starts new ones."""
    _pool.kill()


# --- messages -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    number: int  # makes the keys of this call unique in the store
    num_ranks: int
    port: int  # of the store, which rank 0 serves
    group_timeout: float
    sys_path: list[str]
    environment: dict[str, str]
    backend: str
    # the function with its arguments, pickled separately: only the rank's main thread may import
    payload: bytes


@dataclass(frozen=True)
class Returned:
    payload: bytes  # the pickled result


@dataclass(frozen=True)
class Raised:
    when: float  # time.monotonic(), one clock for all processes of a machine
    what: str  # "ValueError: ...", one line
    report: str


@dataclass(frozen=True)
class Released:
    problem: str  # "" if everything was cleaned up


@dataclass(frozen=True)
class Died:
    when: float  # noticed
    what: str


# --- in pytest's process --------------------------------------------------------------------------


class _Rank:
    """One rank process, seen from pytest."""

    def __init__(self, rank: int, directory: Path) -> None:
        self.rank = rank
        self.output = directory / f"output-{rank}.txt"  # stdout and stderr of the running call
        self.stacks = directory / f"stacks-{rank}.txt"
        self.output.touch()
        self.connection, theirs = Pipe()
        arguments = rank, theirs, str(self.output), str(self.stacks), _environment()
        self.process = _forks.Process(target=_serve, args=arguments)
        # for the process that is forked, if this is its first fork
        found = {"PYTHONPATH": ROOT, "PYTHONUNBUFFERED": "1"}
        with theirs, mock.patch.dict(os.environ, {**_environment(), **found}):
            self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # a dead rank is found by receive()
            self.connection.send(message)

    def receive(self) -> Any:
        """Return the next message, or Died."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return self.died()

    def has_ended(self) -> bool:
        """True if the process has ended and everything it sent was read. Its child may keep the
        connection open."""
        return self.process.exitcode is not None and not self.connection.poll()

    def died(self) -> Died:
        when = time.monotonic()
        self.process.join(limit_s(STACK_LIMIT_S))
        code = self.process.exitcode
        if code is None:
            return Died(when, "closed its connection")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return Died(when, f"died with {how}")

    def kill(self) -> None:
        self.process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # with its children
        self.process.join()
        self.connection.close()


class _Pool:
    """The rank processes. Between calls of ``run`` all are idle and clean."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._num_calls = 0
        self._port = 0  # of the store in rank 0

    def run(
        self,
        n: int,
        function: Callable[..., Any],
        call: Callable[[], Any],
        timeout: float,
        group_timeout: float | None,
        environment: dict[str, str],
        backend: str,
    ) -> list[Any]:
        """call: the function with its arguments."""
        __tracebackhide__ = True
        if n < 1:
            raise ValueError(f"run_ranks needs at least 1 rank, got {n}")
        try:
            payload = pickle.dumps(call)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"run_ranks cannot send {function!r} and its arguments to other processes: "
                f"{error}.\n"
                "Pass a function defined at the top level of a module, and arguments that pickle "
                "takes."
            ) from error
        name = f"{function.__module__}.{function.__qualname__}"
        try:
            ranks = self._started(n)
            self._num_calls += 1
            limit = GROUP_SHARE * timeout if group_timeout is None else group_timeout
            message = Call(
                self._num_calls, n, self._port, limit, list(sys.path), environment, backend, payload
            )
            started = time.monotonic()
            for rank in ranks:
                os.truncate(rank.output, 0)
                rank.send(message)
            answers = _answers(ranks, timeout)
            if (
                any(not isinstance(answer, Returned) for answer in answers.values())
                or len(answers) < n
            ):
                self._fail(name, ranks, answers, started, timeout)
            _show_output(ranks)
            self._release(name, ranks)
        except RankError:
            raise
        except BaseException:  # mostly Ctrl-C: the ranks are still running the call
            self.kill()
            raise
        return [pickle.loads(answers[rank].payload) for rank in range(n)]

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
        self._ranks = []
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _started(self, n: int) -> list[_Rank]:
        """Return the first ``n`` ranks, all of them ready."""
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        new = [_Rank(rank, Path(self._directory.name)) for rank in range(len(self._ranks), n)]
        self._ranks += new  # at once, so that kill() finds them
        for rank in new:
            ready = rank.receive() if rank.connection.poll(limit_s()) else "nothing"
            if not isinstance(ready, int):
                output = rank.output.read_text(errors="replace")
                self.kill()
                raise RuntimeError(f"rank {rank.rank} did not start: {ready}\n{output}")
            if rank.rank == 0:
                self._port = ready
        return self._ranks[:n]

    def _release(self, name: str, ranks: list[_Rank]) -> None:
        """Let the ranks drop their groups, and wait for them."""
        __tracebackhide__ = True
        for rank in ranks:
            rank.send("release")
        problems = _unreleased(ranks, limit_s(RELEASE_LIMIT_S))
        if problems:
            text = "\n".join(f"rank {rank}: {problem}" for rank, problem in problems.items())
            stacks = self._stacks(ranks, list(problems))
            output = _output(ranks)
            self.kill()
            raise RankError(
                f"{name} returned on all ranks, but they could not clean "
                f"up.\n{text}\n{stacks}{output}",
                list(problems),
            )

    def _fail(
        self, name: str, ranks: list[_Rank], answers: dict[int, Any], started: float, timeout: float
    ) -> NoReturn:
        """Clean up or kill, and raise an error that says what every rank did."""
        __tracebackhide__ = True
        bad = {
            rank: answer for rank, answer in answers.items() if isinstance(answer, Raised | Died)
        }
        # peers may raise because of a death before it is noticed
        cause = {
            rank: answer.when - DEATH_S * isinstance(answer, Died) for rank, answer in bad.items()
        }
        order = sorted(bad, key=cause.__getitem__)
        missing = [rank.rank for rank in ranks if rank.rank not in answers]
        returned = [rank.rank for rank in ranks if isinstance(answers.get(rank.rank), Returned)]
        limit = (
            f"did not answer within {timeout:g} s"
            if not bad
            else "had not answered when it was killed for that"
        )
        text = f"{name} failed on {len(ranks)} ranks:\n"
        text += "".join(
            f"  rank {rank}, after {bad[rank].when - started:.2f} s: {bad[rank].what}\n"
            for rank in order
        )
        text += "".join(f"  rank {rank}: {limit}\n" for rank in missing)
        text += "".join(f"  rank {rank}: returned\n" for rank in returned)
        for rank in order:
            answer = bad[rank]
            if isinstance(answer, Raised):
                text += f"\n===== rank {rank} raised =====\n{answer.report}"

        if missing or any(isinstance(answer, Died) for answer in bad.values()):
            text += self._stacks(ranks, missing) + _output(ranks)
            self.kill()
        else:
            for rank in returned:
                ranks[rank].send("release")
            problems = _unreleased(ranks, limit_s(GRACE_S))
            text += _output(ranks)
            if problems:
                self.kill()
        raise RankError(text, order or missing)

    def _stacks(self, ranks: list[_Rank], wanted: list[int]) -> str:
        """Let the ranks write their Python stacks, which ends them; return those of ``wanted``."""
        for rank in ranks:
            if rank.process.exitcode is None:
                os.kill(rank.pid, signal.SIGUSR1)
        end = time.monotonic() + limit_s(STACK_LIMIT_S)
        for rank in ranks:
            rank.process.join(max(0.0, end - time.monotonic()))
        text = ""
        for rank in ranks:
            if rank.rank in wanted and rank.stacks.exists():
                stacks = rank.stacks.read_text(errors="replace").strip()
                text += f"\n===== stacks of rank {rank.rank} =====\n{stacks or '(it wrote none)'}\n"
        return text


def _answers(ranks: list[_Rank], timeout: float) -> dict[int, Any]:
    """Return the answers by rank: all, or those before a death, the time limit or the end of the
    grace period."""
    answers: dict[int, Any] = {}
    end = time.monotonic() + timeout
    grace = False
    while len(answers) < len(ranks):
        missing = {rank.connection: rank for rank in ranks if rank.rank not in answers}
        left = end - time.monotonic()
        ready = wait(list(missing), timeout=min(max(left, 0.0), 1.0))
        for connection, rank in missing.items():
            if connection in ready:
                answers[rank.rank] = rank.receive()
            elif rank.has_ended():
                answers[rank.rank] = rank.died()
        if any(isinstance(answer, Died) for answer in answers.values()) or (
            left <= 0 and not ready
        ):
            return answers
        if not grace and any(isinstance(answer, Raised) for answer in answers.values()):
            grace = True
            end = min(end, time.monotonic() + limit_s(GRACE_S))
    return answers


def _unreleased(ranks: list[_Rank], limit: float) -> dict[int, str]:
    """Wait for every rank's Released; return the problems by rank."""
    problems = {}
    end = time.monotonic() + limit
    for rank in ranks:
        if not rank.connection.poll(max(0.0, end - time.monotonic())):
            problems[rank.rank] = f"did not clean up within {limit:g} s"
            continue
        answer = rank.receive()
        if not isinstance(answer, Released):
            problems[rank.rank] = answer.what
        elif answer.problem:
            problems[rank.rank] = answer.problem
    return problems


def _output(ranks: list[_Rank]) -> str:
    text = ""
    for rank in ranks:
        output = rank.output.read_text(errors="replace").strip()
        if output:
            text += f"\n----- output of rank {rank.rank} -----\n{output}\n"
    return text


def _show_output(ranks: list[_Rank]) -> None:
    """Print the output of the ranks, which pytest shows if the test fails."""
    if any(rank.output.stat().st_size for rank in ranks):
        print(_output(ranks).strip())


def _environment() -> dict[str, str]:
    launcher = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT"
    environment = {
        name: value for name, value in os.environ.items() if name not in launcher.split()
    }
    environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    for _, interface in socket.if_nameindex():
        if interface in ("lo", "lo0"):
            environment["GLOO_SOCKET_IFNAME"] = interface  # does not resolve the host name
    return environment


_pool, _owner = _Pool(), os.getpid()


@atexit.register
def _at_exit() -> None:
    if os.getpid() == _owner:  # not in its forks
        close_pool()


# --- in a rank's process --------------------------------------------------------------------------


def _serve(
    rank: int, connection: Connection, output: str, stacks: str, environment: dict[str, str]
) -> None:
    """The main loop of a rank process: answer calls until pytest ends."""
    os.setsid()  # Ctrl-C reaches pytest alone; the rank ends with its connection
    os.environ.clear()
    os.environ.update(environment)
    with open(output, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    # chain: the default action follows the dump and ends the process, so that a dump is complete
    # when the process has ended.
    faulthandler.register(signal.SIGUSR1, file=open(stacks, "w"), all_threads=True, chain=True)  # noqa: SIM115
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def listen() -> None:
        try:
            while True:
                inbox.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)  # pytest has ended; the main thread may be doing anything

    threading.Thread(target=listen, daemon=True, name="listen to pytest").start()

    import torch
    import torch.distributed as dist

    server = (
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    )
    store = server
    torch.set_num_threads(1)
    connection.send(server.port if server is not None else 0)
    gc.freeze()
    while True:
        call = inbox.get()
        num_modules = len(sys.modules)
        if store is None:
            store = dist.TCPStore("127.0.0.1", call.port, is_master=False)
        with _restored():
            answer = _perform(rank, call, store)
            connection.send(answer)
            if isinstance(answer, Returned):
                inbox.get()  # "release"
        _save_coverage()
        connection.send(Released(_clean_up(num_modules)))


def _save_coverage() -> None:
    """If coverage is measured, save it after every call: a rank process is killed at the end."""
    coverage = sys.modules.get("coverage")
    measuring = coverage.Coverage.current() if coverage is not None else None
    if measuring is not None:
        measuring.save()


def _perform(rank: int, call: Call, store: Any) -> Returned | Raised:
    import torch
    import torch.distributed as dist

    try:
        sys.path[:] = call.sys_path
        os.environ.update(call.environment)
        function = pickle.loads(call.payload)  # imports the test module
        random.seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        torch.manual_seed(0)
        if "nccl" in call.backend:
            torch.cuda.set_device(rank)
        dist.init_process_group(
            call.backend,
            store=dist.PrefixStore(f"call {call.number}", store),
            rank=rank,
            world_size=call.num_ranks,
            timeout=timedelta(seconds=call.group_timeout),
        )
        return Returned(pickle.dumps(function()))
    except BaseException as error:  # SystemExit and pytest.skip too
        what = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        return Raised(time.monotonic(), what, _report(error))


def _clean_up(num_modules: int) -> str:
    """Drop the process groups and all garbage; return the problem, or "".

    num_modules: imported before the call.
    """
    import torch.distributed as dist

    try:
        groups: list[dist.ProcessGroup] = []
        if dist.is_initialized():
            groups += dist.distributed_c10d._world.pg_map  # the only list of all groups
            dist.destroy_process_group()
        if "torch.distributed.tensor" in sys.modules:
            _forget_meshes()
        # also if another rank's error ended the set-up: names must stay in step
        dist.distributed_c10d._world.group_count = 0
        if len(sys.modules) != num_modules:
            # First: frozen objects in a cycle are never freed, and with them their connections.
            groups.clear()
            gc.collect()
            # Objects from imports stay for ever. Later collections skip them, which saves 50 ms.
            gc.freeze()
            return ""
        gc.collect()
        # The destructor of a gloo group waits 20 ms for its event loops: not on the path of the
        # next call, and not one after the other.
        while groups:
            group = [groups.pop()]
            threading.Thread(target=group.clear, daemon=True, name="drop a process group").start()
        return ""
    except Exception:
        return traceback.format_exc()


def _forget_meshes() -> None:
    """Empty the caches of DTensor: they hold meshes, and these their groups. A later call would
    find the meshes there, as they are equal to its own."""
    from torch.distributed.tensor import _collective_utils, _redistribute, _sharding_prop
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    for where, name in (
        (_collective_utils.MeshTopoInfo, "build_from_mesh"),
        (_redistribute, "_gen_transform_infos"),
        (_sharding_prop.ShardingPropagator, "_propagate_tensor_meta_cached"),
    ):
        if hasattr(where, name):  # in this version of torch
            getattr(where, name).cache_clear()
    getattr(_redistribute, "_planner_cache", {}).clear()


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Restore what a test may change in its process: environment, directory, warning filters,
    torch's global modes."""
    import torch

    environment, directory = dict(os.environ), os.getcwd()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        if torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(False)  # imports the compiler, which takes seconds
        torch.autograd.set_detect_anomaly(False)
        torch.set_num_threads(1)


def _report(error: BaseException) -> str:
    """Return the traceback and, for a failed assert, the local variables."""
    # without _perform
    inside = error.__traceback__ and (error.__traceback__.tb_next or error.__traceback__)
    report = "".join(traceback.format_exception(type(error), error, inside))
    if isinstance(error, AssertionError) and error.__traceback__ is not None:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        shown = [
            f"  {name} = {_short(value)}"
            for name, value in frame.f_locals.items()
            if not name.startswith("__")
        ]
        if shown:
            report += "Local variables:\n" + "\n".join(shown) + "\n"
    return report


def _short(value: object) -> str:
    """Describe a value without reading a tensor's data, which may be freed."""
    import torch

    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {tuple(value.shape)} {value.dtype}"
    if isinstance(value, list | tuple) and len(value) <= 20:
        inside = ", ".join(_short(item) for item in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    if value is None or isinstance(
        value, bool | int | float | complex | str | torch.Size | torch.dtype | torch.device
    ):
        return repr(value) if len(repr(value)) <= 200 else repr(value)[:200] + "..."
    return f"<{type(value).__name__}>"
