"""Arithmetic on values of any dtype of torch: what is not finite, and how far two values are
apart."""

from __future__ import annotations

import dataclasses
import functools

import torch


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
    kinds = one.dtype, other.dtype
    are_integers = not any(kind.is_floating_point or kind.is_complex for kind in kinds)
    if are_integers and max(kind.itemsize for kind in kinds) == 8:
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
    """Compare as Python's numbers, as neither float64 nor int64 holds all of 64 bits."""
    pairs = zip(one.tolist(), other.tolist(), strict=True)
    unequal = [(abs(a - b), max(abs(a), abs(b))) for a, b in pairs if a != b]
    apart, magnitudes = torch.tensor([*unequal, (0, 0)], dtype=torch.float64)[:-1].T
    return _measured(apart, magnitudes, rtol, atol)


def _measured(apart: torch.Tensor, magnitudes: torch.Tensor, rtol: float, atol: float) -> Distance:
    """apart: the distances of unequal values; magnitudes: the larger one of each pair."""
    if not apart.numel():
        return Distance()
    relative = (apart / magnitudes).nan_to_num_(nan=torch.inf, posinf=torch.inf)
    is_close = apart <= atol + rtol * magnitudes
    is_close &= apart.isfinite()
    return Distance(int((~is_close).sum()), float(apart.max()), float(relative.max()))
