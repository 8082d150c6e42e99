"""The structure of the package: imports point down, and what can do harm has one owner. Only
sources are read."""

from __future__ import annotations

import ast
import fnmatch
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "fsdp_compat"

# Top to bottom. A module imports from its own layer and from those below it.
LAYERS = (
    ("fsdp_compat", "__main__"),
    ("_install",),
    ("fully_sharded_data_parallel", "sharded_grad_scaler"),
    ("checkpoint", "_torch_patches"),
    ("_front_ends",),
    ("_state",),
    ("_stores",),
    ("_engine",),
    ("_comm",),
    ("_layout",),
    ("_torch_private", "wrap"),
    ("api", "_cost_model"),
    ("errors",),
)

# Names in private spelling that belong to nn.Module, or to torch's public interface of FSDP1.
PRIVATE_OF_OTHERS = {
    "_buffers",
    "_modules",
    "_parameters",
    "_module_classes_to_ignore",
    "_world",
    "_fqns",
    "_process_group",  # of torch's ShardedTensor
}

MAX_ATTRIBUTES = 15  # that the methods of a class set on its instances

# What breaks a rule, with the reason. The tests fail for what is missing here and for what is here
# without need, so that the list only becomes shorter.
EXCEPTIONS: dict[str, str] = {}

TOP_LEVEL = {
    *("setup.cfg", "setup.py", "fsdp_compat", "tests", "examples", "CHANGELOG.md"),
    *("README.md", "LICENSE", ".gitignore", ".editorconfig", ".ci"),
}

COLLECTIVES = {
    *(
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
    ),
    *("all_gather_object", "all_gather_single", "all_reduce", "all_reduce_coalesced", "all_to_all"),
    *(
        "all_to_all_single",
        "barrier",
        "batch_isend_irecv",
        "broadcast",
        "broadcast_object_list",
        "gather",
    ),
    *("gather_object", "irecv", "isend", "monitored_barrier", "recv", "recv_object_list", "reduce"),
    *(
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
    ),
    *("scatter", "scatter_object_list", "send", "send_object_list", "P2POp"),
}
HOOK_REGISTRATIONS = {
    *(
        "queue_callback",
        "register_backward_hook",
        "register_forward_hook",
        "register_forward_pre_hook",
    ),
    *("register_full_backward_hook", "register_full_backward_pre_hook", "register_hook"),
    *(
        "register_module_forward_hook",
        "register_module_forward_pre_hook",
        "register_multi_grad_hook",
    ),
    "register_post_accumulate_grad_hook",
}
STATE_DICT_HOOKS = {
    *(
        "register_load_state_dict_post_hook",
        "register_load_state_dict_pre_hook",
        "register_state_dict_post_hook",
    ),
    *(
        "register_state_dict_pre_hook",
        "_register_load_state_dict_pre_hook",
        "_register_state_dict_hook",
    ),
}
# Private in spelling only: the project relies on these modules of torch as if they were public.
ALLOWED_PRIVATE_MODULES = (
    "torch.distributed._shard.metadata",
    "torch.distributed._shard.sharded_tensor",
    "torch.distributed._shard.sharding_spec",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
)


