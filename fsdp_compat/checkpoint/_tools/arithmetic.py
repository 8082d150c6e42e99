"""Arithmetic on values of any dtype: their range, which are not finite, and how far two tensors are
apart."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch


@functools.cache
def comparable(dtype: torch.dtype) -> bool:
    """Return whether torch can compute with values of a dtype, once they are converted."""
    try:
        torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype).to(_wide(dtype))
    except (RuntimeError, NotImplementedError):  # packed ones, such as two numbers in a byte
        return False
    return True


def _wide(*dtypes: torch.dtype) -> torch.dtype:
    return torch.complex128 if any(dtype.is_complex for dtype in dtypes) else torch.float64


def count_not_finite(values: torch.Tensor) -> tuple[int, int]:
    """Return the numbers of NaN and infinite elements; 0 for dtypes torch cannot compute with."""
    dtype = values.dtype
    if not (dtype.is_floating_point or dtype.is_complex) or not comparable(dtype):
        return 0, 0
    if dtype.itemsize == 1:
        values = values.to(torch.float32)
    if bool(torch.isfinite(values).all()):
        return 0, 0
    return int(torch.isnan(values).sum()), int(torch.isinf(values).sum())


def extremes_and_mean(parts: Iterable[torch.Tensor]) -> tuple[float, float, float]:
    """Return the smallest and the largest of real values, and their mean; NaN if one of them is.
    parts: at least one, none empty, of a dtype that is ``comparable``."""
    rows = []
    for part in parts:
        low, high = torch.aminmax(wide := part.to(torch.float64))
        rows.append((float(low), float(high), float(wide.sum()), part.numel()))
    lows, highs, sums, numels = torch.tensor(rows, dtype=torch.float64).T
    return float(lows.min()), float(highs.max()), float(sums.sum() / numels.sum())


def count_unequal(one: torch.Tensor, other: torch.Tensor) -> int:
    """Return how many elements of two contiguous tensors of one dtype and shape differ in a bit."""
    itemsize = one.dtype.itemsize
    one, other = (side.view(-1).view(torch.uint8) for side in (one, other))
    if torch.equal(one, other):
        return 0
    return int((one != other).view(-1, itemsize).any(dim=1).sum())


def distance(
    one: torch.Tensor, other: torch.Tensor, rtol: float, atol: float
) -> tuple[int, float, float]:
    """Compare two 1-D contiguous tensors. Return how many elements are further apart than ``atol +
    rtol * m``, where m is the larger of their magnitudes, and the largest distance, absolute and
    relative to m. NaN equals NaN; a value beside NaN or infinity is infinitely far from it."""
    dtypes = one.dtype, other.dtype
    num_unequal = count_unequal(one, other) if one.dtype == other.dtype else one.numel()
    if not num_unequal:
        return 0, 0.0, 0.0
    if not all(map(comparable, dtypes)):
        return num_unequal, torch.inf, torch.inf
    are_integers = not any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)
    is_wide = max(dtype.itemsize for dtype in dtypes) == 8
    apart, magnitudes = (_integers_apart if are_integers and is_wide else _apart)(one, other)
    if not apart.numel():
        return 0, 0.0, 0.0
    relative = (apart / magnitudes).nan_to_num_(nan=torch.inf, posinf=torch.inf)
    is_close = apart.isfinite() & (apart <= atol + rtol * magnitudes)
    return int((~is_close).sum()), float(apart.max()), float(relative.max())


def _apart(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distances of unequal values, and the larger magnitude of each pair."""
    wide = _wide(one.dtype, other.dtype)
    one, other = one.to(wide), other.to(wide)
    differs = (one != other) & ~(one.isnan() & other.isnan())
    one, other = one[differs], other[differs]
    # Inf - inf is NaN, as is everything with a NaN: these values are infinitely far apart.
    apart = (one - other).abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    return apart, torch.maximum(one.abs(), other.abs())


def _integers_apart(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Like ``_apart``, as Python's numbers: neither float64 nor int64 holds all of 64 bits."""
    pairs = zip(one.tolist(), other.tolist(), strict=True)
    unequal = [(abs(a - b), max(abs(a), abs(b))) for a, b in pairs if a != b]
    apart, magnitudes = torch.tensor([*unequal, (0, 0)], dtype=torch.float64)[:-1].T
    return apart, magnitudes
