"""The command ``fsdp-compat``, which is also ``python -m fsdp_compat``.

Nothing is imported before the command is known. Those that work on checkpoints need click and rich,
see `checkpoint/_tools/commands.py`."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Iterable

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
# The file of each has add_arguments(parser), and main(given), which returns the exit status.
_OTHERS = {
    "run": ("._install.run", "run a program with fsdp_compat instead of torch.distributed.fsdp"),
    "migrate": ("._install.migrate.command", "rewrite source that uses torch's FSDP, or DDP"),
    "diagnose": ("._diagnose", "say why ranks wait, from what FSDP_COMPAT_BLACK_BOX kept"),
    "plan": ("._plan.command", "show memory and traffic of a step, without GPU or process group"),
}
_HELP = _TOOLS | {name: text for name, (_, text) in _OTHERS.items()}


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
        file = importlib.import_module(_OTHERS[name][0], __package__)
        file.add_arguments(parser)
        sys.exit(file.main(parser.parse_args(arguments[1:])))
    if name in ("-h", "--help"):
        print(_help())
        sys.exit(0)
    print(_unknown(name) if name else _help(), file=sys.stderr)
    sys.exit(2)


def _unknown(name: str) -> str:
    nearest = difflib.get_close_matches(name, _HELP, 1)
    question = f"; did you mean {nearest[0]}?" if nearest else ""
    return f"{_usage()}\n{_program()}: there is no command {name!r}{question}"


def _usage() -> str:
    return f"usage: {_program()} COMMAND ..."


def _help() -> str:
    def listed(commands: Iterable[str]) -> str:
        return "\n".join(f"    {name:10}{_HELP[name]}" for name in commands)

    return (
        f"{_usage()}\n\nCheckpoints, in one process without a GPU:\n{listed(_TOOLS)}\n\n"
        f"Programs:\n{listed(_OTHERS)}\n\n"
        "Each command has --help, with an example. fsdp-compat is python -m fsdp_compat."
    )


def _use_tool(arguments: list[str]) -> None:
    """Run a checkpoint command and exit with its status."""
    try:
        for package in _NEEDED:
            importlib.import_module(package)
    except ImportError:
        print(
            f"{_program()} {arguments[0]} needs {' and '.join(_NEEDED)}: "
            f"pip install {' '.join(_NEEDED)} tqdm",
            file=sys.stderr,
        )
        sys.exit(2)
    file = importlib.import_module(".checkpoint._tools.commands", __package__)
    file.commands.main(arguments, prog_name=_program())


def _program() -> str:
    """Return the command that the user typed."""
    name = os.path.basename(sys.argv[0])
    return "fsdp-compat" if name.startswith("fsdp-compat") else "python -m fsdp_compat"


if __name__ == "__main__":
    main()