@dataclass(frozen=True)
class Source:
    """One file of the package: its path from the root of the package, its dotted name and its
    syntax tree."""

    path: str
    module: str
    tree: ast.Module

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    def at(self, node: ast.AST) -> str:
        return f"{PACKAGE}/{self.path}:{getattr(node, 'lineno', 1)}"

    @functools.cached_property
    def imports(self) -> list[tuple[ast.stmt, str]]:
        """Every imported name with its module in front, relative imports resolved, wherever
        it is imported."""
        found: list[tuple[ast.stmt, str]] = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [(node, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                origin = self._origin(node)
                found += [(node, f"{origin}.{alias.name}") for alias in node.names]
        return found

    @functools.cached_property
    def bound_names(self) -> dict[str, str]:
        """What each name that an import binds stands for, with its module in front."""
        bound = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    bound[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom):
                bound.update(
                    {
                        alias.asname or alias.name: f"{self._origin(node)}.{alias.name}"
                        for alias in node.names
                    }
                )
        return bound

    @functools.cached_property
    def uses(self) -> list[tuple[ast.AST, str]]:
        """Every import, and every attribute chain that starts at an imported name, spelled out in
        full."""
        found: list[tuple[ast.AST, str]] = [*self.imports]
        bound = self.bound_names
        for node in self.nodes:
            names, inner = [], node
            while isinstance(inner, ast.Attribute):
                names.append(inner.attr)
                inner = inner.value
            if names and isinstance(inner, ast.Name) and inner.id in bound:
                found.append((node, ".".join([bound[inner.id], *reversed(names)])))
        return found

    def method_calls(self) -> Iterator[tuple[ast.Call, str]]:
        """Yield every call together with the last part of the name that is called."""
        for node in self.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
                yield node, node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id

    def _origin(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        package = (
            self.module.split(".")
            if self.path.endswith("__init__.py")
            else self.module.split(".")[:-1]
        )
        return ".".join(
            package[: len(package) - node.level + 1] + ([node.module] if node.module else [])
        )


def source(path: str, text: str) -> Source:
    parts = [PACKAGE, *path.removesuffix(".py").split("/")]
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Source(path, module, ast.parse(text))


@functools.cache
def sources() -> list[Source]:
    folder = ROOT / PACKAGE
    return [
        source(path.relative_to(folder).as_posix(), path.read_text())
        for path in sorted(folder.rglob("*.py"))
    ]


def layer_of(module: str) -> int | None:
    """Return the index in LAYERS of a dotted name of the package, or None for a module that no
    layer names."""
    _, _, inner = module.partition(".")
    first = inner.partition(".")[0] or PACKAGE
    return next((index for index, names in enumerate(LAYERS) if first in names), None)


def upward_imports(source: Source) -> list[str]:
    own = layer_of(source.module)
    found = []
    for _, name in source.imports:
        if name.partition(".")[0] != PACKAGE:
            continue
        target = layer_of(name)
        if (
            target is None
        ):  # a name that the package itself exports, or a module that no layer knows
            target = 0
        if own is not None and target < own:
            found.append(f"imports: {source.path} -> {name.removeprefix(PACKAGE + '.')}")
    return found


def private_names_of_torch(source: Source) -> list[str]:
    return [
        f"{source.at(node)} uses {name}"
        for node, name in source.uses
        if name.partition(".")[0] == "torch"
        and _is_private(name)
        and not name.startswith(ALLOWED_PRIVATE_MODULES)
    ]


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def collectives_called(source: Source) -> list[str]:
    """Return the places that reach a collective of torch.distributed, called or only named."""
    return [
        f"{source.at(node)} uses {name}"
        for node, name in source.uses
        if name.startswith("torch.distributed") and name.rpartition(".")[2] in COLLECTIVES
    ]


def calls_of(source: Source, names: set[str]) -> list[str]:
    return [
        f"{source.at(node)} calls {name}" for node, name in source.method_calls() if name in names
    ]


def uses_of(source: Source, wanted: str) -> list[str]:
    return [f"{source.at(node)} uses {name}" for node, name in source.uses if name == wanted]


def imports_of(source: Source, *prefixes: str) -> list[str]:
    return [
        f"{source.at(node)} imports {name}"
        for node, name in source.imports
        if any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)
    ]


def circles(sources: list[Source]) -> list[str]:
    """Return the circles of imports between files; those for type checking count."""
    known = {source.module: source.path for source in sources}
    below: dict[str, set[str]] = {source.path: set() for source in sources}
    for source in sources:
        for _, name in source.imports:
            target = known.get(name) or known.get(name.rpartition(".")[0])
            if target not in (None, source.path) and not target.endswith("__init__.py"):
                below[source.path].add(target)

    def reached(start: str) -> set[str]:
        found, todo = set[str](), [start]
        while todo:
            for target in below[todo.pop()] - found:
                found.add(target)
                todo.append(target)
        return found

    reach = {path: reached(path) for path in below}
    found = {
        tuple(sorted(other for other in reach[path] if path in reach[other]))
        for path in below
        if path in reach[path]
    }
    return [f"circle: {' '.join(files)}" for files in sorted(found)]


def attributes_of(cls: ast.ClassDef) -> set[str]:
    """The names that a class's methods set on ``self``, and that its body declares."""
    found = set()
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for inner in ast.walk(node):
                if (
                    isinstance(inner, ast.Attribute)
                    and isinstance(inner.ctx, ast.Store)
                    and isinstance(inner.value, ast.Name)
                    and inner.value.id == "self"
                ):
                    found.add(inner.attr)
    return found


def classes_in(source: Source) -> Iterator[ast.ClassDef]:
    for node in source.nodes:
        if isinstance(node, ast.ClassDef):
            yield node


def _is_record(cls: ast.ClassDef) -> bool:
    """True for a dataclass, NamedTuple, TypedDict or enumeration: it is its fields."""
    names = [ast.unparse(base) for base in (*cls.bases, *cls.decorator_list)]
    kinds = ("dataclass", "NamedTuple", "TypedDict", "Enum")
    return any(kind in name for name in names for kind in kinds)


def large_classes(source: Source) -> list[str]:
    return [
        f"attributes: {source.path}:{cls.name}"
        for cls in classes_in(source)
        if not _is_record(cls) and len(attributes_of(cls)) > MAX_ATTRIBUTES
    ]


def private_reaches(sources: list[Source]) -> list[str]:
    """Return where a private attribute of a class is used outside of the file that defines it."""
    owners: dict[str, set[str]] = {}
    for source in sources:
        for cls in classes_in(source):
            methods = {node.name for node in cls.body if isinstance(node, ast.FunctionDef)}
            for name in attributes_of(cls) | methods:
                if name.startswith("_") and not name.startswith("__"):
                    owners.setdefault(name, set()).add(source.path)
    found = []
    for source in sources:
        modules = source.bound_names
        for node in source.nodes:
            if (
                isinstance(node, ast.Attribute)
                and node.attr not in PRIVATE_OF_OTHERS
                and source.path not in owners.get(node.attr, {source.path})
                and not (
                    isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", *modules)
                )
            ):
                found.append(f"private: {source.path}: {node.attr}")
    return sorted(set(found))


def check(found: list[str], kind: str, rule: str) -> None:
    """Compare what breaks a rule with the exceptions of its kind."""
    allowed = {key for key in EXCEPTIONS if key.startswith(f"{kind}: ")}
    report(sorted(set(found) - allowed), rule)
    report(sorted(allowed - set(found)), "No exceptions any more: take them out of EXCEPTIONS:")


def report(found: list[str], rule: str) -> None:
    assert not found, "\n".join([rule, *sorted(set(found))])


def test_every_module_of_the_package_has_a_layer() -> None:
    homeless = [source.path for source in sources() if layer_of(source.module) is None]
    report(homeless, "Name the layer of these files in LAYERS:")


def test_imports_point_down() -> None:
    found = [line for source in sources() for line in upward_imports(source)]
    check(found, "imports", "A module imports only from its own layer and from those below it:")


def test_state_and_checkpoints_know_no_store_and_no_front_end() -> None:
    above = (
        "_front_ends",
        "fully_sharded_data_parallel",
        "sharded_grad_scaler",
        "_stores",
    )
    found = [
        line
        for source in sources()
        if source.path.startswith(("_state/", "checkpoint/"))
        for line in imports_of(source, *(f"{PACKAGE}.{name}" for name in above))
    ]
    report(found, "They work on registered units and on _engine/state_store.py's StateStore:")


def test_imports_form_no_cycle() -> None:
    check(circles(sources()), "circle", "Files that import each other, for type checking too:")


def test_no_class_has_too_many_attributes() -> None:
    found = [line for source in sources() for line in large_classes(source)]
    check(found, "attributes", f"Classes of more than {MAX_ATTRIBUTES} attributes:")


def test_no_file_reaches_for_private_attributes_of_another_files_classes() -> None:
    check(private_reaches(sources()), "private", "Give it a public name, or move the code:")


def test_no_file_imports_the_fsdp_of_torch() -> None:
    found = [line for source in sources() for line in imports_of(source, "torch.distributed.fsdp")]
    report(found, "The package must work on a torch without torch.distributed.fsdp:")


def test_the_layout_is_pure_arithmetic_without_torch() -> None:
    layout = [source for source in sources() if source.path.startswith("_layout/")]
    found = [line for source in layout for line in imports_of(source, "torch")]
    report(
        found,
        "_layout is integers and shapes; what needs tensors, modules or ranks belongs to a layer "
        "above:",
    )


def test_only_backend_py_calls_collectives_of_torch() -> None:
    owners = {"_comm/backend.py"}
    others = [source for source in sources() if source.path not in owners]
    found = [line for source in others for line in collectives_called(source)]
    report(found, "Use a communicator (_comm/communicator.py) instead:")


def test_only_storage_py_frees_and_allocates_storages() -> None:
    others = [source for source in sources() if source.path != "_engine/storage.py"]
    found = [line for source in others for line in calls_of(source, {"resize_"})]
    report(found, "Call a function of _engine/storage.py instead:")


def test_only_hooks_py_registers_hooks() -> None:
    adapter = f"{PACKAGE}._torch_private"  # holds the private queue_callback, for hooks.py
    others = [
        source
        for source in sources()
        if source.path not in ("_engine/hooks.py", "_torch_private/__init__.py")
    ]
    found = [line for source in others for line in calls_of(source, HOOK_REGISTRATIONS)]
    found += [
        line for source in others for line in uses_of(source, f"{adapter}.on_end_of_backward")
    ]
    report(found, "Call a function of _engine/hooks.py instead:")


def test_only_their_owners_register_state_dict_hooks() -> None:
    owners = {"_engine/hooks.py", "_state/model_loading.py"}
    others = [source for source in sources() if source.path not in owners]
    found = [line for source in others for line in calls_of(source, STATE_DICT_HOOKS)]
    report(found, f"State-dict hooks are registered by {', '.join(sorted(owners))}:")


def test_only_the_adapters_use_private_names_of_torch() -> None:
    others = [source for source in sources() if not source.path.startswith("_torch_private/")]
    found = [line for source in others for line in private_names_of_torch(source)]
    report(
        found,
        "Give the private name a public one in _torch_private, with the reason beside it:",
    )


def test_what_an_error_says_to_do_begins_with_a_small_letter() -> None:
    found = [
        f"{source.at(node)}: {first.value!r}"
        for source in sources()
        for node in source.nodes
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "fix"
        for first in ast.walk(keyword.value)
        if isinstance(first, ast.Constant) and re.match("[A-Z][a-z]+ ", str(first.value))
    ]
    report(found, "Facts of errors begin with small letters:")


def test_the_top_level_holds_nothing_but_the_agreed_names() -> None:
    lines = (ROOT / ".gitignore").read_text().splitlines()
    ignored = [".git", *(line for line in lines if line and not line.startswith("#"))]
    here = {path.name for path in ROOT.iterdir()}
    extra = {
        name for name in here if not any(fnmatch.fnmatch(name, pattern) for pattern in ignored)
    } - TOP_LEVEL
    report(sorted(extra), "Not agreed on for the top level of the repository:")


def test_every_path_in_the_map_exists() -> None:
    text = (ROOT / PACKAGE / "ARCHITECTURE.md").read_text()
    paths = set(re.findall(r"`([\w/]+(?:\.py|/))", text))
    assert len(paths) > 20
    missing = [p for p in paths if not (ROOT / PACKAGE / p).exists() and not (ROOT / p).exists()]
    report(missing, "Mend the map, fsdp_compat/ARCHITECTURE.md:")


# The rules themselves, on small sources: each of them sees what it forbids and lets pass what it
# allows.


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("_layout/spec.py", "from fsdp_compat._engine import unit"),
        ("_engine/unit.py", "def f():\n    from .._stores.flat_store import FlatStore"),
        ("_engine/unit.py", "import fsdp_compat"),
        ("_stores/__init__.py", "from .. import fully_sharded_data_parallel"),
        ("api.py", "from .wrap import wrap"),
    ],
)
def test_an_import_that_points_up_is_seen(path: str, text: str) -> None:
    assert len(upward_imports(source(path, text))) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("__init__.py", "from .fully_sharded_data_parallel import FullyShardedDataParallel"),
        ("_engine/unit.py", "from . import store\nfrom .._layout.spec import FlatLayout"),
        (
            "_stores/flat_store.py",
            "from ..errors import StateError\nimport fsdp_compat._engine.store",
        ),
        ("_state/model.py", "from fsdp_compat._state import units"),
        ("wrap.py", "import torch\nfrom fsdp_compat.errors import UsageError"),
    ],
)
def test_an_import_that_points_down_or_sideways_passes(path: str, text: str) -> None:
    assert upward_imports(source(path, text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch\ntorch.distributed.broadcast(x, 0)",
        "from torch import distributed\ndef f():\n    distributed.barrier()",
        "from torch.distributed import all_gather_into_tensor",
        "import torch.distributed as dist\nsend = dist.isend",
    ],
)
def test_a_collective_is_seen(text: str) -> None:
    assert len(collectives_called(source("_engine/unit.py", text))) == 1


