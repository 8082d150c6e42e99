"""``python -m fsdp_compat run``: a program that uses torch's FSDP runs on fsdp_compat instead.
``python -m fsdp_compat migrate``: its source is rewritten."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from ._install import install
from ._install.migrate import command

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.command == "migrate":
        sys.exit(command.migrate(given, parser.error))
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fsdp_compat")
    commands = parser.add_subparsers(required=True, dest="command", metavar="{run,migrate}")
    run = commands.add_parser(
        "run",
        help="run a program, with fsdp_compat in the place of torch.distributed.fsdp",
        description="Run a Python program, unchanged, with fsdp_compat in the place of "
        "torch.distributed.fsdp. See fsdp_compat.install().",
        epilog="torchrun --nproc-per-node 2 -m fsdp_compat run train.py --lr 1e-4\n"
        "accelerate launch --module fsdp_compat run train.py\n\n"
        "FSDP_COMPAT_LOG=install logs what is replaced, and which private names the program reads.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument(
        "--no-fix-clients",
        dest="fix_clients",
        action="store_false",
        help="leave defects of client libraries as they are",
    )
    run.add_argument("-m", dest="module", action="store_true", help="the program is a module")
    run.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="program ...", help="and its arguments"
    )
    migrate = commands.add_parser("migrate", help="rewrite source that uses torch's FSDP, or DDP")
    command.add_arguments(migrate)
    return parser


if __name__ == "__main__":
    main()
