"""The command ``fsdp-compat``, which is also ``python -m fsdp_compat``: which file has each of its
commands, and their exit status. Nothing is imported before the command is known."""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable
from typing import NoReturn

from ._text import shown
from ._version import __version__

__all__ = ["main"]

# Each module, or object in it, has add_arguments(parser), and main(given), which returns a status.
_TOOLS = ".checkpoint._tools.commands"
_FILES = {
    "inspect": (f"{_TOOLS}:inspect_command", "show what a checkpoint, or a run's folder, holds"),
    "verify": (f"{_TOOLS}:verify_command", "check that a checkpoint is complete and undamaged"),
    "diff": (f"{_TOOLS}:diff_command", "compare two checkpoints"),
    "convert": (f"{_TOOLS}:convert_command", "write a checkpoint in another format, or in part"),
}
_PROGRAMS = {
    "run": ("._install.run", "run a program with fsdp_compat instead of torch.distributed.fsdp"),
    "migrate": ("._migrate.command", "rewrite source that uses torch's FSDP, or DDP"),
    "diagnose": ("._diagnose", "say why ranks wait, from what FSDP_COMPAT_BLACK_BOX kept"),
    "plan": ("._plan.command", "show memory and traffic of a step, without GPU or process group"),
}
_COMMANDS = _FILES | _PROGRAMS

STATUS = """Exit status of all commands (run: of the program):
  0    fine
  1    it found something: a problem, a difference, a divergence, source left to migrate; or it
       failed: a checkpoint is damaged, refused or unreadable, or no plan can be made
  2    wrong usage: arguments, a target that exists, a missing package
  130  interrupted by Ctrl-C; nothing is left under a target's name
  141  the output was closed early, as by head"""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command, and exit with its status."""
    done = _status(sys.argv[1:] if arguments is None else arguments)
    sys.exit(done() if callable(done) else done)  # errors of a program that is run are its own


def _done(arguments: list[str]) -> int | Callable[[], int]:
    """Run the command and return its status, or for ``run`` the call that runs the program."""
    name, *rest = arguments or [""]
    if name in _COMMANDS:
        file, _, member = _COMMANDS[name][0].partition(":")
        command = importlib.import_module(file, __package__)
        command = getattr(command, member) if member else command
        parser = _Parser(
            prog=f"{_program()} {name}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(parser)
        parser.epilog = f"Examples:\n{textwrap.indent(parser.epilog or '', '  ')}\n\n{STATUS}"
        given = parser.parse_args(rest)
        if name == "run":
            return lambda: command.main(given)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # names and sources have any text
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = lambda text, *_, **__: _say(f"note: {str(text).splitlines()[0]}")
            return int(command.main(given))
    if name in ("-h", "--help", "help", "--version"):
        print(f"fsdp-compat {__version__}" if name == "--version" else _help())
        return 0
    print(_unknown(name) if name else _help(), file=sys.stderr)
    return 2


class _Parser(argparse.ArgumentParser):
    """Names the option that may have been meant."""

    def error(self, message: str) -> NoReturn:
        if found := re.match(r"unrecognized arguments: (--[\w-]+)", message):
            message += _did_you_mean(found[1], re.findall(r"--[\w-]+", self.format_help()))
        super().error(message)


def _status(arguments: list[str]) -> int | Callable[[], int]:
    """Return what ``_done`` does. Errors become a message on stderr; bugs keep their traceback."""
    try:
        try:
            return _done(arguments)
        finally:
            _flush()
    except BrokenPipeError:
        return 141
    except KeyboardInterrupt:
        _say("Interrupted.")
        return 130
    except OSError as error:
        from .errors import explain

        _say(
            explain(
                "A file cannot be read or written.",
                expected="access to it, and free disk space",
                got=error.strerror or str(error),
                where=str(error.filename or "the command"),
                fix="check the path, its permissions and the disk",
            )
        )
        return 1
    except Exception as error:
        from .errors import FsdpCompatError, UsageError

        if not isinstance(error, FsdpCompatError):
            raise
        _say(str(error))
        return 2 if isinstance(error, UsageError) else 1


def _flush() -> None:
    """Flush stdout. If that fails, it has no output later: Python would report it at exit."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _say(message: str) -> None:
    """Print to stderr. Content of files may be quoted in it."""
    for line in message.splitlines():
        print(shown(line), file=sys.stderr)


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(name, [*known], 1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def _unknown(name: str) -> str:
    return f"{_usage()}\n{_program()}: there is no command {name!r}{_did_you_mean(name, _COMMANDS)}"


def _usage() -> str:
    return f"usage: {_program()} COMMAND ..."


def _help() -> str:
    def listed(commands: dict[str, tuple[str, str]]) -> str:
        return "\n".join(f"    {name:10}{text}" for name, (_, text) in commands.items())

    return (
        f"{_usage()}\n\nCheckpoints, in one process without a GPU:\n{listed(_FILES)}\n\n"
        f"Programs:\n{listed(_PROGRAMS)}\n\n"
        "Each command has --help, with an example; --version prints the version.\n"
        f"fsdp-compat is python -m fsdp_compat.\n\n{STATUS}"
    )


def _program() -> str:
    """Return the command that the user typed."""
    name = os.path.basename(sys.argv[0])
    return "fsdp-compat" if name.startswith("fsdp-compat") else "python -m fsdp_compat"


if __name__ == "__main__":
    main()
