"""The commands of fsdp-compat, in this process."""

from __future__ import annotations

import contextlib
import io
from typing import Any, NamedTuple

import pytest

from fsdp_compat.__main__ import main


class Result(NamedTuple):
    """What a command printed, and its exit status."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


class _Output(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def run(*arguments: Any, on_terminal: bool = False) -> Result:
    """Run a command; an error that it does not report itself is raised."""
    with (
        contextlib.redirect_stdout(_Output(on_terminal)) as out,
        contextlib.redirect_stderr(_Output(on_terminal)) as err,
        pytest.raises(SystemExit) as end,
    ):
        main([str(argument) for argument in arguments])
    return Result(end.value.code or 0, out.getvalue(), err.getvalue())  # type: ignore[arg-type]
