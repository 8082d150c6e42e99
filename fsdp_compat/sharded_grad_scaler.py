"""Gradient scaling for sharded training: what one rank finds in its shards decides for all ranks.

Each rank sees a part of the gradients only. A non-finite number in one part has to make every rank
skip the step and shrink the scale, or the ranks drift apart. ``torch.amp.GradScaler`` keeps the
whole protocol; the ranks meet in the one method of it through which every look at gradients goes,
so no path of ``step`` goes without."""

from __future__ import annotations

import contextlib
import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any, overload

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from ._comm.communicator import max_in_group
from ._comm.mesh import is_in_python
from .errors import StateError, UsageError, explain, truth, wrong_type

__all__ = ["ShardedGradScaler"]

_INFINITE = 2.0**128  # for a scale, which is a float32


class ShardedGradScaler(GradScaler):
    """Scale losses so that small gradients survive float16, and skip a step on all ranks if one
    rank has a non-finite gradient.

        scaler = ShardedGradScaler()
        for x in batches:
            optimizer.zero_grad()
            scaler.scale(loss(model(x))).backward()
            scaler.unscale_(optimizer)  # only to clip or to look at the gradients
            scaler.step(optimizer)
            scaler.update()

    It is a ``torch.amp.GradScaler`` and used like one, except that gradients may be float16 and
    that ``scale`` returns the dtype that it was given. A rank whose shards are empty, or which has
    no gradients, takes part like any other.

    Args:
        device: type of the device that the losses are on. "cuda" on a machine without CUDA disables
            the scaler, with a warning.
        init_scale: first scale, a factor > 0.
        backoff_factor: the scale is multiplied by it, 0 < factor < 1, by an ``update`` after a step
            that was skipped.
        growth_factor: the scale is multiplied by it, factor > 1, after ``growth_interval`` steps
            without a skipped one.
        growth_interval: number of steps.
        enabled: False makes ``step`` call the optimizer, everything else do nothing, and nothing be
            sent.
        process_group: the ranks that decide together: all that hold parts of the parameters. None:
            the default group, looked up when it is needed, so the scaler may be made before
            ``init_process_group``.

    Raises:
        UsageError: an argument of another type, a number out of its range, or a process group that
            this process does not belong to.

    Collective: ``unscale_`` and ``step``, on every rank of the group, in the same order; one
    all-reduce of 4 bytes for each optimizer and step, none where the group has one rank. The
    constructor and the other methods send nothing.

    Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2, for scaling with a
    scale that adapts.
    """

    process_group: dist.ProcessGroup | None  # None: the default group

    # What is used of the base class beside its public methods: `_scale`, which is None before the
    # first scale(), and its maker `_lazy_init_scale_growth_tracker`, because the base class copies
    # the scale to other devices without waiting for the copy; and `_unscale_grads_`, which is
    # overridden, because unscale_() and the check for fused optimizers meet there and only there.

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
            _refuse_number(
                "growth_interval",
                growth_interval,
                "a whole number of steps > 0",
                0,
                math.inf,
                Integral,
            )
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

    @overload
    def scale(self, outputs: torch.Tensor) -> torch.Tensor: ...

    @overload
    def scale(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]: ...

    @overload
    def scale(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]: ...

    @overload
    def scale(self, outputs: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]: ...

    def scale(
        self, outputs: torch.Tensor | Iterable[torch.Tensor]
    ) -> torch.Tensor | Iterable[torch.Tensor]:
        """Multiply a loss, or all losses in nested iterables, by the scale; each keeps its dtype.

        Lists and tuples, named ones too, come back as what they were, other iterables as iterators.
        A disabled scaler returns what it was given. The scale lives on the device of the first
        tensor that is scaled.

        Raises:
            UsageError: something that is neither a tensor of floating-point numbers nor an iterable
                of such.
        """
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
        raise UsageError(
            explain(
                "This cannot be scaled.",
                expected="a tensor of floating-point numbers, or an iterable of such, which may be "
                "nested",
                got=f"a tensor of {outputs.dtype}"
                if isinstance(outputs, torch.Tensor)
                else f"a {type(outputs).__name__}",
                where="ShardedGradScaler.scale(outputs)",
                fix="pass the loss; of a model's output, the losses in it, for example "
                "output['loss']",
            )
        )

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, in place, and find out whether any
        rank has a non-finite one.

        For clipping, for example, between backward and ``step``; ``step`` does it itself otherwise.
        Once per optimizer and step.

        Collective: every rank of the group.

        Raises:
            StateError: nothing was scaled yet, or there is no process group.
            UsageError: ``optimizer`` is none.
            RuntimeError: the gradients of this optimizer were unscaled, or used, since the last
                ``update``.
        """
        self._refuse_call("unscale_", optimizer)
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Call ``optimizer.step(*args, **kwargs)`` with unscaled gradients and return its result,
        or skip it on all ranks.

        It is skipped if any gradient of this optimizer, on any rank, is not finite. A fused
        optimizer is always called and skips by itself. Closures are not supported.

        Collective: every rank of the group, unless ``unscale_`` was called for this optimizer
        before.

        Raises:
            StateError: nothing was scaled yet, or there is no process group.
            UsageError: ``optimizer`` is none.
            RuntimeError: a second ``step`` of this optimizer since the last ``update``, or a
                closure.
        """
        self._refuse_call("step", optimizer)
        scale = self._scale if self.is_enabled() else None
        away = scale is not None and scale.device.type != "cpu" and _has_cpu_gradients(optimizer)
        with _as_unfused(optimizer) if away else contextlib.nullcontext():
            return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Shrink the scale if a step was skipped on all ranks since the last update; grow it after
        enough steps that were not.

        new_scale: the scale from now on, a factor > 0 or a tensor [1] or [] with one, instead. The
        same on all ranks. Its value is
            read, so a tensor on an accelerator is waited for.

        Raises:
            StateError: nothing was scaled yet.
            UsageError: ``new_scale`` is neither of both.
        """
        self._refuse_call("update")
        if new_scale is not None and self.is_enabled():
            new_scale = _checked_scale(new_scale)
            new_scale = (
                new_scale.reshape(()).to(self._device)
                if isinstance(new_scale, torch.Tensor)
                else new_scale
            )
        super().update(new_scale)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Multiply the gradients by ``inv_scale`` []; return [] on its device: 1 if any rank found
        a non-finite one, else 0.

        Collective: every rank of the group, whatever gradients it has.
        """
        group = self._group()  # before anything is changed
        home = inv_scale.device
        if home.type != "cpu" and _has_cpu_gradients(
            optimizer
        ):  # the base class does not wait for its copies to the CPU
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
        flags = [flag.to(home) for flag in found.values()] or [found_inf.to(home)]
        return {home: max_in_group(group, torch.stack(flags).amax())}

    def _group(self) -> dist.ProcessGroup:
        group = self.process_group
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is None:
            raise StateError(
                explain(
                    "There are no ranks to agree with on a step.",
                    expected="a process group: process_group=, or the default one",
                    got="neither of both",
                    where="ShardedGradScaler.unscale_() or .step(), on this process",
                    fix="call torch.distributed.init_process_group(...) before, or use "
                    "torch.amp.GradScaler on a single process",
                )
            )
        return group

    def _refuse_call(self, method: str, *optimizers: Any) -> None:
        if not self.is_enabled():
            return
        for optimizer in optimizers:
            if getattr(optimizer, "param_groups", None) is None:
                raise wrong_type(
                    "optimizer", "a torch.optim.Optimizer", optimizer, f"ShardedGradScaler.{method}"
                )
        if self._scale is None:
            raise StateError(
                explain(
                    "No loss was scaled yet, so there is no scale to undo or to change.",
                    expected="scaler.scale(loss).backward() before",
                    got=f"{method}() as the first call",
                    where=f"ShardedGradScaler.{method}()",
                    fix="call backward on scaler.scale(loss), on every rank; or pass enabled=False "
                    "to train without scaling",
                )
            )


