"""Sums over ranks with the same bits on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_CHUNK_NUMEL = 1 << 17  # summed at a time, per thread: it stays in the cache until it is divided


def sum_in_rank_order(
    parts: Sequence[torch.Tensor], total: torch.Tensor, divisor: torch.Tensor | None
) -> None:
    """Add ``parts`` in rank order into ``total``, which may be one of them, and divide by
    ``divisor``.

    At least in fp32: in bf16, 256 + 1 is 256.
    """
    numel, wide = total.numel(), torch.promote_types(total.dtype, torch.float32)
    # a separate accumulator, unless the first addition may overwrite ``total``
    separate = total.dtype != wide or any(part.data_ptr() == total.data_ptr() for part in parts[2:])
    step = _CHUNK_NUMEL * max(torch.get_num_threads(), 1)
    for start in range(0, numel, step):
        chunk, addends = total, list(parts)
        if numel > step:
            chunk = total[start : start + step]
            addends = [part[start : start + step] for part in parts]
        result = torch.empty(chunk.shape, dtype=wide, device="cpu") if separate else chunk
        if addends[0].dtype == addends[1].dtype == wide:
            torch.add(addends[0], addends[1], out=result)
            rest = addends[2:]
        else:
            result.copy_(addends[0])
            rest = addends[1:]
        for part in rest:
            result.add_(part)
        if divisor is not None:
            result.div_(divisor)
        if separate:
            chunk.copy_(result)
