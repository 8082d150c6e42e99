"""Gradient scaling for sharded training: a non-finite gradient on one rank counts for all ranks.

Each rank has only shards of the gradients. If one shard has a non-finite number, every rank must
skip the step and shrink the scale, or the ranks diverge. ``torch.amp.GradScaler`` does everything
else. The ranks agree in ``_unscale_grads_``, the one method that every check of gradients uses, so
every path through ``step`` is covered."""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from ._comm.communicator import max_in_group
from ._comm.mesh import is_in_python
from ._state.optim_contents import CompositeOptimizer
from .errors import StateError, UsageError, truth, unusable, wrong_type

__all__ = ["ShardedGradScaler"]

_Outputs = TypeVar(
    "_Outputs", torch.Tensor, list[torch.Tensor], tuple[torch.Tensor, ...], Iterable[torch.Tensor]
)
_INFINITE = 2.0**128  # first value beyond float32, the dtype of the scale


class ShardedGradScaler(GradScaler):
    """Scale losses so that small gradients survive float16; all ranks skip a step together.

    They skip it if one rank has a non-finite gradient.

        scaler = ShardedGradScaler()
        for x in batches:
            optimizer.zero_grad()
            scaler.scale(loss(model(x))).backward()
            scaler.unscale_(optimizer)  # only needed to clip or read gradients
            scaler.step(optimizer)
            scaler.update()

    It is a ``torch.amp.GradScaler``, except that gradients may be float16 and that ``scale`` keeps
    the dtype of its input. Ranks with empty shards, or without gradients, take part like any other.

    Collective: all ranks of the process group call ``unscale_`` and ``step`` in the same order; one
    all-reduce of 4 bytes for each optimizer and step, none if the group has one rank. The
    constructor and the other methods send nothing.

    Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2 (loss scaling).

    Args:
        device: device type of the losses. "cuda" on a machine without CUDA disables the scaler,
            with a warning.
        init_scale: initial scale, > 0.
        backoff_factor: factor between 0 and 1 by which ``update`` multiplies the scale after a
            skipped step.
        growth_factor: factor > 1 by which ``update`` multiplies the scale after ``growth_interval``
            steps in a row that were not skipped.
        growth_interval: number of steps.
        enabled: if False, ``step`` calls the optimizer, all else does nothing, and nothing is sent.
        process_group: the ranks that agree on a step: all that hold shards of the parameters. None:
            the default group, looked up on first use, so the scaler may be created before
            ``init_process_group``.

    Raises:
        UsageError: an argument of the wrong type or out of range, or a process group without this
            process."""

    process_group: dist.ProcessGroup | None  # None: the default group

    # Private parts of the base class in use: `_scale`, None before the first scale(), and
    # `_lazy_init_scale_growth_tracker`, which creates it, because the base class copies the scale
    # to other devices without waiting for the copy; and `_unscale_grads_`, overridden because both
    # unscale_() and the check for fused optimizers go through it.

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        enabled = truth("enabled", enabled, "ShardedGradScaler")
        if enabled:
            _refuse_number("init_scale", init_scale, "a finite factor > 0", 0, _INFINITE)
            _refuse_number("backoff_factor", backoff_factor, "0 < factor < 1", 0, 1)
            _refuse_number("growth_factor", growth_factor, "a finite factor > 1", 1, math.inf)
            steps = "a whole number of steps > 0"
            _refuse_number("growth_interval", growth_interval, steps, 0, math.inf, Integral)
            _refuse_group(process_group)
        super().__init__(
            _device_type(device),
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.process_group = process_group

    def scale(self, outputs: _Outputs) -> _Outputs:
        """Multiply a loss, or all losses in nested iterables, by the scale.

        Args:
            outputs: a floating-point tensor, or an iterable of such. Each keeps its dtype.

        Returns:
            The scaled losses. Lists and tuples, including named ones, keep their type; other
            iterables become iterators. A disabled scaler returns its input. The scale is on the
            device of the first scaled tensor.

        Raises:
            UsageError: ``outputs`` is neither a floating-point tensor nor an iterable of such."""
        return self._scaled(outputs) if self.is_enabled() else outputs

    def _scaled(self, outputs: Any) -> Any:
        if isinstance(outputs, torch.Tensor) and (
            outputs.is_floating_point() or outputs.is_complex()
        ):
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(outputs.device)
            assert self._scale is not None
            return (outputs * self._scale.to(outputs.device)).to(outputs.dtype)
        if isinstance(outputs, Iterable) and not isinstance(
            outputs, (str, bytes, Mapping, torch.Tensor)
        ):
            scaled = map(self._scaled, outputs)
            if isinstance(outputs, (list, tuple)):
                make = getattr(outputs, "_make", type(outputs))  # of a named tuple
                return make(scaled)
            return scaled
        raise UsageError.of(
            "outputs cannot be scaled.",
            expected="a floating-point tensor, or a nested iterable of such",
            got=f"a tensor of {outputs.dtype}"
            if isinstance(outputs, torch.Tensor)
            else f"a {type(outputs).__name__}",
            where="ShardedGradScaler.scale(outputs)",
            fix="pass the loss, for example output['loss'] of a model's output",
        )

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide an optimizer's gradients by the scale, in place, and check them on all ranks.

        Call it at most once per optimizer and step, between backward and ``step``, for example to
        clip; otherwise ``step`` does it.

        Collective: all ranks of the process group.

        Args:
            optimizer: the optimizer whose gradients are divided.

        Raises:
            StateError: nothing was scaled yet, or there is no process group.
            UsageError: ``optimizer`` is not an optimizer.
            RuntimeError: a second call, or a call after ``step``, since the last ``update``."""
        self._refuse_call("unscale_", optimizer)
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Call ``optimizer.step`` with unscaled gradients, or skip it on all ranks.

        It is skipped if any gradient of this optimizer is non-finite on any rank. A fused optimizer
        is always called and skips internally. Closures are not supported.

        Collective: all ranks of the process group, unless ``unscale_`` was called for this
        optimizer.

        Args:
            optimizer: the optimizer to call.
            *args: arguments of its ``step``.
            **kwargs: keyword arguments of its ``step``.

        Returns:
            What ``optimizer.step`` returns; None if it was skipped.

        Raises:
            StateError: nothing was scaled yet, or there is no process group.
            UsageError: ``optimizer`` is not an optimizer.
            RuntimeError: a closure, or a second ``step`` of this optimizer since the last
                ``update``."""
        self._refuse_call("step", optimizer)
        scale = self._scale if self.is_enabled() else None
        away = scale is not None and scale.device.type != "cpu" and _has_cpu_gradients(optimizer)
        composite = isinstance(optimizer, CompositeOptimizer)
        with _as_unfused(optimizer) if away or composite else contextlib.nullcontext():
            return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Shrink the scale after a skipped step; grow it after enough steps without one.

        It shrinks if a step was skipped since the last update, and grows after ``growth_interval``
        steps in a row that were not.

        Args:
            new_scale: a factor > 0, or a tensor [1] or [], that becomes the scale instead; the same
                on all ranks. Its value is read, which waits for a tensor on an accelerator.

        Raises:
            StateError: nothing was scaled yet.
            UsageError: ``new_scale`` is neither."""
        self._refuse_call("update")
        if new_scale is not None and self.is_enabled():
            new_scale = _checked_scale(new_scale, self._device)
        super().update(new_scale)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Multiply the gradients by ``inv_scale`` []; return [] on its device: 1 if any rank has a
        non-finite gradient, else 0.

        Collective: every rank of the group, with or without gradients."""
        group = self._group()  # may raise: before any change
        device = inv_scale.device
        holder: Any = optimizer
        if isinstance(optimizer, CompositeOptimizer):  # its own parameters have none now
            holder = types.SimpleNamespace(param_groups=[{"params": optimizer.trained}])
        if device.type != "cpu" and _has_cpu_gradients(holder):
            # The base class does not wait for its copies to the CPU.
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        by_device = super()._unscale_grads_(holder, inv_scale, found_inf, True)
        flags = [flag.to(device) for flag in by_device.values()] or [found_inf.to(device)]
        what = "a check for gradients that are not finite"
        return {device: max_in_group(group, torch.stack(flags).amax(), what)}

    def _group(self) -> dist.ProcessGroup:
        group = self.process_group
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is None:
            raise StateError.of(
                "ShardedGradScaler needs a process group.",
                expected="process_group=, or the default process group",
                got="neither",
                where="ShardedGradScaler.unscale_() or .step(), on this process",
                fix="call torch.distributed.init_process_group(...) first, or use "
                "torch.amp.GradScaler on a single process",
            )
        return group

    def _refuse_call(self, method: str, *optimizers: Any) -> None:
        if not self.is_enabled():
            return
        for optimizer in optimizers:
            if getattr(optimizer, "param_groups", None) is None:
                where = f"ShardedGradScaler.{method}"
                raise wrong_type("optimizer", "a torch.optim.Optimizer", optimizer, where)
        if self._scale is None:
            raise StateError.of(
                "No loss was scaled yet.",
                expected="scaler.scale(loss).backward() first",
                got=f"{method}() as the first call",
                where=f"ShardedGradScaler.{method}()",
                fix="call scaler.scale(loss).backward() on every rank, or pass enabled=False "
                "to train without scaling",
            )


def _has_cpu_gradients(optimizer: torch.optim.Optimizer) -> bool:
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
    return any(gradient is not None and gradient.device.type == "cpu" for gradient in gradients)


@contextlib.contextmanager
def _as_unfused(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let the scaler unscale and skip for a fused optimizer: its kernel would not wait for copies
    of the scale and ``found_inf`` from another device. Only a private attribute controls this."""
    attributes = vars(optimizer)
    name = "_step_supports_amp_scaling"
    if not attributes.get(name):
        yield
        return
    attributes[name] = False
    try:
        yield
    finally:
        attributes[name] = True


def _checked_scale(new_scale: float | torch.Tensor, device: str) -> float | torch.Tensor:
    if isinstance(new_scale, torch.Tensor):
        good = (
            new_scale.numel() == 1 and not new_scale.requires_grad and new_scale.is_floating_point()
        )
        good = good and 0 < new_scale.item() < _INFINITE
    else:
        good = isinstance(new_scale, (int, float)) and 0 < new_scale < _INFINITE
    if not good:
        expected = "a finite number > 0, or a floating-point tensor of one, without grad"
        where = "ShardedGradScaler.update"
        raise unusable("new_scale", expected, new_scale, where, "pass the same number on all ranks")
    if isinstance(new_scale, torch.Tensor):
        return new_scale.reshape(()).to(device)
    return float(new_scale)


def _device_type(device: Any) -> str:
    try:
        return torch.device(device).type
    except (RuntimeError, TypeError) as error:
        expected = "a device type, such as 'cuda' or 'cpu'"
        raise wrong_type("device", expected, device, "ShardedGradScaler") from error


def _refuse_number(
    name: str, value: Any, expected: str, low: float, high: float, kind: Any = Real
) -> None:
    if not (isinstance(value, kind) and low < value < high):
        raise UsageError.of(
            f"{name} is out of range.",
            expected=expected,
            got=repr(value),
            where=f"ShardedGradScaler({name}=)",
            fix="leave it out to use the default",
        )


def _refuse_group(group: Any) -> None:
    """Raise UsageError unless ``group`` is None or a process group with this process."""
    if group is None:
        return
    outside = group is dist.GroupMember.NON_GROUP_MEMBER  # new_group returns it on other ranks
    if not outside and not isinstance(group, dist.ProcessGroup):
        expected = "a torch.distributed.ProcessGroup, or None for the default one"
        raise wrong_type("process_group", expected, group, "ShardedGradScaler")
    if outside or (dist.is_initialized() and not is_in_python(group) and dist.get_rank(group) < 0):
        raise UsageError.of(
            "This process is not in the process group.",
            expected="a process group that contains this process",
            got=f"a group without global rank {dist.get_rank()}",
            where="ShardedGradScaler(process_group=)",
            fix="create the scaler only on ranks of the group, or pass the group that the "
            "model is sharded over",
        )
