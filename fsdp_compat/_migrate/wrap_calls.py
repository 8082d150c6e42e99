"""``DistributedDataParallel(...)`` becomes ``FullyShardedDataParallel(...)``."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from .new_imports import Imports
from .source import Chain, Source, dotted, last_name

FSDP = "fsdp_compat.FullyShardedDataParallel"
_POLICY = "fsdp_compat.wrap.ModuleWrapPolicy"
_DDP = {
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel",
}
_LISTS = {"torch.nn.ModuleList", "torch.nn.Sequential"}

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
    *("batched_grad_copy", "bucket_cap_mb_list", "forward_sync_buffers", "lazy_bucket_allocation"),
}


@dataclass(frozen=True, eq=False)
class Model:
    """A model that is wrapped with DDP, and the variable that holds it."""

    call: ast.Call
    statement: ast.stmt  # around the call
    name: str  # of the variable, such as "model" or "self.model"; "" if there is none
    inner: str  # the variable with the module that is wrapped; "" if it is the same


def wrap_models(source: Source, imports: Imports) -> list[Model]:
    """Rewrite the class where it is called, and where types are compared. Return the models."""
    uses = [c for c in source.chains if source.imported(c) & _DDP and isinstance(c.ctx, ast.Load)]
    calls = [call for use in uses if (call := source.call_of(use)) is not None]
    rewritten = [call for call in calls if _rewrite_call(source, call, imports)]
    for use in uses if rewritten else ():
        if source.call_of(use) is not None:
            continue
        if len(rewritten) == len(calls) and not isinstance(source.parent(use), ast.ClassDef):
            _rename(source, use, imports)
        else:
            why = "it is unknown whether this means a rewritten model; compare with"
            source.report(use, dotted(use), f"{why}, or use, {fsdp(imports)}")
    return [_model(source, call) for call in rewritten]


def fsdp(imports: Imports) -> str:
    return imports.name_for(FSDP, "FSDP", "FullyShardedDataParallel")


def _rename(source: Source, use: Chain, imports: Imports) -> None:
    source.replace(use, fsdp(imports))
    imports.replaced.add(use)


def _model(source: Source, call: ast.Call) -> Model:
    """Say which variable a model is assigned to; advise to look after it if there is none."""
    parent = source.parent(call)
    target = parent.targets[0] if isinstance(parent, ast.Assign) else vars(parent).get("target")
    first = source.arguments(call)[0]
    module: ast.expr | None = first.value if isinstance(first, ast.keyword) else first
    while isinstance(module, ast.Call) and last_name(module.func) in ("to", "cuda"):
        module = module.func.value if isinstance(module.func, ast.Attribute) else None
    name, inner = dotted(target), dotted(module)
    if not name:
        why = "it is returned or stored here, and not followed; check its optimizer and state dicts"
        source.note(call, "the wrapped model", why)
    statement = source.nearest(call, ast.stmt)
    assert statement is not None
    return Model(call, statement, name, inner if inner != name else "")


# -- a construction


def _rewrite_call(source: Source, call: ast.Call, imports: Imports) -> bool:
    """Rewrite a construction; False, with a report, if it stays DDP's."""
    others = source.imported(call.func) - _DDP
    if others:
        why = f"it may also be {', '.join(sorted(others))}; import one class only, and run again"
        source.report(call.func, dotted(call.func), why)
        return False
    given: dict[str, ast.expr] = {}
    new: list[str] = []
    for number, each in enumerate(source.arguments(call)):
        name = _ORDER[number] if number < len(_ORDER) else None
        name, value = (each.arg, each.value) if isinstance(each, ast.keyword) else (name, each)
        is_known = name is not None and not isinstance(value, ast.Starred)
        given[name or ""] = value
        made = _argument(source, name or "", given) if is_known else None
        if made is None or (number == 0 and name != "module"):
            why = "FullyShardedDataParallel has nothing like it; it stays DDP's: wrap it by hand"
            what = f"{name}={source.code(value)}" if is_known else source.code(each)
            source.report(call, what, why)
            return False
        new.append(source.code(each) if name == "module" else made)
    more = ["sync_module_states=True"] if "init_sync" not in given else []
    more += ["use_orig_params=True", *_policy(source, call, given, imports)]
    source.rewrite_arguments(call, new, more)
    _rename(source, call.func, imports)  # type: ignore[arg-type]
    return True


def _argument(source: Source, name: str, given: dict[str, ast.expr]) -> str | None:
    """Return the argument for FullyShardedDataParallel; "" for none, None without an equivalent."""
    text = source.code(given[name])
    if name in ("process_group", "device_mesh"):
        return f"{name}={text}"
    if name == "init_sync":
        return f"sync_module_states={text}" if text != "False" else ""
    if name in ("device_ids", "output_device"):
        device = _only_element(source, given["device_ids"]) if "device_ids" in given else None
        if name == "output_device":
            return "" if text in ("None", device) else None
        return f"device_id={device}" if device not in (None, "None") else device and ""
    return text if name == "module" else "" if name in _DROPPED else None


def _only_element(source: Source, value: ast.expr) -> str | None:
    """Return x of ``[x]``, of ``None``, and of ``[x] if ... else None``."""
    if isinstance(value, ast.IfExp):
        body, other = _only_element(source, value.body), _only_element(source, value.orelse)
        both = body is not None and other is not None
        return f"{body} if {source.code(value.test)} else {other}" if both else None
    if isinstance(value, ast.List | ast.Tuple) and len(value.elts) == 1:
        only = value.elts[0]
        return None if isinstance(only, ast.Starred) else source.code(only)
    return "None" if isinstance(value, ast.Constant) and value.value is None else None


# -- the wrap policy


def _policy(
    source: Source, call: ast.Call, given: dict[str, ast.expr], imports: Imports
) -> list[str]:
    """Return the argument that wraps each block; advise if blocks are unknown or may be unused."""
    blocks, unused = _repeated_classes(source), given.get("find_unused_parameters")
    may_differ = unused is not None and source.code(unused) != "False"
    if blocks and not may_differ:
        policy = imports.name_for(_POLICY, "ModuleWrapPolicy")
        return [f"auto_wrap_policy={policy}({{{', '.join(blocks)}}})"]
    fix = f"pass auto_wrap_policy=ModuleWrapPolicy({{{', '.join(blocks) or 'Block'}}})"
    if may_differ:
        fix += " and, if some ranks may not use a block, allow_unused_units=True"
    source.note(call, "the wrapped model", f"it is one unit, gathered as a whole; {fix}")
    return []


def _repeated_classes(source: Source) -> list[str]:
    """Return the classes that a ModuleList or Sequential of this file holds several of."""
    found = [
        dotted(each.elt.func)
        for each in source.nodes
        if isinstance(each, ast.ListComp | ast.GeneratorExp)
        if isinstance(each.elt, ast.Call) and _is_block(source, each.elt.func)
        for outer in source.above(each)
        if isinstance(outer, ast.Call) and source.imported(outer.func) & _LISTS
    ]
    return list(dict.fromkeys(found))


def _is_block(source: Source, node: ast.expr) -> bool:
    """True for a class that the module defines or imports, except for layers of torch.nn."""
    if any(name.startswith("torch.nn.") for name in source.imported(node)):
        return last_name(node).startswith("Transformer")
    names = [alias.asname or alias.name for alias in source.all(ast.alias)]
    names += [each.name for each in source.tree.body if isinstance(each, ast.ClassDef)]
    return dotted(node) in names
