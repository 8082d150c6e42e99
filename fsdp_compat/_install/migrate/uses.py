"""Other uses of wrapped models: clipping, scalers, the module inside, what FSDP does not have."""

from __future__ import annotations

import functools

import libcst as cst

from .new_imports import Imports
from .places import Found, Kind, Places
from .source import Source, code_of, dotted, expression
from .state import State
from .wrapping import Wrapping

_CLIP = {"torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_"}
_SCALER = "fsdp_compat.sharded_grad_scaler.ShardedGradScaler"
_SAME_SCALER = (_SCALER, "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler")
_SCALERS = {
    "torch.GradScaler": None,
    "torch.amp.GradScaler": None,
    "torch.amp.grad_scaler.GradScaler": None,
    "torch.cpu.amp.GradScaler": "cpu",
    "torch.cuda.amp.GradScaler": "cuda",
    "torch.cuda.amp.grad_scaler.GradScaler": "cuda",
}
# Methods of nn.Module that do the same for the wrapped model, and those that need no parameters.
_OF_BOTH = {"eval", "parameters", "train", "zero_grad", "requires_grad_"}
_HARMLESS = {
    *("buffers", "children", "extra_repr", "get_submodule", "modules", "named_buffers"),
    *("named_children", "named_modules", "named_parameters", "register_forward_hook"),
    *("register_forward_pre_hook", "load_state_dict", "state_dict"),
}
# Attributes and methods of a parameter that depend on its elements.
_READ = {
    *("abs", "add_", "clone", "copy_", "data", "detach", "grad", "lerp_", "mul_", "norm", "sum"),
    *("item", "mean", "max", "min", "pow", "square", "flatten", "view"),
}
_OF_DDP = {
    "_set_static_graph": "this is DDP's, without a meaning here; remove it",
    "_set_ddp_runtime_logging_sample_rate": "this is DDP's, without a meaning here; remove it",
    "_register_fused_optim": "this is DDP's; step the optimizer after backward",
    "_register_buffer_comm_hook": "this is DDP's; broadcast the buffers by hand",
    "join": "this is DDP's; give all ranks the same number of batches",
    "reducer": "this is DDP's; there is no such object here",
    "register_comm_hook": "other hooks are expected here; see register_comm_hook of "
    "FullyShardedDataParallel, and mixed_precision=MixedPrecision(reduce_dtype=...)",
    "require_backward_grad_sync": "this is DDP's; accumulate inside no_sync()",
    "will_sync_module_buffers": "this is DDP's; remove it",
}
_NOT_HERE = {
    "torch.nn.DataParallel": "one process with several devices; start one process per device",
    "torch.nn.parallel.DataParallel": "one process with several devices; start one process per "
    "device",
    "torch.distributed.algorithms.Join": "it joins DDP models; give all ranks as many batches",
    "torch.distributed.algorithms.join.Join": "it joins DDP models; give all ranks as many batches",
    "torch.distributed.optim.ZeroRedundancyOptimizer": "FSDP shards optimizer state itself; use "
    "the optimizer in it",
}
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"


