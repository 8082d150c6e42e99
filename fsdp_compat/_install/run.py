"""``fsdp-compat run``: run an unchanged program on fsdp_compat."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from . import install

DESCRIPTION = """Run an unchanged Python program with fsdp_compat instead of
torch.distributed.fsdp. See fsdp_compat.install()."""
EPILOG = """torchrun --nproc-per-node 2 -m fsdp_compat run train.py --lr 1e-4
accelerate launch --module fsdp_compat run train.py

FSDP_COMPAT_LOG=install logs replacements and the private names that the program reads."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    text = "do not fix bugs of client libraries"
    parser.add_argument("--no-fix-clients", dest="fix_clients", action="store_false", help=text)
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module")
    text = "and its arguments"
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="program ...", help=text)


def main(given: argparse.Namespace) -> int:
    """Run ``given.program`` as __main__; return the exit status: 2 without such a program."""
    target, *rest = given.program or [""]
    problem = "" if given.module else f"there is no file {target!r} in {os.getcwd()}"
    if not target:
        problem = "expected a program, got nothing; try: run train.py, or: run -m module"
    if not target or not (given.module or os.path.exists(target)):
        print(f"run: {problem}", file=sys.stderr)
        return 2
    install(fix_clients=given.fix_clients)
    sys.argv = [target, *rest]
    if given.module:
        sys.path[0] = os.getcwd()
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(target))
        runpy.run_path(target, run_name="__main__")
    return 0
