"""The commands of checkpoints, in this process."""

from __future__ import annotations

from typing import Any

from click.testing import CliRunner, Result

from fsdp_compat.checkpoint._tools import commands


def run(*arguments: Any) -> Result:
    """Run a command; an error that it does not report itself is raised."""
    result = CliRunner().invoke(commands.commands, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result
