"""``DistributedDataParallel(...)`` becomes ``FullyShardedDataParallel(...)``."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from .new_imports import Imports
from .places import Places
from .source import Source, code_of, expression

DDP = {
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel",
}
FSDP_CLASS = "fsdp_compat.FullyShardedDataParallel"
_TORCHS = "torch.distributed.fsdp"
SAME_CLASS = (
    *(FSDP_CLASS, "fsdp_compat.fully_sharded_data_parallel.FullyShardedDataParallel"),
    f"{_TORCHS}.FullyShardedDataParallel",
    f"{_TORCHS}.fully_sharded_data_parallel.FullyShardedDataParallel",
)

# The parameters of DistributedDataParallel, in their order.
_ORDER = (
    *("module", "device_ids", "output_device", "dim", "broadcast_buffers", "init_sync"),
    *("process_group", "bucket_cap_mb", "find_unused_parameters", "check_reduction"),
    *("gradient_as_bucket_view", "static_graph"),
)
# How DDP reduces gradients: without a meaning where they are sharded.
_DROPPED = {
    *("dim", "broadcast_buffers", "bucket_cap_mb", "find_unused_parameters", "check_reduction"),
    *("gradient_as_bucket_view", "static_graph", "skip_all_reduce_unused_params"),
}
_KEPT = {"module", "process_group", "device_mesh"}


class Wrapping:
    """All uses of the class in a file: constructions first, then tests of types."""

    def __init__(self, source: Source, places: Places, imports: Imports) -> None:
        self._source, self._places, self._imports = source, places, imports
        self._uses = [chain for chain in source.chains if source.imported(chain) & DDP]
        self._all_are_rewritten = bool(self._uses)
        self._replaced: set[cst.CSTNode] = set()
        self.calls: list[cst.Call] = []

    def find(self) -> None:
        """Decide which constructions can be rewritten, and follow the models."""
        self._follow_fsdp()
        for use in self._uses:
            call = self._source.parent(use)
            if not isinstance(call, cst.Call) or call.func is not use:
                continue
            arguments = self._arguments(call) if self._is_only(use) else None
            if arguments is None:
                self._all_are_rewritten = False
                continue
            model = self._places.add_wrap(call, _module_of(call))
            self.calls.append(call)
            self._rewrite(use, call, arguments)
            if model is None:
                self._source.note(
                    call,
                    "the wrapped model",
                    "it is returned or stored here, and what is done with it then was not followed",
                    "look at its optimizer, saving and loading",
                )

    def _is_only(self, use: cst.CSTNode) -> bool:
        """True if the name can mean nothing but torch's class."""
        others = self._source.imported(use) - DDP
        if others:
            self._source.leave(
                use,
                code_of(use),
                f"it may also be {', '.join(sorted(others))}",
                "import one class only, and run again",
            )
        return not others

    def _follow_fsdp(self) -> None:
        """Follow models that are FSDP already: some ranks alone must not save them either."""
        for call in self._source.all(cst.Call):
            if self._source.imported(call.func) & set(SAME_CLASS):
                self._places.add_wrap(call, _module_of(call), is_fsdp=True)

    def _arguments(self, call: cst.Call) -> list[cst.Arg] | None:
        """Return the arguments for FullyShardedDataParallel; None if one has no equivalent."""
        new: list[cst.Arg] = []
        given: dict[str, cst.BaseExpression] = {}
        for number, argument in enumerate(call.args):
            if argument.star:
                self._refuse(call, code_of(argument), "it is not known what is in it")
                return None
            name = _keyword(argument) or (_ORDER[number] if number < len(_ORDER) else "")
            given[name] = argument.value
            made = self._argument(call, name, argument, given)
            if made is None:
                return None
            new += made
        if "module" not in given:
            self._refuse(call, code_of(call), "it has no module")
            return None
        if "init_sync" not in given:
            new.append(_arg("sync_module_states", expression("True")))
        new.append(_arg("use_orig_params", expression("True")))
        return new

    def _argument(
        self,
        call: cst.Call,
        name: str,
        argument: cst.Arg,
        given: dict[str, cst.BaseExpression],
    ) -> list[cst.Arg] | None:
        value, text = argument.value, code_of(argument.value)
        if name == "module":
            return [argument]
        if name in _KEPT:
            return [_arg(name, value)]
        if name == "device_ids":
            device = _only_element(value)
            if device is None:
                self._refuse(call, f"device_ids={text}", "it is not a list of one device")
                return None
            return [] if code_of(device) == "None" else [_arg("device_id", device)]
        if name == "output_device":
            first = _only_element(given["device_ids"]) if "device_ids" in given else None
            if text == "None" or (first is not None and code_of(first) == text):
                return []
            self._refuse(call, f"output_device={text}", "the output stays where it is computed")
            return None
        if name == "init_sync":
            return [_arg("sync_module_states", value)] if text != "False" else []
        if name in _DROPPED:
            return []
        self._refuse(
            call, f"{name or text}={text}", "FullyShardedDataParallel has no such argument"
        )
        return None

    def _refuse(self, call: cst.Call, what: str, why: str) -> None:
        self._source.leave(call, what, why, "wrap this model by hand; it was left with DDP")

    def _rewrite(self, use: cst.CSTNode, call: cst.Call, arguments: Sequence[cst.Arg]) -> None:
        name = self.fsdp(use)
        self._replaced.add(use)
        kept = {id(argument): number for number, argument in enumerate(call.args)}

        def change(now: cst.Call) -> cst.Call:
            made = [now.args[kept[id(each)]] if id(each) in kept else each for each in arguments]
            return now.with_changes(func=expression(name), args=_spaced(now, made))

        self._source.edit(call, change)
        buffers = next((a for a in call.args if _keyword(a) == "broadcast_buffers"), None)
        advice = "pass auto_wrap_policy=ModuleWrapPolicy({Block}) to gather one block at a time"
        if buffers is None or code_of(buffers.value) != "False":
            advice += (
                "; use SyncBatchNorm if batch norms are in it: buffers are not broadcast again"
            )
        self._source.note(call, "the wrapped model", "it is one unit, gathered as a whole", advice)

    def fsdp(self, use: cst.CSTNode) -> str:
        """Return the name of our class in this file."""
        return self._imports.name_for(
            FSDP_CLASS, ("FSDP", "FullyShardedDataParallel"), SAME_CLASS, use
        )

    def rewrite_tests(self) -> None:
        """Rewrite tests of types and annotations, if no model of the file stays with DDP."""
        for use in self._uses:
            if use in self._replaced:
                continue
            parent = self._source.parent(use)
            if isinstance(parent, cst.AssignTarget) or (
                isinstance(parent, cst.Call) and parent.func is use
            ):
                continue
            if self.calls and self._all_are_rewritten and self._is_test(use):
                self._source.replace(use, self.fsdp(use))
                self._replaced.add(use)
            elif self.calls:
                self._source.leave(
                    use,
                    code_of(use),
                    "it is not known whether this means a model that was rewritten",
                    f"compare with, or add, {self.fsdp(use)}",
                )
        for use in self._uses:
            if use in self._replaced and isinstance(use, cst.Name):
                self._imports.release(use, self._replaced)

    def _is_test(self, use: cst.CSTNode) -> bool:
        for outer in self._source.above(use):
            if isinstance(outer, cst.Annotation | cst.Comparison | cst.ComparisonTarget):
                return True
            if isinstance(outer, cst.Call):
                return code_of(outer.func) in ("isinstance", "issubclass")
            if isinstance(outer, cst.BaseSmallStatement | cst.BaseCompoundStatement):
                return False
        return False