def test_a_function_with_the_name_of_a_collective_passes() -> None:
    text = (
        "import torch\nimport torch.distributed as dist\ntorch.gather(x, 0, "
        "i)\nlinks.send(x)\ndist.get_rank()"
    )
    assert collectives_called(source("_engine/unit.py", text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch._foreach_copy_(a, b)",
        "import torch\ntorch.autograd.Variable._execution_engine.queue_callback(f)",
        "from torch._utils import _flatten_dense_tensors",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "import torch.distributed as dist\ngroup = dist.distributed_c10d._get_default_group()",
    ],
)
def test_a_private_name_of_torch_is_seen(text: str) -> None:
    assert private_names_of_torch(source("_engine/unit.py", text))


def test_public_dunder_and_agreed_names_of_torch_pass() -> None:
    text = (
        "import torch\nfrom torch import nn\nfrom torch.distributed._shard.sharded_tensor import "
        "ShardedTensor\n"
        "torch.__version__\nnn.BatchNorm1d.__bases__\nself._parameters\nmodule._buffers"
    )
    assert private_names_of_torch(source("_engine/unit.py", text)) == []


def test_a_call_is_seen_by_the_last_part_of_its_name() -> None:
    text = "full.untyped_storage().resize_(0)\nmodule.register_forward_hook(f)"
    assert calls_of(source("_engine/unit.py", text), {"resize_"}) == [
        "fsdp_compat/_engine/unit.py:1 calls resize_"
    ]
    assert len(calls_of(source("_engine/unit.py", text), HOOK_REGISTRATIONS)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "from .. import _torch_private\n_torch_private.on_end_of_backward(f)",
        "from .._torch_private import on_end_of_backward",
        "import fsdp_compat._torch_private as private\nprivate.on_end_of_backward(f)",
    ],
)
def test_a_use_is_seen_under_every_name(text: str) -> None:
    wanted = "fsdp_compat._torch_private.on_end_of_backward"
    assert len(uses_of(source("_engine/runtime.py", text), wanted)) == 1
    assert (
        uses_of(
            source("_engine/runtime.py", "from . import hooks\nhooks.on_end_of_backward(f)"), wanted
        )
        == []
    )
