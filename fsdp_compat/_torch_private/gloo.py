"""The private names of gloo's backend that the package uses, each with the reason why no public
name is enough."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore


def gloo_of_its_own(
    group: dist.ProcessGroup, name: str, rank: int, ranks: int, timeout: datetime.timedelta
) -> Any:
    """Connect ranks of a group again, separately from the user's messages. ``new_group`` must be
    called by all ranks of the world, or names groups by their count, and its groups live until the
    end. Collective: the ranks of the group."""
    store = PrefixStore(f"fsdp_compat/{name}", dist.distributed_c10d._world.pg_map[group][1])
    gloo = dist.ProcessGroupGloo(store, rank, ranks, timeout)
    # Messages sent through a group around the backend pass the dispatcher, where profilers and
    # dispatch modes see them.
    own = dist.ProcessGroup(store, rank, ranks)
    own._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return own


def break_connections(gloo: Any) -> None:
    """Close all connections, even while other threads wait for them. gloo has no call for this, but
    a wait that times out closes them. Ends every wait except those of ``abort_wait``."""
    for peer in set(range(gloo.size())) - {gloo.rank()}:  # a closed one raises at once
        with contextlib.suppress(RuntimeError):
            work = gloo.recv([torch.empty(0, dtype=torch.uint8)], peer, _NEVER_SENT)
            work.wait(datetime.timedelta(milliseconds=1))


def is_closed(gloo: Any, peer: int) -> bool:
    """True if a connection of ``gloo_of_its_own`` has closed, so that gloo refuses messages."""
    try:
        gloo.recv([torch.empty(0, dtype=torch.uint8)], peer, _NEVER_SENT)
    except RuntimeError:
        return True
    return False


def is_timeout(error: RuntimeError) -> bool:
    """True if a wait has timed out: gloo has no class of errors for this."""
    return "timed out" in str(error).lower()


_NEVER_SENT = (1 << 31) - 1  # a tag


def abort_wait(work: dist.Work) -> None:
    """End the wait for a send or receive, now or later: it returns False. When a connection closes,
    gloo does not fail a message in transit. The method is not exposed to Python, so it is called in
    torch's library, and only on gloo's own objects."""
    # pybind11's pointer to the C++ object, which begins with the address of its vtable
    address = ctypes.c_void_p.from_address(id(work) + object.__basicsize__).value
    abort = _aborts().get(ctypes.c_void_p.from_address(address).value) if address else None
    if abort is not None:
        abort(address)


@functools.cache
def _aborts() -> dict[int | None, Any]:
    """Return the method that ends a wait, by the vtable of each kind of work; {} if unknown."""
    found: dict[int | None, Any] = {}
    with contextlib.suppress(OSError, AttributeError, ValueError):
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        for kind in ("SendWork", "RecvWork"):
            name = f"N4c10d16ProcessGroupGloo8{kind}"
            table = ctypes.addressof(ctypes.c_void_p.in_dll(library, f"_ZTV{name}E"))
            abort = library[f"_Z{name}5abortEv"]
            abort.argtypes, abort.restype = [ctypes.c_void_p], None
            found[table + 2 * ctypes.sizeof(ctypes.c_void_p)] = abort  # two entries come before it
    return found