def _module_of(call: cst.Call) -> cst.BaseExpression | None:
    first = next((each.value for each in call.args if each.keyword is None), None)
    return next((each.value for each in call.args if _keyword(each) == "module"), first)


def _keyword(argument: cst.Arg) -> str | None:
    return argument.keyword.value if argument.keyword is not None else None


def _arg(name: str, value: cst.BaseExpression) -> cst.Arg:
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    return cst.Arg(value, keyword=cst.Name(name), equal=equal)


def _only_element(value: cst.BaseExpression) -> cst.BaseExpression | None:
    """Return x of [x], of None, and of ``[x] if ... else None``."""
    if isinstance(value, cst.IfExp):
        body, orelse = _only_element(value.body), _only_element(value.orelse)
        if body is None or orelse is None:
            return None
        return value.with_changes(body=body, orelse=orelse)
    if isinstance(value, cst.List | cst.Tuple) and len(value.elements) == 1:
        only = value.elements[0]
        return only.value if isinstance(only, cst.Element) else None
    return value if code_of(value) == "None" else None


def _spaced(call: cst.Call, arguments: Sequence[cst.Arg]) -> list[cst.Arg]:
    """Give arguments the commas and line ends that the call had; comments stay where they were."""
    last = call.args[-1]
    between = _without_comment(call.args[0].comma if len(call.args) > 1 else None)
    spaced = []
    for each in arguments[:-1]:
        own = each.comma
        keeps_own = isinstance(own, cst.Comma) and each is not last
        comma = own if keeps_own and type(_space(own)) is type(_space(between)) else between
        nothing = cst.SimpleWhitespace("")
        spaced.append(each.with_changes(comma=comma, whitespace_after_arg=nothing))
    end = arguments[-1].with_changes(
        comma=last.comma, whitespace_after_arg=last.whitespace_after_arg
    )
    return [*spaced, end]


def _space(comma: object) -> object:
    return comma.whitespace_after if isinstance(comma, cst.Comma) else None


def _without_comment(comma: object) -> cst.Comma:
    """Return the space between two arguments: one, or a new line as after ``comma``."""
    space = _space(comma)
    if not isinstance(space, cst.ParenthesizedWhitespace):
        return cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    plain = space.first_line.with_changes(whitespace=cst.SimpleWhitespace(""), comment=None)
    return cst.Comma(whitespace_after=space.with_changes(first_line=plain, empty_lines=()))