def _has_cpu_gradients(optimizer: torch.optim.Optimizer) -> bool:
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
    return any(gradient is not None and gradient.device.type == "cpu" for gradient in gradients)


@contextlib.contextmanager
def _as_unfused(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let the scaler do what a fused optimizer otherwise does itself, which is told by a private
    attribute only.

    For gradients on the CPU and a scale elsewhere: the fused kernel would not wait for its copies
    of the scale and of the verdict.
    """
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


def _checked_scale(new_scale: float | torch.Tensor) -> float | torch.Tensor:
    if isinstance(new_scale, torch.Tensor):
        good = (
            new_scale.numel() == 1 and not new_scale.requires_grad and new_scale.is_floating_point()
        )
        good = good and 0 < new_scale.item() < _INFINITE
    else:
        good = isinstance(new_scale, (int, float)) and 0 < new_scale < _INFINITE
    if good:
        return new_scale if isinstance(new_scale, torch.Tensor) else float(new_scale)
    shown = repr(new_scale)
    if isinstance(new_scale, torch.Tensor):
        values = reprlib.repr(new_scale.tolist())
        shown = (
            f"{values}, a tensor {tuple(new_scale.shape)} of {new_scale.dtype}, "
            f"requires_grad={new_scale.requires_grad}"
        )
    raise UsageError(
        explain(
            "This cannot be the scale.",
            expected="a finite number > 0, or a tensor of floats with 1 such element that needs no "
            "gradient",
            got=shown,
            where="ShardedGradScaler.update(new_scale)",
            fix="pass the number, the same on all ranks; or nothing, and the scale adapts by "
            "itself",
        )
    )


def _device_type(device: Any) -> str:
    try:
        return torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise wrong_type(
            "device", "the type of a device, such as 'cuda' or 'cpu'", device, "ShardedGradScaler"
        ) from error


def _refuse_number(
    name: str, value: Any, expected: str, low: float, high: float, kind: Any = Real
) -> None:
    if not (isinstance(value, kind) and low < value < high):
        raise UsageError(
            explain(
                f"The scale cannot be adapted with this {name}.",
                expected=expected,
                got=repr(value),
                where=f"ShardedGradScaler({name}=)",
                fix="leave it out to have the usual one",
            )
        )


def _refuse_group(group: Any) -> None:
    """Raise UsageError for what is no process group, and for one without this process."""
    if group is None:
        return
    outside = (
        group is dist.GroupMember.NON_GROUP_MEMBER
    )  # what new_group returns to ranks that are not in it
    if not outside and not isinstance(group, dist.ProcessGroup):
        raise UsageError(
            explain(
                "Ranks can only agree in a process group.",
                expected="a torch.distributed.ProcessGroup, or None for the default one",
                got=f"a {type(group).__name__}",
                where="ShardedGradScaler(process_group=)",
                fix="pass torch.distributed.new_group(ranks), model.process_group, or "
                "mesh.get_group() of a device mesh",
            )
        )
    if outside or (dist.is_initialized() and not is_in_python(group) and dist.get_rank(group) < 0):
        raise UsageError(
            explain(
                "This process does not belong to the process group it was given.",
                expected="a process group that this process is a member of",
                got=f"a group without global rank {dist.get_rank()}",
                where="ShardedGradScaler(process_group=)",
                fix="make the scaler on the ranks of the group only, or pass the group that the "
                "model is sharded over",
            )
        )
