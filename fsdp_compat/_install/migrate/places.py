"""Variables that hold a wrapped model, the module in it, or its optimizer.

A variable is followed from the assignment that wraps the model, through further names for it and
through parameters of functions that get it in every call. It is certain if the assignment is always
made before the use and nothing else is assigned in between."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst

from .bindings import Bindings, Key, Site
from .source import Source, code_of, dotted, root_of


class Kind(enum.Enum):
    WRAPPED = enum.auto()
    INNER = enum.auto()  # the module that was wrapped
    OPTIMIZER = enum.auto()


@dataclass(eq=False)
class Model:
    """A model that a variable holds once it is wrapped."""

    key: Key
    calls: list[cst.Call]
    inner: cst.BaseExpression | None  # what is wrapped
    anchor: cst.CSTNode  # the statement after which the variable holds it
    conditional: bool = False  # wrapped on some ways through the program only
    is_fsdp: bool = False  # already, so that its uses are looked at, but not rewritten
    line: int = 0


@dataclass(frozen=True, eq=False)
class Held:
    """A variable holds something of a model from a statement on."""

    key: Key
    model: Model
    kind: Kind
    anchor: cst.CSTNode  # a statement, or the function whose parameter it is
    is_certain: bool = True


@dataclass(frozen=True)
class Found:
    """What an expression is. If it is not certain, it may be something else."""

    model: Model
    kind: Kind
    is_certain: bool


@dataclass
class Places:
    source: Source
    bindings: Bindings
    models: list[Model] = field(default_factory=list)
    _held: dict[Key, list[Held]] = field(default_factory=dict)

    # -- filling

    def add_wrap(
        self, call: cst.Call, inner: cst.BaseExpression | None, is_fsdp: bool = False
    ) -> Model | None:
        """Follow the variable that a construction is assigned to; None if there is none."""
        node: cst.CSTNode = self.source.parent(call)
        conditional = isinstance(node, cst.IfExp)
        if conditional:
            node = self.source.parent(node)
        target = _target_of(node)
        line = self.source.line_of(node) if target is not None else None
        key = self.bindings.key(target) if target is not None else None
        if line is None or key is None:
            return None
        anchor = self._anchor(line, key)
        for model in self.models:
            if model.key == key and model.anchor is anchor:
                model.calls.append(call)
                return model
        line_number = self.source.line(call)
        model = Model(key, [call], inner, anchor, conditional, is_fsdp, line_number)
        self.models.append(model)
        return model

    def _anchor(self, line: cst.CSTNode, key: Key) -> cst.CSTNode:
        """Return the outermost statement after which the variable is wrapped: an ``if`` counts if
        each of its branches wraps it."""
        while True:
            block = self.source.parent(line)
            outer = self.source.parent(block) if block is not self.source.module else None
            while isinstance(outer, cst.Else):
                outer = self.source.parent(outer)
            if not isinstance(outer, cst.If) or not self._in_all_branches(outer, key):
                return line
            while isinstance(above := self.source.parent(outer), cst.If):
                outer = above
            line = outer

    def _in_all_branches(self, node: cst.If, key: Key) -> bool:
        while isinstance(above := self.source.parent(node), cst.If):
            node = above
        branch: cst.If | cst.Else | None = node
        while isinstance(branch, cst.If):
            if not self._wraps_in(branch.body, key):
                return False
            branch = branch.orelse
        return branch is not None and self._wraps_in(branch.body, key)

    def _wraps_in(self, block: cst.CSTNode, key: Key) -> bool:
        return any(
            site.statement is not None
            and self.source.parent(site.statement) is block
            and isinstance(site.value, cst.Call)
            and self.is_wrap(site.value)
            for site in self.bindings.sites(key)
        )

    def is_wrap(self, call: cst.Call) -> bool:
        wrappers = ("DistributedDataParallel", "FullyShardedDataParallel")
        return any(name.endswith(wrappers) for name in self.source.imported(call.func))

    def hold(self, held: Held) -> None:
        self._held.setdefault(held.key, []).append(held)

    def follow_models(self) -> None:
        """Begin with the wraps, then follow further names and parameters to their end."""
        for model in self.models:
            certain = not model.conditional
            self.hold(Held(model.key, model, Kind.WRAPPED, model.anchor, certain))
            inner = self.bindings.key(model.inner) if model.inner is not None else None
            if inner is not None and inner != model.key:
                self.hold(Held(inner, model, Kind.INNER, model.anchor, certain))
        self.follow_names()

    def follow_names(self) -> None:
        while self._follow_assignments() or self._follow_parameters():
            pass

    def _follow_assignments(self) -> bool:
        new = False
        for site in self.bindings.plain():
            assert site.value is not None
            key = self.bindings.key(site.node)
            found = self.find(unwrapped(site.value) or site.value)
            if key is None or found is None or site.statement is None:
                continue
            if isinstance(site.value, cst.IfExp) and found.kind is Kind.WRAPPED:
                found = Found(found.model, Kind.INNER, found.is_certain)
            known = self._held.get(key, ())
            if all(held.anchor is not site.statement for held in known) and not any(
                held.model is found.model and self.source.inside(site.statement, held.anchor)
                for held in known
            ):
                self.hold(Held(key, found.model, found.kind, site.statement, found.is_certain))
                new = True
        return new

    def _follow_parameters(self) -> bool:
        new = False
        for function in self.source.all(cst.FunctionDef):
            calls = self._calls_of(function)
            if not calls:
                continue
            for number, parameter in enumerate(self._parameters(function)):
                key = self.bindings.key(parameter.name)
                if key is None or key in self._held:
                    continue
                given = [_argument(call, number, parameter.name.value) for call in calls]
                found = [self.find(each) for each in given if each is not None]
                first = found[0] if len(found) == len(calls) else None
                if first is not None and all(
                    each is not None and each.model is first.model and each.kind is first.kind
                    for each in found
                ):
                    certain = all(each is not None and each.is_certain for each in found)
                    self.hold(Held(key, first.model, first.kind, function, certain))
                    new = True
        return new

    def _parameters(self, function: cst.FunctionDef) -> list[cst.Param]:
        parameters = [*function.params.params]
        return parameters[1:] if self._owner(function) is not None else parameters

    def _owner(self, function: cst.FunctionDef) -> cst.ClassDef | None:
        block = self.source.parent(function)
        owner = self.source.parent(block) if block is not self.source.module else None
        return owner if isinstance(owner, cst.ClassDef) else None

    def calls_by_name(self, function: cst.FunctionDef) -> list[cst.Call]:
        """Return the calls that a function's name, or ``self.`` and its name, makes."""
        name = function.name.value
        uses = (
            self.source.chains_ending(name)
            if self._owner(function) is not None
            else self.source.chains_named(name)
        )
        parents = [(use, self.source.parent(use)) for use in uses]
        return [call for use, call in parents if isinstance(call, cst.Call) and call.func is use]

    def _calls_of(self, function: cst.FunctionDef) -> list[cst.Call]:
        """Return all calls of a function; none if it may be called in another way, too."""
        owner = self._owner(function)
        name = function.name.value
        if owner is not None and name == "__init__":
            uses = self.source.chains_named(owner.name.value)
        elif owner is not None:
            uses = [use for use in self.source.chains_ending(name) if use is not function.name]
        else:
            uses = self.source.chains_named(name)
        calls = []
        for use in uses:
            parent = self.source.parent(use)
            if use is (owner.name if owner is not None else function.name):
                continue
            if not isinstance(parent, cst.Call) or parent.func is not use:
                return []
            if any(argument.star for argument in parent.args):
                return []
            calls.append(parent)
        return calls

    # -- asking

    def find(self, node: cst.CSTNode) -> Found | None:
        """Return what an expression holds, where it stands."""
        if isinstance(node, cst.Attribute) and node.attr.value == "module":
            outer = self.find(node.value)
            if outer is not None and outer.kind is Kind.WRAPPED:
                return Found(outer.model, Kind.INNER, outer.is_certain)
        key = self.bindings.key(node)
        best: Found | None = None
        for held in self._held.get(key, ()) if key is not None else ():
            if not self._reaches(held, node):
                continue
            found = Found(held.model, held.kind, self._is_certain(held, node))
            if best is None or found.is_certain or not best.is_certain:
                best = found
        return best

    def _reaches(self, held: Held, node: cst.CSTNode) -> bool:
        """False if the use comes before the model is wrapped, or lies in its assignment."""
        source = self.source
        if isinstance(held.anchor, cst.FunctionDef):
            return source.inside(node, held.anchor)
        if source.inside(node, held.anchor):
            return (
                isinstance(held.anchor, cst.If)
                and held.kind is Kind.WRAPPED
                and any(
                    site.statement is not None
                    and source.inside(site.statement, held.anchor)
                    and source.parent(site.statement) in source.above(node)
                    and source.start(node) >= source.end(site.statement)
                    for site in self.bindings.sites(held.key)
                )
            )
        if source.function(node) is source.function(held.anchor):
            return source.start(node) >= source.end(held.anchor)
        return True

    def _is_certain(self, held: Held, node: cst.CSTNode) -> bool:
        if not held.is_certain:
            return False
        source, anchor = self.source, held.anchor
        sites = [site for site in self.bindings.sites(held.key) if not self._same(site, held)]
        if isinstance(anchor, cst.FunctionDef):
            return not [site for site in sites if source.start(site.node) < source.start(node)]
        block, here = source.parent(anchor), source.function(anchor)
        if source.function(node) is here:
            later = [site for site in sites if source.function(site.node) is not here]
            between = [
                site
                for site in sites
                if source.end(anchor) <= source.start(site.node) < source.start(node)
            ]
            return source.inside(node, block) and not between and not any(map(_counts, later))
        others = [
            site
            for site in sites
            if source.function(site.node) is not here
            or source.start(site.node) >= source.end(anchor)
        ]
        return self._is_whole(block) and not any(map(_counts, others))

    def _same(self, site: Site, held: Held) -> bool:
        """True if a place gives the variable the same model."""
        if isinstance(held.anchor, cst.FunctionDef):
            return self._source_of_parameters(site.node)
        return self.source.inside(site.node, held.anchor)

    def _source_of_parameters(self, node: cst.CSTNode) -> bool:
        return isinstance(node, cst.Param) or bool(self.source.nearest(node, cst.Parameters))

    def _is_whole(self, block: cst.CSTNode) -> bool:
        """True for the body of a function or module, and for that of ``if __name__ == ...``."""
        if block is self.source.module:
            return True
        outer = self.source.parent(block)
        if isinstance(outer, cst.If) and "__name__" in code_of(outer.test):
            return True
        return isinstance(outer, cst.FunctionDef)

    def model_text(self, model: Model, node: cst.CSTNode) -> str | None:
        """Return an expression that holds the wrapped model, for use at a node."""
        for key, helds in self._held.items():
            for held in helds:
                if held.model is model and held.kind is Kind.WRAPPED:
                    text = self._visible(key, node)
                    if (
                        text is not None
                        and self._reaches(held, node)
                        and self._is_certain(held, node)
                    ):
                        return text
        return None

    def _visible(self, key: Key, node: cst.CSTNode) -> str | None:
        """Return how a variable is called at a node, or None if it is not visible there."""
        owner, text = key
        if isinstance(owner, cst.ClassDef):
            for each in self.source.above(node):
                if isinstance(each, cst.FunctionDef) and self._owner(each) is owner:
                    first = each.params.params[0].name.value if each.params.params else None
                    return f"{first}.{text.partition('.')[2]}" if first is not None else None
            return None
        scope = self.source.scope_within(self.source.function(node))
        name = text.partition(".")[0]
        return text if scope is not None and any(a.scope is owner for a in scope[name]) else None

    def helds(self) -> Iterator[Held]:
        for helds in self._held.values():
            yield from helds


def _target_of(node: cst.CSTNode) -> cst.BaseExpression | None:
    if isinstance(node, cst.Assign) and len(node.targets) == 1:
        return node.targets[0].target
    return node.target if isinstance(node, cst.AnnAssign) else None


def _counts(site: Site) -> bool:
    """``self.model = None`` in another method is not a value."""
    return not (isinstance(site.value, cst.Name) and site.value.value == "None")


def _argument(call: cst.Call, number: int, name: str) -> cst.BaseExpression | None:
    for position, argument in enumerate(call.args):
        if argument.keyword is None and position == number:
            return argument.value
        if argument.keyword is not None and argument.keyword.value == name:
            return argument.value
    return None


def unwrapped(node: cst.CSTNode) -> cst.BaseExpression | None:
    """Return ``m`` of ``m.module if ... else m``, or None if an expression is something else."""
    if not isinstance(node, cst.IfExp):
        return None
    for inner, outer in ((node.body, node.orelse), (node.orelse, node.body)):
        if (
            isinstance(inner, cst.Attribute)
            and inner.attr.value == "module"
            and dotted(outer) is not None
            and dotted(inner.value) == dotted(outer)
            and isinstance(root_of(outer), cst.Name)
        ):
            return outer
    return None
