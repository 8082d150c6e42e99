"""Saving and loading: what every rank has to call, every rank calls."""

from __future__ import annotations

import re

import libcst as cst

from .findings import Finding
from .guards import Guard, guards_of, is_plain
from .optimizers import Optimizers
from .places import Found, Kind, Model, Places, unwrapped
from .source import Source, code_of, dotted, expression, root_of, statement
from .wrapping import Wrapping

_NOT_SHARDED = re.compile(r"sched|scaler|sampler|loader|lr_|dataset", re.IGNORECASE)
_MODEL = re.compile(r"model|net\b|module|encoder|decoder|critic|actor", re.IGNORECASE)
_BY_HAND = "call it on all ranks, above the condition, and write the result on one"


class State:
    """Calls of state_dict and load_state_dict, and other calls that all ranks have to make."""

    def __init__(
        self, source: Source, places: Places, optimizers: Optimizers, wrapping: Wrapping
    ) -> None:
        self._source, self._places = source, places
        self._optimizers, self._wrapping = optimizers, wrapping
        self.suspects: list[Finding] = []
        self._collectives: list[tuple[cst.Call, str]] = []
        self._names: dict[tuple[cst.CSTNode, str], str] = {}  # (the if, the call): a variable
        self._taken = {name.value for name in source.all(cst.Name)}
        self._own: set[str] = set()

    def rewrite(self) -> None:
        for call in self._source.all(cst.Call):
            if not isinstance(call.func, cst.Attribute):
                continue
            if call.func.attr.value == "state_dict":
                self._saving(call, call.func.value)
            elif call.func.attr.value == "load_state_dict":
                self._loading(call, call.func.value)

    def collective(self, call: cst.Call, what: str) -> bool:
        """Note a call that all ranks have to make. False, with a report, if some do not."""
        guard = next(guards_of(self._source, call), None)
        if guard is None:
            self._collectives.append((call, what))
            return True
        self._leave_guarded(call, what, guard)
        return False

    def _leave_guarded(self, node: cst.CSTNode, what: str, guard: Guard) -> None:
        line = self._source.line(guard.node)
        why = f"it is called on some ranks only ({guard.text}, line {line}), and all have to"
        self._source.leave(node, what, why, _BY_HAND)

    # -- saving

    def _saving(self, call: cst.Call, receiver: cst.BaseExpression) -> None:
        owner = unwrapped(receiver) or receiver
        found = self._places.find(owner)
        what = code_of(call)
        if found is None:
            self._unknown(call, owner, what)
            return
        if found.model.is_fsdp:
            if found.kind is Kind.WRAPPED and found.is_certain:
                self.collective(call, what)
            return
        model = self._places.model_text(found.model, call)
        if not found.is_certain or model is None:
            self._uncertain(call, what, found.model)
            return
        new = self._new_saving(call, owner, found, model)
        if new is None:
            why = "it gives this rank's part, and has arguments that were not followed"
            self._source.leave(call, what, why, "call FSDP.optim_state_dict(model, optimizer)")
            return
        self._place(call, what, new, found)

    def _uncertain(self, call: cst.Call, what: str, model: Model) -> None:
        why = (
            f"it is not certain that this is the model wrapped in line {model.line}; if it is, all"
            " ranks have to make this call, on the wrapped model"
        )
        fix = (
            "use FSDP.optim_state_dict(model, optimizer) for its optimizer"
            if self._optimizers.is_unknown(root_of(call.func))
            else _BY_HAND
        )
        self._source.leave(call, what, why, fix)

    def _new_saving(
        self, call: cst.Call, owner: cst.BaseExpression, found: Found, model: str
    ) -> str | None:
        if found.kind is Kind.OPTIMIZER:
            if call.args:
                return None
            return f"{self._fsdp(found)}.optim_state_dict({model}, {code_of(owner)})"
        receiver = code_of(owner) if found.kind is Kind.WRAPPED else model
        return code_of(call.with_changes(func=expression(f"{receiver}.state_dict")))

    def _fsdp(self, found: Found) -> str:
        return self._wrapping.fsdp(found.model.calls[0].func)

    def _place(self, call: cst.Call, what: str, new: str, found: Found) -> None:
        guards = list(guards_of(self._source, call))
        if not guards:
            self._collectives.append((call, what))
            if new != what:
                self._source.replace(call, new)
            return
        guard = guards[0]
        if len(guards) > 1 or not guard.is_simple or not self._can_hoist(call, guard):
            self._leave_guarded(call, what, guard)
            return
        assert isinstance(guard.node, cst.If)
        name = self._names.get((guard.node, new))
        if name is None:
            name = self._name_for(found, call, guard.node)
            self._names[guard.node, new] = name
            text = f"{name} = {new}"
            if guard.rest:
                text += f" if {' and '.join(guard.rest)} else None"
            self._source.insert_before(guard.node, lambda: statement(text))
            self._collectives.append((call, what))
        self._source.replace(call, name)

    def _can_hoist(self, call: cst.Call, guard: Guard) -> bool:
        """True if the call can stand above its ``if``: nothing on the way to it changes what it
        gives, and all ranks come to the ``if``."""
        source = self._source
        if source.function(call) is not source.function(guard.node):
            return False
        for outer in source.above(call):
            if outer is guard.node:
                break
            if isinstance(
                outer,
                cst.For
                | cst.While
                | cst.If
                | cst.IfExp
                | cst.Try
                | cst.CompFor
                | cst.BooleanOperation
                | cst.BaseComp,
            ):
                return False
        assert isinstance(guard.node, cst.If)
        for other in source.all(cst.Call):
            before = source.start(other) < source.start(call)
            if before and source.inside(other, guard.node.body):
                last = (dotted(other.func) or "").rpartition(".")[2]
                if last in ("load_state_dict", "step", "backward", "copy_", "train_one_epoch"):
                    return False
        for outer in source.above(guard.node):
            if isinstance(outer, cst.FunctionDef | cst.Lambda):
                break
            is_test = isinstance(outer, cst.If | cst.While) and not self._is_main(outer)
            if isinstance(outer, cst.ExceptHandler) or (
                is_test and not is_plain(source, outer.test)  # type: ignore[attr-defined]
            ):
                return False
        return True

    def _is_main(self, node: cst.If | cst.While) -> bool:
        return "__name__" in code_of(node.test)

    def _name_for(self, found: Found, call: cst.Call, around: cst.CSTNode) -> str:
        assert isinstance(call.func, cst.Attribute)
        text = found.model.key[1] if found.kind is not Kind.OPTIMIZER else code_of(call.func.value)
        wanted = f"{text.rpartition('.')[2].lstrip('_')}_state"
        wanted = wanted if wanted.isidentifier() else "state"
        used = {name for (node, _), name in self._names.items() if node is around}
        while wanted in used or (wanted in self._taken and wanted not in self._own):
            wanted = f"full_{wanted}"
        self._own.add(wanted)
        self._taken.add(wanted)
        return wanted

    def _unknown(self, call: cst.Call, receiver: cst.BaseExpression, what: str) -> None:
        """Report what may be state of a wrapped model, or of its optimizer."""
        text = code_of(receiver)
        has_models = bool(self._wrapping.calls)
        if self._optimizers.is_unknown(receiver) and has_models:
            why = "if it belongs to a wrapped model, this is this rank's part of its state"
            fix = "call FSDP.optim_state_dict(model, optimizer) on all ranks"
            self._source.leave(call, what, why, fix)
            return
        guard = next(guards_of(self._source, call), None)
        is_inner = ".module" in text
        if _NOT_SHARDED.search(text) or not (guard or is_inner):
            return
        if not (_MODEL.search(text) or has_models):
            return
        why = "if this is a wrapped model, or the module in it, all ranks have to make this call"
        if guard is not None:
            why += f", and some do not ({guard.text}, line {self._source.line(guard.node)})"
        finding = self._source.finding(call, what, why, _BY_HAND)
        (self._source.left if has_models else self.suspects).append(finding)

    # -- loading

    def _loading(self, call: cst.Call, receiver: cst.BaseExpression) -> None:
        owner = unwrapped(receiver) or receiver
        found, what = self._places.find(owner), code_of(call)
        if found is None:
            if self._wrapping.calls and self._optimizers.is_unknown(receiver):
                why = "it is not known which model the optimizer belongs to"
                fix = "pass FSDP.optim_state_dict_to_load(model, optimizer, state) if it is wrapped"
                self._source.leave(call, what, why, fix)
            return
        if found.model.is_fsdp:
            return
        model = self._places.model_text(found.model, call)
        if not found.is_certain or model is None:
            why = f"it is not certain that the model wrapped in line {found.model.line} is meant"
            self._source.leave(call, what, why, "load into the wrapped model, and its optimizer")
            return
        guard = next(guards_of(self._source, call), None)
        if guard is not None:
            self._leave_guarded(call, what, guard)
        elif found.kind is Kind.OPTIMIZER:
            self._load_optimizer(call, owner, found, model)
        elif owner is not receiver or found.kind is Kind.INNER:
            text = code_of(owner) if found.kind is Kind.WRAPPED else model
            new = expression(f"{text}.load_state_dict")
            self._source.edit(call, lambda it: it.with_changes(func=new))

    def _load_optimizer(
        self, call: cst.Call, owner: cst.BaseExpression, found: Found, model: str
    ) -> None:
        if len(call.args) != 1 or call.args[0].star:
            why = "its arguments were not followed"
            fix = "pass FSDP.optim_state_dict_to_load(model, optimizer, state)"
            self._source.leave(call, code_of(call), why, fix)
            return
        start = f"{self._fsdp(found)}.optim_state_dict_to_load"
        given = code_of(call.args[0].value)
        if "optim_state_dict_to_load" in given:
            return

        def change(now: cst.Call) -> cst.Call:
            value = now.args[0].value
            inner = cst.Call(
                expression(start),
                [cst.Arg(expression(each)) for each in (model, code_of(owner))] + [cst.Arg(value)],
            )
            return now.with_changes(args=[now.args[0].with_changes(value=inner)])

        self._source.edit(call, change)

    # -- functions that call them

    def report_guarded_functions(self) -> None:
        """Report calls, on some ranks only, of functions of this file that all have to call."""
        functions: set[cst.CSTNode] = set()
        todo = [self._source.function(call) for call, _ in self._collectives]
        while todo:
            function = todo.pop()
            if function in functions or not isinstance(function, cst.FunctionDef):
                continue
            functions.add(function)
            for call in self._places.calls_by_name(function):
                guard = next(guards_of(self._source, call), None)
                if guard is None:
                    todo.append(self._source.function(call))
                else:
                    line = self._source.line(function)
                    what = f"{code_of(call.func)}(...)"
                    why = (
                        f"it is called on some ranks only ({guard.text}, line"
                        f" {self._source.line(guard.node)}), and the function in line {line} uses"
                        " the model as all ranks have to"
                    )
                    fix = "call it on all ranks, and move the condition into it, around the writing"
                    self._source.leave(call, what, why, fix)
