"""Optimizers of wrapped models: which they are, and that they are made after wrapping."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from .bindings import Bindings, Site
from .places import Held, Kind, Model, Places
from .source import Source, changed, dotted, expression

_PARAMETERS = ("parameters", "named_parameters")


class Optimizers:
    def __init__(self, source: Source, places: Places, bindings: Bindings) -> None:
        self._source, self._places, self._bindings = source, places, bindings
        self._unknown: set[object] = set()  # variables with optimizers that were not followed

    def find(self) -> None:
        """Follow optimizers, and move those that are made too early."""
        for site in list(self._bindings.plain()):
            key = self._bindings.key(site.node)
            if key is None or not self._is_optimizer(site.value):
                continue
            assert isinstance(site.value, cst.Call) and site.statement is not None
            models, receivers, early = self._models_of(site.value)
            if len(models) == 1 and models[0].is_fsdp:
                continue
            if len(models) != 1:
                self._unknown.add(key)
                continue
            model = models[0]
            anchor = site.statement
            if early:
                anchor = self._moved(site, model, receivers) or anchor
            self._places.hold(Held(key, model, Kind.OPTIMIZER, anchor))
        self._places.follow_names()

    def is_unknown(self, node: cst.CSTNode) -> bool:
        """True for what is, or may be, an optimizer of a model that is not known."""
        key, text = self._bindings.key(node), (dotted(node) or "").lower()
        return (
            key in self._unknown or "optim" in text or text.rpartition(".")[2] in ("opt", "optim")
        )

    def _is_optimizer(self, value: cst.BaseExpression | None) -> bool:
        if not isinstance(value, cst.Call):
            return False
        names = self._source.imported(value.func)
        return any(
            name.startswith("torch.optim.") and ".lr_scheduler" not in name for name in names
        )

    def _models_of(self, call: cst.Call) -> tuple[list[Model], list[cst.Attribute], bool]:
        """Return the models whose parameters an optimizer gets, where it says so, and whether
        they are wrapped later only."""
        first = next((a.value for a in call.args if a.keyword is None), None)
        first = next(
            (a.value for a in call.args if a.keyword and a.keyword.value == "params"), first
        )
        if first is None:
            return [], [], False
        if isinstance(first, cst.Name) and (key := self._bindings.key(first)) is not None:
            sites = self._bindings.sites(key)
            if len(sites) == 1 and sites[0].value is not None:
                first = sites[0].value
        models: list[Model] = []
        receivers: list[cst.Attribute] = []
        early = False
        for chain in self._source.chains:
            if not isinstance(chain, cst.Attribute) or chain.attr.value not in _PARAMETERS:
                continue
            if not self._source.inside(chain, first):
                continue
            model, later = self._model_at(chain.value)
            if model is None:
                return [], [], False
            early = early or later
            receivers.append(chain)
            if model not in models:
                models.append(model)
        return models, receivers, early

    def _model_at(self, node: cst.BaseExpression) -> tuple[Model | None, bool]:
        """Return the model that an expression holds, or that it will hold once it is wrapped."""
        found = self._places.find(node)
        if found is not None:
            is_model = found.kind is not Kind.OPTIMIZER and found.is_certain
            return (found.model if is_model else None), False
        key = self._bindings.key(node)
        for model in self._places.models:
            inner = self._bindings.key(model.inner) if model.inner is not None else None
            same_function = self._source.function(node) is self._source.function(model.anchor)
            if key in (inner, model.key) and key is not None and same_function:
                before = self._source.start(node) < self._source.start(model.anchor)
                if before and not model.conditional and not model.is_fsdp:
                    return model, True
        return None, False

    # -- moving

    def _moved(
        self, site: Site, model: Model, receivers: Sequence[cst.Attribute]
    ) -> cst.CSTNode | None:
        """Move an optimizer, and schedulers that it has already, below the wrap. Return the
        statement behind which it is made then, or None with a report."""
        statement, target = site.statement, dotted(site.node)
        assert statement is not None and target is not None
        block = self._source.parent(statement)
        why = None
        if self._source.parent(model.anchor) is not block:
            why = "it is made before its model is wrapped, in another block"
        elif any(receiver.attr.value != "parameters" for receiver in receivers):
            why = "it is made before its model is wrapped, by names that change"
        elif not all(self._source.inside(receiver, statement) for receiver in receivers):
            why = "it is made before its model is wrapped, of parameters that were listed before"
        if why is not None or not isinstance(block, cst.IndentedBlock | cst.Module):
            self._leave(statement, target, why or "it is made before its model is wrapped")
            return None
        body = list(block.body)
        between = body[body.index(statement) + 1 : body.index(model.anchor)]  # type: ignore[arg-type]
        moved = self._with_dependents(statement, target, between, receivers)
        if moved is None:
            why = "it is made before its model is wrapped, and used or changed in between"
            self._leave(statement, target, why)
            return None
        text = next(
            dotted(each.node)
            for each in self._bindings.sites(model.key)
            if self._source.inside(each.node, model.anchor)
        )
        for receiver in receivers:
            if dotted(receiver.value) != text and text is not None:
                self._source.edit(receiver, changed(value=expression(text)))
        for each in moved:
            self._move(each, model.anchor)
        return model.anchor

    def _leave(self, statement: cst.CSTNode, target: str, why: str) -> None:
        self._source.leave(
            statement,
            target,
            why,
            "make it after wrapping; with use_orig_params=True it works here while it has no state",
        )

    def _with_dependents(
        self,
        statement: cst.CSTNode,
        target: str,
        between: Sequence[cst.CSTNode],
        receivers: Sequence[cst.CSTNode],
    ) -> list[cst.CSTNode] | None:
        """Return what has to move together, or None if something in between stands in the way."""
        moved, names = [statement], {target}
        used: set[str | None] = set()
        for chain in self._source.chains:
            if self._source.inside(chain, statement) and chain not in receivers:
                text = dotted(chain) or ""
                used |= {text, text.partition(".")[0]}
        for each in between:
            inside = [c for c in self._source.chains if self._source.inside(c, each)]
            texts = {dotted(chain) or "" for chain in inside}
            touches = any(
                text == name or text.startswith(f"{name}.") for text in texts for name in names
            )
            bound = self._bound_by(each)
            if touches and bound is not None and self._is_scheduler(each):
                moved.append(each)
                names.add(bound)
                used |= texts
            elif (
                touches
                or (bound is not None and bound in used)
                or {dotted(target) for target in self._targets_in(each)} & used
            ):
                return None
        return moved

    def _targets_in(self, node: cst.CSTNode) -> list[cst.CSTNode]:
        return [
            each.target
            for each in self._source.all(cst.AssignTarget, cst.AnnAssign, cst.AugAssign)
            if isinstance(each, cst.AssignTarget | cst.AnnAssign | cst.AugAssign)
            and self._source.inside(each, node)
        ]

    def _bound_by(self, node: cst.CSTNode) -> str | None:
        targets = self._targets_in(node)
        return dotted(targets[0]) if len(targets) == 1 else None

    def _is_scheduler(self, node: cst.CSTNode) -> bool:
        if not isinstance(node, cst.SimpleStatementLine) or len(node.body) != 1:
            return False
        value = getattr(node.body[0], "value", None)
        return isinstance(value, cst.Call) and any(
            "lr_scheduler" in name for name in self._source.imported(value.func)
        )

    def _move(self, statement: cst.CSTNode, behind: cst.CSTNode) -> None:
        taken: list[cst.CSTNode] = []

        def take(now: cst.CSTNode) -> cst.RemovalSentinel:
            taken.append(now)
            return cst.RemoveFromParent()

        self._source.edit(statement, take)
        self._source.insert_after(behind, lambda: taken[0])
