"""How ranks exchange data: what a test may change about it, and what it sees of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from fsdp_compat import _torch_private
from fsdp_compat._comm.transport import Kind
from fsdp_compat._engine import reduce


@contextlib.contextmanager
def own_collectives(are_used: bool = True) -> Iterator[None]:
    """Inside the context models use gloo's own collectives, if asked for. As those of any backend
    they have no tags: ranks must make the same ones in one order."""
    if not are_used:
        yield
        return
    with mock.patch.object(_torch_private, "is_gloo", return_value=False) as asked:
        yield
    assert asked.called


def usage_read_late(is_late: bool) -> contextlib.AbstractContextManager[object]:
    """Inside the context ranks read at the end of a backward which parameters others have used, as
    on a device, or when they reduce them."""
    return mock.patch.object(reduce, "has_streams", lambda _: is_late)


def copies_out_of_mapped_shards(model: Any) -> list[bool]:
    """Of every group of a ``fully_shard`` model, whether its parameters are copied out of every
    rank's shard, where it is mapped."""
    groups = model._get_fsdp_state().runtime.groups
    return [group.memory.mapped_copy is not None for group in groups]


def num_gathers_sent(model: Any, action: Callable[[], object]) -> int:
    """Return how many all-gathers of a ``fully_shard`` model send messages in ``action``."""
    traffic = model._get_fsdp_state().runtime.groups[0].shard.traffic
    traffic.clear()
    action()
    return traffic.counts[Kind.GATHER]
