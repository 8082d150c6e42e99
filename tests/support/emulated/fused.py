"""Operations on several tensors that CUDA runs as one kernel. The emulated device would take them
apart, and so record a kernel for each tensor.

The conditions are those of CUDA's kernels; where they do not hold, CUDA takes the operation apart,
too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.support import emulated

# Told of a kernel and of what it reads and writes, calls the last argument.
Kernel = Callable[[str, Sequence[torch.Tensor], Sequence[torch.Tensor], Callable[[], None]], None]

_LIBRARY = torch.library.Library("aten", "IMPL")
_IN_PLACE = (
    *("_foreach_add_.List", "_foreach_add_.Scalar", "_foreach_mul_.List", "_foreach_mul_.Scalar"),
    *("_foreach_mul_.Tensor", "_foreach_div_.List", "_foreach_div_.Scalar", "_foreach_div_.Tensor"),
)
_OVERWRITING = ("_foreach_copy_", "_foreach_zero_")


@functools.cache
def use(kernel: Kernel) -> None:
    """Run these operations by ``kernel`` from now on."""
    for name in _IN_PLACE:
        _register(name, kernel, _in_place)
    for name in _OVERWRITING:
        _register(name, kernel, _overwriting)
    _register("split_with_sizes_copy.out", kernel, _split)
    _register("_chunk_cat.out", kernel, _concatenation)


# The tensors that are read and written, or None if they are not handled by one kernel.
_Find = Callable[..., tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | None]


def _register(name: str, kernel: Kernel, find: _Find) -> None:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    # This device has no kernel of its own for them, and neither has the CPU.
    apart = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def run(*arguments: Any, **options: Any) -> Any:
        results = []

        def taken_apart() -> None:
            results.append(op.redispatch(apart, *arguments, **options))

        found = find(*arguments, **options)
        if found is None:
            taken_apart()
        else:
            kernel(f"aten::{packet}", *found, taken_apart)
        return results[0]

    _LIBRARY.impl(name, run, "PrivateUse1")


def _in_place(first: Sequence[torch.Tensor], *others: Any, **options: Any) -> Any:
    found = _overwriting(first, *others)
    return found and ([*first, *found[0]], first)


def _overwriting(first: Sequence[torch.Tensor], *others: Any, **options: Any) -> Any:
    lists = [other for other in others if isinstance(other, (list, tuple))]
    if not _are_alike([first, *lists]):
        return None
    return [tensor for tensors in lists for tensor in tensors], first


def _are_alike(lists: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Return whether all tensors are on the device and dense, each list has one dtype, and tensors
    with one index have the same sizes and strides."""
    return all(
        tensor.device.type == emulated.NAME
        and tensor.dtype is tensors[0].dtype
        and _is_dense(tensor)
        and tensor.shape == other.shape
        and tensor.stride() == other.stride()
        for tensors in lists
        for tensor, other in zip(tensors, lists[0], strict=True)
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    found: bool = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return found


def _split(
    whole: torch.Tensor, sizes: Sequence[int], dim: int = 0, *, out: Sequence[torch.Tensor]
) -> Any:
    is_one = whole.is_contiguous() and all(
        part.dtype is whole.dtype and _is_dense(part) for part in out
    )
    return ([whole], out) if is_one else None


def _concatenation(
    tensors: Sequence[torch.Tensor], dim: int, chunks: int, *, out: torch.Tensor
) -> Any:
    """The kernel casts from bf16 to fp32, too."""
    dtypes = {tensor.dtype for tensor in tensors}
    is_one = (
        all(tensor.is_contiguous() for tensor in (*tensors, out))
        and len(dtypes) == 1
        and (dtypes == {out.dtype} or (dtypes, out.dtype) == ({torch.bfloat16}, torch.float32))
    )
    return (tensors, [out]) if is_one else None
