"""``fsdp-compat plan``: print the plan of what a function of the user's returns."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

import torch

from .._progress import elapsing
from ..errors import FsdpCompatError, unusable
from .plan import plan

EPILOG = """def tiny():  # in job.py
    return {"model": Model(), "batch": (torch.zeros(8, 512),), "auto_wrap_policy": "auto"}

fsdp-compat plan job:tiny --world-size 8 --plot plan.png"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = "Print what fsdp_compat.plan says of a model.", EPILOG
    parser.add_argument(
        "function",
        help="module:function; it runs on the meta device and returns "
        "the arguments of fsdp_compat.plan as a dict",
    )
    parser.add_argument("--world-size", type=int, required=True, help="number of ranks")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw memory over the step")


def main(given: argparse.Namespace) -> int:
    """Print the plan; return the exit status: 2 if there is no such function."""
    module, _, name = given.function.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        print(f"expected module:function, got {given.function!r}: {error}", file=sys.stderr)
        return 2
    try:
        with elapsing(sys.stderr.isatty(), "simulating a step"):
            with torch.device("meta"):
                arguments = function()
            if not isinstance(arguments, dict):
                what, expected = f"What {given.function} returns", "the arguments of plan as a dict"
                fix = 'return {"model": model, "batch": batch}'
                raise unusable(what, expected, arguments, "fsdp-compat plan", fix)
            made = plan(world_size=given.world_size, **arguments)
    except FsdpCompatError as error:
        print(error, file=sys.stderr)
        return 1
    print(made)
    try:
        if given.plot is not None:
            made.plot(given.plot)
    except ModuleNotFoundError:
        print("--plot needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    return 0
