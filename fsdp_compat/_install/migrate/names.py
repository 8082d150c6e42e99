"""Which names of torch.distributed.fsdp exist in fsdp_compat, and where."""

from __future__ import annotations

import functools
import importlib

from ..contents import contents, fully_shard_names

FSDP = "torch.distributed.fsdp"
IN_PLACE = "torch.distributed._composable.fsdp"  # an older home of fully_shard
PACKAGE = "fsdp_compat"

_MODULES = ("api", "fully_sharded_data_parallel", "sharded_grad_scaler", "wrap")
_OTHER_HOMES = ("", "wrap", "fully_sharded_data_parallel", "sharded_grad_scaler")


def is_of_fsdp(name: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in (FSDP, IN_PLACE))


@functools.cache
def _names_of(module: str) -> frozenset[str]:
    """Return the public names of one of our modules, and the private ones that clients use."""
    found = importlib.import_module(_full(module))
    known = contents()[module]
    private = {name for name in known if name.startswith("_") and hasattr(found, name)}
    return frozenset(found.__all__) | (private if module == "wrap" else frozenset())


def _full(module: str) -> str:
    return f"{PACKAGE}.{module}" if module else PACKAGE


def ours(name: str) -> str | None:
    """Return our name for a full name of torch's, of a module or of something in it."""
    if name == IN_PLACE or name.startswith(IN_PLACE + "."):
        return _of_fully_shard(name.removeprefix(IN_PLACE).split(".")[1:])
    parts = name.removeprefix(FSDP).split(".")[1:]
    if parts[:1] == ["_fully_shard"]:
        return _of_fully_shard(parts[1:])
    if not parts:
        return PACKAGE
    module = parts[0] if parts[0] in _MODULES else ""
    rest = parts[1:] if module else parts
    if not rest:
        return _full(module)
    for home in (module, *_OTHER_HOMES) if module else ("",):
        if rest[0] in _names_of(home):
            return ".".join([_full(home), *rest])
    return None


def _of_fully_shard(parts: list[str]) -> str | None:
    """Names of FSDP2 are all in our package; torch has them in modules below that of the name."""
    names = fully_shard_names().keys() | _names_of("")
    while len(parts) > 1 and (parts[0].startswith("_") or parts[1] in names):
        parts = parts[1:]
    if not parts or parts == ["fully_shard_module"] or parts[0].startswith("_fsdp"):
        return PACKAGE
    return ".".join([PACKAGE, *parts]) if parts[0] in names else None


def why_not(name: str) -> tuple[str, str]:
    """Return why a name has no equivalent, and what to do."""
    below = name.removeprefix(FSDP).split(".")[1:]
    module = below[0] if below else ""
    if module in contents() and module not in _MODULES:
        why = f"{FSDP}.{module} is private, and fsdp_compat has no such module"
    else:
        why = "fsdp_compat has no such name"
    return f"{why}; torch's own knows nothing of our classes", (
        "replace it, or keep the program as it is and start it with: python -m fsdp_compat run"
    )
