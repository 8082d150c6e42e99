"""The command ``fsdp-compat``, which is also ``python -m fsdp_compat``.

Nothing is imported before the command is known. Those that work on checkpoints need click and rich,
see `checkpoint/_tools/commands.py`."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable
from typing import Any

__all__ = ["main"]

_TOOLS = {
    "inspect": "show what a checkpoint holds",
    "list": "list the checkpoints of a run's folder",
    "verify": "check that a checkpoint is complete and undamaged",
    "diff": "compare two checkpoints",
    "convert": "write a checkpoint in another format",
    "merge": "write a checkpoint of many files as one",
    "reshard": "write a checkpoint for another number of ranks",
    "shapes": "write a model's parameter shapes, for --shapes (FSDP1 LOCAL_STATE_DICT)",
}
_NEEDED = ("click", "rich")  # by _TOOLS
_OTHERS = {
    "run": "run a program with fsdp_compat instead of torch.distributed.fsdp",
    "migrate": "rewrite source that uses torch's FSDP, or DDP",
    "diagnose": "say why ranks wait, from what FSDP_COMPAT_BLACK_BOX kept",
    "plan": "show the memory and traffic of a step, without GPU and process group",
}
_FILES = {  # of _OTHERS: add_arguments(parser), and main(given), which returns the exit status
    "run": "._install.run",
    "migrate": "._install.migrate.command",
    "diagnose": "._diagnose",
    "plan": "._plan.command",
}


def main(arguments: list[str] | None = None) -> None:
    """Run the command, and exit with its status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name = arguments[0] if arguments else ""
    if name in _TOOLS:
        _use_tool(arguments)
    if name in _OTHERS:
        parser = argparse.ArgumentParser(
            prog=f"{_program()} {name}", formatter_class=argparse.RawDescriptionHelpFormatter
        )
        file = _imported(_FILES[name])
        file.add_arguments(parser)
        sys.exit(file.main(_parsed(parser, arguments[1:])))
    if name in ("-h", "--help"):
        print(_help())
        sys.exit(0)
    problem = f"{_program()}: there is no command {name!r}{_nearest(name, _TOOLS | _OTHERS)}"
    print(f"{_usage()}\n{problem}" if name else _help(), file=sys.stderr)
    sys.exit(2)


def _parsed(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        options = re.findall(r"--[a-z-]+", parser.format_usage())
        parser.error(f"there is no option {unknown[0]}{_nearest(unknown[0], options)}")
    return given


def _nearest(name: str, names: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {found[0]}?" if found else ""


def _usage() -> str:
    return f"usage: {_program()} COMMAND ..."


def _help() -> str:
    def listed(commands: dict[str, str]) -> str:
        return "\n".join(f"    {name:10}{text}" for name, text in commands.items())

    return (
        f"{_usage()}\n\nCheckpoints, in one process without a GPU:\n{listed(_TOOLS)}\n\n"
        f"Programs:\n{listed(_OTHERS)}\n\n"
        "Each command has --help, with an example. fsdp-compat is python -m fsdp_compat."
    )


def _use_tool(arguments: list[str]) -> None:
    """Run a checkpoint command and exit with its status."""
    if not all(map(_is_installed, _NEEDED)):
        print(
            f"{_program()} {arguments[0]} needs {' and '.join(_NEEDED)}: "
            f"pip install {' '.join(_NEEDED)} tqdm",
            file=sys.stderr,
        )
        sys.exit(2)
    _imported(".checkpoint._tools.commands").commands.main(arguments, prog_name=_program())


def _imported(file: str) -> Any:
    """Import a file of the package. That may take seconds: Ctrl-C leaves no traceback."""
    try:
        return importlib.import_module(file, __package__)
    except KeyboardInterrupt:
        sys.exit(130)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # sys.modules blocks the import
        return False


def _program() -> str:
    """Return the command that the user typed."""
    name = os.path.basename(sys.argv[0])
    return "fsdp-compat" if name.startswith("fsdp-compat") else "python -m fsdp_compat"


if __name__ == "__main__":
    main()
