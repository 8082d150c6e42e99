"""Arithmetic on values of any dtype of torch: what is not finite, and how far two values are
apart."""

from __future__ import annotations

import dataclasses
import functools

import torch

_LOWEST = -(1 << 63)


@functools.cache
def comparable(dtype: torch.dtype) -> bool:
    """Return whether torch can compute with values of a dtype, once they are converted."""
    try:
        torch.zeros(1, dtype=torch.uint8).expand(dtype.itemsize).contiguous().view(dtype).to(
            torch.complex128 if dtype.is_complex else torch.float64
        )
    except (RuntimeError, NotImplementedError):  # packed ones, such as two numbers in a byte
        return False
    return True


def count_not_finite(values: torch.Tensor) -> tuple[int, int]:
    """Return how many elements are NaN, and how many infinite. Values of dtypes with which torch
    cannot compute count as finite."""
    dtype = values.dtype
    if not (dtype.is_floating_point or dtype.is_complex) or not comparable(dtype):
        return 0, 0
    if dtype.itemsize == 1:
        values = values.to(torch.float32)
    if bool(torch.isfinite(values).all()):
        return 0, 0
    return int(torch.isnan(values).sum()), int(torch.isinf(values).sum())


@dataclasses.dataclass(frozen=True)
class Distance:
    """How far two tensors of one shape are apart."""

    num_different: int = 0  # elements that differ by more than the tolerance
    max_absolute: float = 0.0  # of all elements; infinite where one alone is NaN or infinite
    max_relative: float = 0.0  # to the larger of the two magnitudes

    def __add__(self, other: Distance) -> Distance:
        """Return the distance of two parts together."""
        return Distance(
            self.num_different + other.num_different,
            max(self.max_absolute, other.max_absolute),
            max(self.max_relative, other.max_relative),
        )


def distance(one: torch.Tensor, other: torch.Tensor, rtol: float, atol: float) -> Distance:
    """Compare two 1-D contiguous tensors of one length. NaN is equal to NaN, and an infinite value
    to the same one. Two values differ if they are further apart than ``atol + rtol * m``, where m
    is the larger of their magnitudes."""
    if one.dtype == other.dtype and _same_bytes(one, other):
        return Distance()
    if not (comparable(one.dtype) and comparable(other.dtype)):
        if one.dtype != other.dtype:
            return Distance(one.numel(), torch.inf, torch.inf)
        size = one.dtype.itemsize
        pairs = (part.view(torch.uint8).view(-1, size) for part in (one, other))
        num_different = int(torch.ne(*pairs).any(dim=1).sum())
        return Distance(num_different, torch.inf, torch.inf)
    if not any(part.dtype.is_floating_point or part.dtype.is_complex for part in (one, other)):
        return _of_integers(one, other, rtol, atol)
    kind = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    one, other = one.to(kind), other.to(kind)
    equal = (one == other) | (one.isnan() & other.isnan())
    one, other = one[~equal], other[~equal]
    apart = (one - other).abs()
    # Inf - inf is NaN, as is everything with a NaN: these values are unequal, so infinitely far.
    apart.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    return _measured(apart, torch.maximum(one.abs(), other.abs()), rtol, atol)


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _of_integers(one: torch.Tensor, other: torch.Tensor, rtol: float, atol: float) -> Distance:
    """Compare exactly, also where float64 would round: differences are 64-bit integers."""
    if (one.dtype == torch.uint64) != (other.dtype == torch.uint64):
        one, other = one.to(torch.float64), other.to(torch.float64)  # no integer holds both
        unequal = one != other
        one, other = one[unequal], other[unequal]
        return _measured((one - other).abs(), torch.maximum(one.abs(), other.abs()), rtol, atol)
    is_unsigned = one.dtype == torch.uint64
    if is_unsigned:
        one, other = one.view(torch.int64), other.view(torch.int64)
    one, other = one.to(torch.int64), other.to(torch.int64)
    unequal = one != other
    one, other = one[unequal], other[unequal]
    # With the highest bit turned over, unsigned numbers have the order of signed ones.
    flip = _LOWEST if is_unsigned else 0
    is_more = (one ^ flip) > (other ^ flip)
    apart = _unsigned(torch.where(is_more, one - other, other - one))
    if is_unsigned:
        return _measured(apart, torch.maximum(_unsigned(one), _unsigned(other)), rtol, atol)
    magnitudes = torch.maximum(one.to(torch.float64).abs(), other.to(torch.float64).abs())
    return _measured(apart, magnitudes, rtol, atol)


def _unsigned(values: torch.Tensor) -> torch.Tensor:
    """Return int64 values, read as unsigned numbers, in float64."""
    wide = values.to(torch.float64)
    return torch.where(values < 0, wide + 2.0**64, wide)


def _measured(apart: torch.Tensor, magnitudes: torch.Tensor, rtol: float, atol: float) -> Distance:
    """apart: the distances of unequal values; magnitudes: the larger one of each pair."""
    if not apart.numel():
        return Distance()
    relative = (apart / magnitudes).nan_to_num_(nan=torch.inf, posinf=torch.inf)
    is_close = apart <= atol + rtol * magnitudes
    is_close &= apart.isfinite()
    return Distance(int((~is_close).sum()), float(apart.max()), float(relative.max()))
