"""The transport of an axis of one rank: nothing is sent."""

from __future__ import annotations

import typing
from collections.abc import Sequence

import torch
from torch import Tensor

from .transport import ByRank, Handle, Transport


class SingleRank(Transport):
    """Every result is this rank's own value."""

    def begin_gather(self, own: Tensor, full: Tensor, segments: ByRank, tag: int) -> Handle:
        full.copy_(own, non_blocking=True)
        handle = Handle([])
        if full.device.type not in ("cpu", "meta"):  # the end may come on another stream
            handle.held = full.device, torch.accelerator.current_stream(full.device).record_event()
        return handle

    def end_gather(self, handle: Handle, what: str) -> None:
        if handle.held is not None:
            device, event = handle.held
            torch.accelerator.current_stream(device).wait_event(event)

    def gather_now(self, own: Tensor, what: str, tag: int = 0) -> Tensor:
        return own

    def begin_reduce(self, buffer: Tensor, segments: ByRank, tag: int) -> Handle:
        return Handle([])

    def end_reduce(
        self, handle: Handle, own: Tensor, dtype: torch.dtype, what: str, divisor: Tensor | None
    ) -> Tensor:
        total = own.to(dtype, copy=True)
        return total if divisor is None else total.div_(divisor)

    def begin_all_reduce(self, total: Tensor, tag: int, divisor: Tensor | None = None) -> Handle:
        if divisor is not None:
            total.div_(divisor)
        return Handle([])

    def end_all_reduce(self, handle: Handle, total: Tensor, what: str) -> None:
        pass

    def broadcast(self, tensors: Sequence[Tensor], what: str) -> None:
        pass

    def gather_objects(self, value: object) -> list[typing.Any]:
        return [value]