class Uses:
    def __init__(
        self, source: Source, places: Places, imports: Imports, state: State, wrapping: Wrapping
    ) -> None:
        self._source, self._places, self._imports = source, places, imports
        self._state, self._wrapping = state, wrapping

    def rewrite(self) -> None:
        self._scalers()
        clips = [c for c in self._source.all(cst.Call) if self._source.imported(c.func) & _CLIP]
        replaced: set[cst.CSTNode] = {call.func for call in clips if self._clip(call)}
        for call in clips:
            if call.func in replaced and isinstance(call.func, cst.Name):
                self._imports.release(call.func, replaced)
        for node in self._source.all(cst.Name, cst.Attribute):
            if not isinstance(node, cst.Name | cst.Attribute) or self._is_keyword(node):
                continue
            found = self._places.find(node)
            if found is not None and found.kind is Kind.INNER and not found.model.is_fsdp:
                self._inner(node, found)
            elif found is not None and found.kind is Kind.WRAPPED:
                self._wrapped(node, found)
        self._absent()

    def _is_keyword(self, node: cst.CSTNode) -> bool:
        parent = self._source.parent(node)
        return isinstance(parent, cst.Arg) and parent.keyword is node

    # -- clipping

    def _clip(self, call: cst.Call) -> bool:
        """Call the model's own method, if the call can be moved there."""
        names = ("parameters", "max_norm", "norm_type", "error_if_nonfinite", "foreach")
        given = {
            argument.keyword.value if argument.keyword is not None else names[number]: argument
            for number, argument in enumerate(call.args[: len(names)])
        }
        first = given.get("parameters")
        value = first.value if first is not None else None
        if (
            not isinstance(value, cst.Call)
            or not isinstance(value.func, cst.Attribute)
            or value.func.attr.value != "parameters"
            or value.args
        ):
            return False  # torch's own function takes sharded gradients into account
        found = self._places.find(value.func.value)
        if found is None or found.kind is Kind.OPTIMIZER or not found.is_certain:
            return False
        if found.model.is_fsdp:
            return False
        model = self._places.model_text(found.model, call)
        rest = [name for name in given if name in ("error_if_nonfinite", "foreach")]
        if rest or model is None or any(argument.star for argument in call.args):
            self._source.leave(
                call,
                code_of(call.func),
                f"the model's own clip_grad_norm_ has no {' and no '.join(rest) or 'such call'}",
                "keep it, as torch's function works on wrapped models, or call the model's",
            )
            return False
        func = expression(f"{model}.clip_grad_norm_")
        position = next(n for n, argument in enumerate(call.args) if argument is first)
        self._state.collective(call, code_of(call))
        self._source.edit(
            call,
            lambda it: it.with_changes(
                func=func, args=[a for n, a in enumerate(it.args) if n != position]
            ),
        )
        return True

    # -- scalers

    def _scalers(self) -> None:
        if not self._wrapping.calls:
            return
        uses = [c for c in self._source.chains if self._source.imported(c) & _SCALERS.keys()]
        replaced: set[cst.CSTNode] = set()
        for use in uses:
            name = self._imports.name_for(_SCALER, ("ShardedGradScaler",), _SAME_SCALER, use)
            call = self._source.parent(use)
            device = next(_SCALERS[n] for n in self._source.imported(use) if n in _SCALERS)
            if isinstance(call, cst.Call) and call.func is use and device is not None:
                self._source.edit(call, functools.partial(_with_device, device))
            self._source.replace(use, name)
            replaced.add(use)
        for use in uses:
            if isinstance(use, cst.Name):
                self._imports.release(use, replaced)

    # -- models

    def _wrapped(self, node: cst.Name | cst.Attribute, found: Found) -> None:
        parent = self._source.parent(node)
        if isinstance(parent, cst.Call) and parent.func is node:
            if found.is_certain:
                self._state.collective(parent, f"{code_of(node)}(...)")
        elif isinstance(parent, cst.Attribute) and not found.model.is_fsdp:
            self._attribute(parent)
        elif not found.model.is_fsdp and self._is_stored(parent):
            self._source.note(
                node,
                "the wrapped model",
                "it is returned or stored here, and what is done with it then was not followed",
                "look at its optimizer, saving and loading",
            )

    def _is_stored(self, parent: cst.CSTNode) -> bool:
        """True where a model goes to a place that is not a variable."""
        if isinstance(parent, cst.Assign):
            return any(isinstance(each.target, cst.Subscript) for each in parent.targets)
        if isinstance(parent, cst.Element):
            above = self._source.nearest(parent, cst.Call, cst.Comparison, cst.Return, cst.Assign)
            return isinstance(above, cst.Return | cst.Assign)
        return isinstance(parent, cst.Return | cst.DictElement)

    def _attribute(self, node: cst.Attribute) -> None:
        name = node.attr.value
        if name in _OF_DDP:
            why, _, fix = _OF_DDP[name].partition("; ")
            self._source.leave(node, code_of(node), why, fix)
        elif name in ("parameters", "named_parameters"):
            self._values(node)

    def _values(self, node: cst.Attribute) -> None:
        """Report a loop over parameters that reads their values or gradients."""
        loop = self._source.nearest(node, cst.For, cst.CompFor)
        if not isinstance(loop, cst.For | cst.CompFor):
            return
        if not self._source.inside(node, loop.iter):
            return
        targets = {
            name.value
            for name in self._source.all(cst.Name)
            if self._source.inside(name, loop.target)
        }
        body = loop if isinstance(loop, cst.For) else self._source.parent(loop)
        for chain in self._source.chains:
            first, *rest = (dotted(chain) or "").split(".")
            if first in targets and _READ & set(rest) and self._source.inside(chain, body):
                self._source.leave(
                    node,
                    f"{dotted(chain)}",
                    "outside of forward and backward this is the part of this rank",
                    "sum over the ranks, or read inside FSDP.summon_full_params(model, "
                    "with_grads=True)",
                )
                return

    def _inner(self, node: cst.Name | cst.Attribute, found: Found) -> None:
        parent = self._source.parent(node)
        model = self._places.model_text(found.model, node) if found.is_certain else None
        if isinstance(parent, cst.Call) and parent.func is node:
            if model is not None and self._state.collective(parent, f"{code_of(node)}(...)"):
                self._source.replace(node, model)
            return
        if not isinstance(parent, cst.Attribute):
            self._inner_value(node, parent)
            return
        name, call = parent.attr.value, self._source.parent(parent)
        is_call = isinstance(call, cst.Call) and call.func is parent
        if not is_call or name in _HARMLESS:
            return
        if name == "forward" and model is not None:
            assert isinstance(call, cst.Call)
            if self._state.collective(call, f"{code_of(parent)}(...)"):
                self._source.replace(parent, model)
        elif name in _OF_BOTH and model is not None:
            if self._is_bare(node):
                return
            text = f"{model}.{name}"
            self._source.edit(parent, lambda _: expression(text))
        elif name not in _OF_BOTH:
            self._source.leave(
                parent,
                f"{code_of(parent)}(...)",
                "a method of the module inside may need parameters that are sharded",
                f'call register_fsdp_forward_method(model, "{name}") once, then model.{name}(...)'
                " on all ranks",
            )

    def _is_bare(self, node: cst.CSTNode) -> bool:
        """True for the variable that was wrapped, and not for ``model.module``."""
        return not (isinstance(node, cst.Attribute) and node.attr.value == "module")

    def _inner_value(self, node: cst.CSTNode, parent: cst.CSTNode) -> None:
        """Report where the module inside goes to another place."""
        if isinstance(parent, cst.Arg):
            call = self._source.parent(parent)
            called = code_of(call.func) if isinstance(call, cst.Call) else ""
            if called in ("hasattr", "getattr", "isinstance", "type", "id", "print", "len"):
                return
            self._source.leave(
                node,
                f"{called}({code_of(node)})",
                "the module inside is passed on, where its parameters are sharded",
                "pass the wrapped model",
            )
        elif isinstance(parent, cst.Return):
            self._source.leave(
                node,
                f"return {code_of(node)}",
                "the module inside is returned, and its parameters are sharded",
                "return the wrapped model",
            )

    # -- what there is no equivalent for

    def _absent(self) -> None:
        if not self._wrapping.calls:
            return
        for chain in self._source.chains:
            for name in self._source.imported(chain):
                call = self._source.parent(chain)
                if name in _NOT_HERE and isinstance(call, cst.Call) and call.func is chain:
                    why, _, fix = _NOT_HERE[name].partition("; ")
                    self._source.leave(chain, dotted(chain) or name, why, fix)
                elif name.startswith(_HOOKS):
                    self._source.leave(
                        chain,
                        dotted(chain) or name,
                        "hooks of DDP reduce whole gradients",
                        "use mixed_precision=MixedPrecision(reduce_dtype=...), or a hook of "
                        "torch.distributed.algorithms._comm_hooks.default_hooks",
                    )


def _with_device(device: str, call: cst.Call) -> cst.Call:
    """Name the device, which comes first, and give a scale that came first its name."""
    args = list(call.args)
    names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    for number, argument in enumerate(args):
        if argument.keyword is None and not argument.star and number < len(names):
            args[number] = argument.with_changes(keyword=cst.Name(names[number]), equal=equal)
    if device == "cuda":
        return call.with_changes(args=args)
    first = cst.Arg(cst.SimpleString(f'"{device}"'))
    if args:
        first = first.with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
    return call.with_changes(args=[first, *args])
