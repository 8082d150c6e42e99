"""Host memory that `async_save` copies into, kept from one save to the next: new memory costs page
faults, and pinned memory a call of the driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..._engine.device import has_streams

_ALIGN_NBYTES = 64

_kept = torch.empty(0, dtype=torch.uint8)


def stage(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """Return copies [numel] on the CPU, and a function that waits until they are complete. The
    copies of a device's values run in the order of its current stream: later work may change the
    values at once. The memory is that of the last call, whose copies must not be in use."""
    global _kept
    starts, nbytes = list[int](), 0
    for tensor in tensors:
        starts.append(nbytes)
        nbytes += -(-tensor.nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES
    is_pinned = any(has_streams(tensor.device) for tensor in tensors)
    if _kept.numel() < nbytes or _kept.is_pinned() < is_pinned:
        _kept = torch.empty(0, dtype=torch.uint8)  # freed before the new one is allocated
        _kept = torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_pinned)
    copies = []
    for tensor, start in zip(tensors, starts, strict=True):
        copies.append(_kept[start : start + tensor.nbytes].view(tensor.dtype))
        copies[-1].copy_(tensor, non_blocking=is_pinned)
    devices = {tensor.device for tensor in tensors if has_streams(tensor.device)}
    copied = [torch.accelerator.current_stream(device).record_event() for device in devices]

    def wait() -> None:
        for event in copied:
            event.synchronize()

    return copies, wait
