"""What a function does with a model that it has wrapped: saving, loading, clipping, generating.

Only the function that wraps a model is looked at. Possible uses elsewhere are reported:
the module inside a model, optimizer state, state dicts under a condition."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .new_imports import Imports
from .source import Chain, Function, Source, dotted, last_name
from .wrap_calls import Model, fsdp

_CLIP = {"torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_"}
_OF_BOTH = {"forward", "generate", "load_state_dict", "state_dict"}
# Methods that send nothing, and functions that only look at their arguments.
_LOCAL = {
    *("apply", "buffers", "children", "cpu", "cuda", "eval", "extra_repr", "get_submodule", "half"),
    *("modules", "named_buffers", "named_children", "named_modules", "named_parameters", "no_sync"),
    *("parameters", "register_forward_hook", "register_forward_pre_hook", "requires_grad_", "to"),
    *("train", "zero_grad", "print", "len", "isinstance", "hasattr", "getattr", "type", "id"),
}
_OF_VALUES = {"norm", "item", "sum", "mean", "abs", "max", "min", "square", "pow"}
_NOT_SHARDED = re.compile("sched|scaler|sampler|loader|dataset")  # in names of other objects
_LEAVES = (ast.Return, ast.Continue, ast.Break, ast.Raise)
_MANY = (ast.For, ast.While, ast.If, ast.Try, ast.IfExp, ast.BoolOp, ast.ListComp, ast.DictComp)
_REDUCE = "use mixed_precision=MixedPrecision(reduce_dtype=...), or FSDP's register_comm_hook"
# What a model has with DDP only, and classes that do not know FSDP: what to do.
_OF_DDP = {
    **dict.fromkeys(("_set_static_graph", "_register_fused_optim", "reducer"), "remove it"),
    **dict.fromkeys(("_register_buffer_comm_hook", "will_sync_module_buffers"), "remove it"),
    "_set_ddp_runtime_logging_sample_rate": "remove it",
    "join": "give all ranks the same number of batches",
    "register_comm_hook": _REDUCE,
    "require_backward_grad_sync": "accumulate inside no_sync()",
}
_CLASSES = {
    "DataParallel": "start one process per device",
    "AveragedModel": "use fsdp_compat.optim.EMA(model)",
    "Join": "give all ranks the same number of batches",
    "ZeroRedundancyOptimizer": "use the optimizer in it",
}
_SHAPE = {"dim", "ndim", "ndimension", "shape", "size"}
_PARTS = "a wrapped model's parameters have one dim, that of this rank's part"
_ABOVE = "choose them by shape above the wrapping: use_orig_params=True keeps the objects"
_AVERAGES = "use optim.EMA: inside its swap() the model's state dict has the averages by its names"
_REGISTER = "register_fsdp_forward_method"
_INSIDE = "the module inside a wrapped model has only this rank's part of the parameters"
_ON_ALL = "on all ranks, above any condition"


@dataclass(frozen=True, eq=False)
class _Variable:
    """A variable of a function holds a wrapped model, the module in it, or its optimizer."""

    name: str
    model: Model
    kind: str  # "model", "inner" or "optimizer"
    statement: ast.stmt  # that sets it


class Uses:
    def __init__(self, source: Source, imports: Imports, models: Sequence[Model]) -> None:
        self._source, self._imports = source, imports
        self._variables = [
            _Variable(name, model, kind, model.statement)
            for model in models
            for name, kind in ((model.inner, "inner"), (model.name, "model"))
            if name and model.name
        ]
        self._variables += self._optimizers(models)
        made = [each for each in source.all(ast.Assign) if _is_optimizer(source, each.value)]
        self._optimizer_names = {last_name(each.targets[0]) for each in made}
        self._averages = {
            last_name(each.targets[0])
            for each in source.all(ast.Assign)
            if isinstance(each.value, ast.Call) and last_name(each.value.func) == "AveragedModel"
        }
        self._hoisted: dict[tuple[ast.AST, str], str] = {}  # what a variable above an "if" holds

    def rewrite(self) -> None:
        for chain in self._source.chains:
            call, found = self._source.call_of(chain), self._find(chain)
            if last_name(chain) in ("parameters", "named_parameters") and call is not None:
                self._by_shape(chain, found)
            if found is not None:
                self._known(chain, call, found)
            else:
                self._unknown(chain, call)
        for call in self._source.all(ast.Call):
            self._other_call(call)

    def _other_call(self, call: ast.Call) -> None:
        """Report calls that do not work beside FSDP, and give advice on those that do."""
        what, names = dotted(call.func), self._source.imported(call.func)
        if names & _CLIP and call.func not in self._imports.replaced:
            why = "torch's function also clips sharded gradients if all ranks call it; it can stay"
            self._source.note(call, what, why)
        for name in names:
            fix = _CLASSES.get(name.rpartition(".")[2]) if name.startswith("torch.") else None
            if fix is not None:
                self._source.report(call, what, f"it does not know FSDP; {fix}")
            elif name.startswith("torch.") and name.endswith(".GradScaler"):
                why = "it runs; fsdp_compat.ShardedGradScaler also skips"
                self._source.note(call, what, f"{why} a step on all ranks if one rank has to")
        if isinstance(call.func, ast.Attribute) and not what:
            self._unknown_state(call, call.func.attr, self._source.code(call.func.value))

    # -- variables

    def _optimizers(self, models: Sequence[Model]) -> Iterator[_Variable]:
        """Yield the optimizers of one model, made in the function that wraps it."""
        source = self._source
        for statement in source.all(ast.Assign):
            name, value = dotted(statement.targets[0]), statement.value
            inside = {dotted(each) for each in ast.walk(value)} - {""}
            owners = [
                model
                for model in models
                if model.name and {model.name, model.inner} & inside
                if source.function(statement) is source.function(model.call)
            ]
            if name and len(owners) == 1 and _is_optimizer(source, value):
                if source.span(statement) < source.span(owners[0].call):
                    why = "it is made before its model is wrapped; make it after if it has state"
                    source.note(statement, "the optimizer", why)
                yield _Variable(name, owners[0], "optimizer", statement)

    def _find(self, chain: Chain) -> _Variable | None:
        text = f"{dotted(chain)}."
        found = [each for each in self._variables if text.startswith(f"{each.name}.")]
        return next((each for each in reversed(found) if self._reaches(each, chain)), None)

    def _reaches(self, variable: _Variable, node: ast.AST) -> bool:
        """True if a variable certainly holds its value at a node, and is not set again."""
        source = self._source
        return (
            source.is_below(node, variable.statement)
            and source.is_below(node, variable.model.statement)
            and not any(
                dotted(each) == variable.name
                and not isinstance(each.ctx, ast.Load)
                and source.is_below(each, variable.statement)
                for each in source.chains
            )
        )

    # -- uses of a model, or of its optimizer, where it is known

    def _known(self, chain: Chain, call: ast.Call | None, found: _Variable) -> None:
        rest = dotted(chain)[len(found.name) :].split(".")[1:]
        if rest[-1:] == ["parameters"] and found.kind != "optimizer" and self._clip(call, found):
            return
        if found.kind == "inner":
            self._inside(chain, call, found.model.name, rest, None)
        elif rest and rest[-1] in _OF_DDP:
            why = f"FSDP has no such attribute, or another one; {_OF_DDP[rest[-1]]}"
            self._source.report(chain, dotted(chain), why)
        elif rest[:1] == ["module"]:
            self._inside(chain, call, found.name, rest[1:], found.model)
        elif call is None:
            self._passed(chain)
        elif found.kind == "optimizer":
            self._optimizer_state(call, rest, found)
        elif rest == ["state_dict"]:
            self._save(call, self._source.code(call), found.name)
        elif not rest or rest[-1] not in _LOCAL:
            self._is_on_all_ranks(call, f"{dotted(chain)}(...)")

    def _passed(self, chain: Chain) -> None:
        """Report a model that goes to a function on some ranks only."""
        call = self._source.nearest(chain, ast.Call, ast.stmt)
        if isinstance(call, ast.Call) and last_name(call.func) not in _LOCAL:
            self._is_on_all_ranks(call, f"{self._source.code(call.func)}({dotted(chain)})")

    def _is_on_all_ranks(self, node: ast.AST, what: str, is_saving: bool = False) -> bool:
        """False, with a report, if some ranks may not make a call that all have to make."""
        for test in _conditions_around(self._source, node, is_saving):
            where = f"{self._source.code(test)}, line {self._source.line(test)}"
            why = f"not all ranks may come here ({where}), and all have to; call it {_ON_ALL}"
            self._source.report(node, what, why)
            return False
        return True

    def _by_shape(self, chain: Chain, found: _Variable | None) -> None:
        """Report it if a statement that takes a wrapped model's parameters, or one with what it
        assigns, asks for their shapes; advise on it if the model may be wrapped."""
        source, what, function = self._source, f"{dotted(chain)}()", self._source.function(chain)
        statement = source.nearest(chain, ast.stmt)
        held = last_name(statement.targets[0]) if isinstance(statement, ast.Assign) else None
        statements = {statement} | {
            source.nearest(each, ast.stmt)
            for each in source.chains
            if dotted(each).partition(".")[0] == held and source.function(each) is function
        }
        nodes = [node for each in statements if each is not None for node in ast.walk(each)]
        if not any(isinstance(node, ast.Attribute) and node.attr in _SHAPE for node in nodes):
            return
        if found is not None:
            source.report(chain, what, f"{_PARTS}; {_ABOVE}")
        elif not any(
            dotted(chain).startswith(f"{each.name}.")
            and source.function(each.statement) is function
            for each in self._variables
        ):
            source.note(chain, what, f"if the model is wrapped: {_PARTS}; {_ABOVE}")

    def _clip(self, inner: ast.Call | None, found: _Variable) -> bool:
        """Call the model's own method in the place of torch's function; False if that stays."""
        source = self._source
        call = source.parent(inner) if inner is not None else None
        if not isinstance(call, ast.Call) or not source.imported(call.func) & _CLIP:
            return False
        keywords = {each.arg for each in call.keywords}
        if inner not in call.args or not keywords <= {"max_norm", "norm_type"}:
            return False
        if self._is_on_all_ranks(call, source.code(call)):
            source.replace(call.func, f"{found.model.name}.clip_grad_norm_")
            self._imports.replaced.add(call.func)  # type: ignore[arg-type]
            start, end = source.span(call.args[0])
            comma = re.compile(r"\s*,\s*").match(source.text, end)
            source.edit(start, comma.end() if comma is not None else end, "")
        return True

    # -- state dicts

    def _save(self, call: ast.Call, made: str, owner: str) -> None:
        """Let all ranks make a state dict: above the condition of rank 0 if it stands in one."""
        source, conditions = self._source, list(_conditions_around(self._source, call, True))
        if not conditions:
            source.edit(*source.span(call), made)
            return
        around = source.parent(conditions[0])
        if len(conditions) > 1 or not self._is_hoistable(call, around):
            self._is_on_all_ranks(call, source.code(call), True)
            return
        name, known = f"{owner.rpartition('.')[2].lstrip('_')}_state", self._hoisted
        while name in self._imports.taken or known.get((around, name), made) != made:
            name = f"full_{name}"
        known[around, name] = made
        source.insert_line(around, f"{name} = {made}", after=False)
        source.edit(*source.span(call), name)

    def _is_hoistable(self, call: ast.Call, around: ast.AST) -> bool:
        """True if a call is made exactly once in an ``if`` for rank 0, and can be made above it."""
        above = list(self._source.above(call))
        between = above[: above.index(around)] if around in above else []
        return (
            isinstance(around, ast.If)
            and _is_of_rank0(self._source, around.test)
            and not set(between).isdisjoint(around.body)
            and not any(isinstance(each, _MANY) for each in between)
            and not self._source.code(around).startswith("elif")
            and self._source.own_line(around) is not None
        )

    def _optimizer_state(self, call: ast.Call, rest: list[str], found: _Variable) -> None:
        arguments, model = self._source.arguments(call), found.model.name
        if rest == ["state_dict"]:
            made = f"{fsdp(self._imports)}.optim_state_dict({model}, {found.name})"
            self._save(call, made, found.name)
        elif rest == ["load_state_dict"] and self._is_on_all_ranks(call, self._source.code(call)):
            given = arguments[0]
            value = given.value if isinstance(given, ast.keyword) else given
            start, end = self._source.span(value)
            to_load = f"{fsdp(self._imports)}.optim_state_dict_to_load"
            self._source.edit(start, start, f"{to_load}({model}, {found.name}, ")
            self._source.edit(end, end, ")")

    # -- the module inside of a model

    def _inside(
        self, chain: Chain, call: ast.Call | None, outer: str, rest: list[str], model: Model | None
    ) -> None:
        """Let a use of the module in ``outer`` be one of ``outer``; report it if it is another
        method, or if there is no ``model`` that is known."""
        name, what = rest[-1] if rest else "forward", f"{dotted(chain)}(...)"
        instead = outer if name == "forward" else f"{outer}.{name}"
        if call is None:
            self._inside_value(chain, outer, rest)
        elif name in _LOCAL:
            return
        elif model is None or len(rest) > 1 or name not in _OF_BOTH:
            register = f'call {_REGISTER}({outer}, "{name}") once, then '
            fix = f"{'' if name in _OF_BOTH - {'generate'} else register}call {instead}(...)"
            self._source.report(call, what, f"{_INSIDE}; {fix} {_ON_ALL}")
        elif name == "state_dict":
            start, end = self._source.span(chain)[1], self._source.span(call)[1]
            self._save(call, instead + self._source.text[start:end], outer)
        elif self._is_on_all_ranks(call, what):
            self._source.replace(chain, instead)
            if name == "generate":
                register = self._imports.name_for(f"fsdp_compat.{_REGISTER}", _REGISTER)
                text = f'{register}({model.name}, "generate")'
                self._source.insert_line(model.statement, text, after=True)

    def _inside_value(self, chain: Chain, outer: str, rest: list[str]) -> None:
        """Report where the module inside is passed on, returned, or gets another name."""
        parent = self._source.parent(chain)
        while isinstance(parent, ast.IfExp | ast.keyword | ast.Tuple | ast.List):
            parent = self._source.parent(parent)
        is_call = isinstance(parent, ast.Call) and last_name(parent.func) not in _LOCAL
        if not rest and (is_call or isinstance(parent, ast.Return | ast.Assign | ast.AnnAssign)):
            self._source.report(chain, dotted(chain), f"{_INSIDE}; use {outer} itself")

    # -- what may belong to a model of another function

    def _unknown(self, chain: Chain, call: ast.Call | None) -> None:
        first, *rest = dotted(chain).split(".")
        if rest[-1:] in (["state_dict"], ["load_state_dict"]) and self._averages & {first, *rest}:
            self._source.report(chain, f"{dotted(chain)}(...)", f"{_INSIDE}; {_AVERAGES}")
        elif "module" in rest:
            at = rest.index("module")
            self._inside(chain, call, ".".join([first, *rest[:at]]), rest[at + 1 :], None)
        elif "grad" in rest and rest[-1] in _OF_VALUES:
            why = "outside backward each rank has only its part of a gradient; sum over the ranks"
            self._source.report(chain, dotted(chain), why)
        elif call is not None and rest:
            self._unknown_state(call, rest[-1], ".".join([first, *rest[:-1]]))

    def _unknown_state(self, call: ast.Call, method: str, owner: str) -> None:
        """Report a state dict that may be one of a wrapped model, or of its optimizer."""
        if method not in ("state_dict", "load_state_dict"):
            return
        root = call.func.value if isinstance(call.func, ast.Attribute) else None
        value = self._source.value_of(root) if isinstance(root, ast.Name) else None
        what, name = f"{owner}.{method}(...)", owner.rpartition(".")[2]
        if "optim" in name.lower() or name in {"opt", *self._optimizer_names}:
            fix = f"call FSDP.optim_state_dict(model, {owner}) {_ON_ALL}"
            if method == "load_state_dict":
                fix = f"pass FSDP.optim_state_dict_to_load(model, {owner}, state)"
            why = f"if its model is wrapped, each rank has only its part of the state; {fix}"
            self._source.report(call, what, why)
        elif ".module" in owner:
            self._source.report(call, what, f"{_INSIDE}; call it on the wrapped model")
        elif not isinstance(value, ast.Call) and not _NOT_SHARDED.search(owner.lower()):
            self._is_on_all_ranks(call, what, method == "state_dict")


def _is_optimizer(source: Source, value: ast.AST | None) -> bool:
    names = source.imported(value.func) if isinstance(value, ast.Call) else set()
    others = ("torch.optim.lr_scheduler", "torch.optim.swa_utils")
    return any(name.startswith("torch.optim.") and not name.startswith(others) for name in names)


# -- Conditions that may hold on some ranks only. The rank is whatever is called ``...rank``. For a
# state dict, which programs save on one rank, other conditions count as well, but not comparisons
# that are not with zero: ``if is_main():`` and ``if device == 0:``, but not ``if epoch % 5 == 0:``.


def _conditions_around(source: Source, node: ast.AST, is_saving: bool) -> Iterator[ast.AST]:
    """Yield what may keep some ranks away from a node within its function, the nearest first."""
    child = node
    for outer in source.above(node):
        if isinstance(child, Function):
            return
        before = source.before(child)
        tests = [each for each in before if isinstance(outer, ast.BoolOp)]
        if isinstance(outer, ast.If | ast.IfExp | ast.While) and child is not outer.test:
            tests = [outer.test]
        yield from (test for test in tests if _may_differ(source, test, is_saving))
        ends = [each for each in before if isinstance(each, ast.If)]
        ends = [each for each in ends if isinstance(each.body[-1], _LEAVES)]
        yield from (each.test for each in ends if _may_differ(source, each.test, False))
        child = outer


def _is_of_rank0(source: Source, test: ast.AST | None) -> bool:
    """True for a condition that holds on rank 0 alone, or on the first rank of each host."""
    if isinstance(test, ast.Name):
        return _is_of_rank0(source, source.value_of(test))
    if isinstance(test, ast.UnaryOp):
        return isinstance(test.op, ast.Not) and _is_rank(test.operand)
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq):
        return False
    return _is_rank(test.left) and ast.unparse(test.comparators[0]) == "0"


def _is_rank(node: ast.AST) -> bool:
    name = node.func if isinstance(node, ast.Call) else node
    return last_name(name).lower().endswith("rank")


def _may_differ(source: Source, test: ast.AST, is_saving: bool) -> bool:
    """True if ranks may find different results."""
    values = [source.value_of(each) for each in ast.walk(test) if isinstance(each, ast.Name)]
    if any(_is_rank(each) for value in (test, *filter(None, values)) for each in ast.walk(value)):
        return True
    if isinstance(test, ast.BoolOp):
        return any(_may_differ(source, each, is_saving) for each in test.values)
    if isinstance(test, ast.Compare):
        return is_saving and dotted(test.left) != "" and ast.unparse(test.comparators[0]) == "0"
    return is_saving and not isinstance(test, ast.Constant)
