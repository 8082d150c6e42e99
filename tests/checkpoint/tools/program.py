"""The commands of fsdp-compat, in this process."""

from __future__ import annotations

import contextlib
import io
from typing import Any, NamedTuple

import pytest

from fsdp_compat import __main__


class Result(NamedTuple):
    """What a command printed, and its exit status."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def run(*arguments: Any) -> Result:
    """Run a command; an error that it does not report itself is raised."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
        pytest.raises(SystemExit) as end,
    ):
        __main__.main([str(argument) for argument in arguments])
    return Result(end.value.code or 0, out.getvalue(), err.getvalue())  # type: ignore[arg-type]
