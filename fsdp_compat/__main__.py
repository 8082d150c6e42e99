"""The command ``fsdp-compat``, which is also ``python -m fsdp_compat``.

``run`` runs a program that uses torch's FSDP on fsdp_compat, and ``migrate`` rewrites its source.
The other commands work on checkpoints and need the extra ``cli``, see
`checkpoint/_tools/commands.py`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
from typing import NoReturn

from . import _diagnose
from ._install import install
from ._install.migrate import command
from ._plan import command as plan_command

__all__ = ["main"]

_TOOLS = {
    "inspect": "show what a checkpoint holds",
    "verify": "check that a checkpoint is complete and undamaged",
    "diff": "compare two checkpoints",
    "convert": "write a checkpoint in another format",
    "merge": "write a checkpoint of many files as one",
    "reshard": "write a checkpoint for another number of ranks",
    "shapes": "write a model's parameter shapes, for --shapes (FSDP1 LOCAL_STATE_DICT)",
}
_OWN = {"diagnose": _diagnose, "plan": plan_command}  # need no extra
_NEEDED = ("click", "rich")  # by _TOOLS


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in _TOOLS:
        _use_tool(arguments)
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.command == "migrate":
        sys.exit(command.migrate(given, parser.error))
    if given.command in _OWN:
        sys.exit(_OWN[given.command].main(given))
    if not given.program:
        parser.error("run: expected a program, got nothing; try: run train.py, or: run -m module")
    if not given.module and not os.path.exists(given.program[0]):
        parser.error(f"run: there is no file {given.program[0]!r} in {os.getcwd()}")
    install(fix_clients=given.fix_clients)
    target, *rest = given.program
    if given.module:
        sys.argv = [target, *rest]
        sys.path[0] = os.getcwd()
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [target, *rest]
        sys.path[0] = os.path.dirname(os.path.abspath(target))
        runpy.run_path(target, run_name="__main__")


def _use_tool(arguments: list[str]) -> NoReturn:
    """Run a checkpoint command and exit with its status."""
    if not all(map(_is_installed, _NEEDED)):
        print(
            f"{_program()} {arguments[0]} needs {' and '.join(_NEEDED)}: "
            "pip install 'fsdp_compat[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    try:
        from .checkpoint._tools.commands import commands
    except KeyboardInterrupt:  # while modules are imported, which takes seconds
        sys.exit(130)
    commands.main(arguments, prog_name=_program())


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # sys.modules blocks the import
        return False


def _program() -> str:
    """Return the command that the user typed."""
    name = os.path.basename(sys.argv[0])
    return "fsdp-compat" if name.startswith("fsdp-compat") else "python -m fsdp_compat"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_program(),
        description="fsdp-compat and python -m fsdp_compat are the same.",
        epilog="Each command has --help, with an example.",
    )
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run a program with fsdp_compat instead of torch.distributed.fsdp",
        description="Run an unchanged Python program with fsdp_compat instead of "
        "torch.distributed.fsdp. See fsdp_compat.install().",
        epilog="torchrun --nproc-per-node 2 -m fsdp_compat run train.py --lr 1e-4\n"
        "accelerate launch --module fsdp_compat run train.py\n\n"
        "FSDP_COMPAT_LOG=install logs replacements and the private names that the program reads.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument(
        "--no-fix-clients",
        dest="fix_clients",
        action="store_false",
        help="do not fix bugs of client libraries",
    )
    run.add_argument("-m", dest="module", action="store_true", help="the program is a module")
    run.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="program ...", help="and its arguments"
    )
    migrate = commands.add_parser("migrate", help="rewrite source that uses torch's FSDP, or DDP")
    command.add_arguments(migrate)
    diagnose = commands.add_parser(
        "diagnose",
        help="say why ranks wait, from what FSDP_COMPAT_BLACK_BOX kept",
        description="Compare what the ranks of a run did last. The run must have had "
        "FSDP_COMPAT_BLACK_BOX=FOLDER in its environment; it may still run, or have been killed.",
        epilog="FSDP_COMPAT_BLACK_BOX=/dev/shm/box torchrun --nproc-per-node 2 train.py\n"
        "fsdp-compat diagnose /dev/shm/box --trace out.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _diagnose.add_arguments(diagnose)
    plan = commands.add_parser(
        "plan",
        help="show the memory and traffic of a step, without GPU and process group",
        description="Print what fsdp_compat.plan says of a model.",
        epilog=plan_command.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan_command.add_arguments(plan)
    for name, text in _TOOLS.items():  # only listed here: `main` runs them
        commands.add_parser(name, help=text, add_help=False)
    return parser


if __name__ == "__main__":
    main()
