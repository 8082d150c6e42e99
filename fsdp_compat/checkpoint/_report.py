"""What a load with ``strict=False`` did not take, and what it left as it was."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

from .. import errors
from ..errors import CheckpointError
from ._texts import joined


@dataclasses.dataclass
class LoadReport:
    """What a load with ``strict=False`` did not take. Pass an empty one as ``report``; the call
    fills it before it changes anything.

    It is an argument because ``load`` returns the ``extra`` of the checkpoint, whose type must not
    depend on a flag. Without one, a warning has the same text, so that a load in which something
    was left never goes unnoticed. True in a condition if anything was left; ``str`` is a summary.
    """

    # In the model, not in the checkpoint: unchanged.
    missing: list[str] = dataclasses.field(default_factory=list)
    # In the checkpoint, not in the model: ignored.
    unexpected: list[str] = dataclasses.field(default_factory=list)
    # In both, but of different shapes or kinds; by name, in which way. Unchanged.
    mismatched: dict[str, str] = dataclasses.field(default_factory=dict)
    # Parameters of the optimizer whose state is unchanged.
    state_kept: list[str] = dataclasses.field(default_factory=list)
    # Parameter groups of the optimizer whose settings are unchanged, by number, and why.
    settings_kept: dict[int, str] = dataclasses.field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in dataclasses.fields(self))

    def __str__(self) -> str:
        lines = [
            ("missing in the checkpoint", self.missing),
            ("not in the model", self.unexpected),
            ("different", [f"{name}: {how}" for name, how in self.mismatched.items()]),
            ("optimizer state kept", self.state_kept),
            ("settings kept", [f"group {n}: {why}" for n, why in self.settings_kept.items()]),
        ]
        found = [
            f"{what} ({len(names)}): {joined(names, 20, ', ')}" for what, names in lines if names
        ]
        return "; ".join(found) or "everything was loaded"


def problems_in(report: LoadReport) -> list[str]:
    """Return what a strict load refuses, one text per name."""
    return [
        *(f"missing: {name}" for name in report.missing),
        *(f"not in the model: {name}" for name in report.unexpected),
        *(f"{name}: {how}" for name, how in report.mismatched.items()),
    ]


def deliver(
    found: LoadReport, report: LoadReport | None, strict: bool, call: str, path: object
) -> None:
    """Copy what was found to the caller's report or, without one, warn if anything was left. To be
    called by the function that the user calls."""
    if report is not None:
        for field in dataclasses.fields(found):
            setattr(report, field.name, getattr(found, field.name))
    elif found and not strict:
        warnings.warn(f"{call} of {path} with strict=False: {found}", stacklevel=3)


def require_report(call: str, strict: Any, report: Any) -> None:
    """Raise UsageError for arguments of another type."""
    errors.require_bools(call, strict=strict)
    if report is not None and not isinstance(report, LoadReport):
        raise errors.wrong_type("report", "a LoadReport, or None", report, call)


def nothing_fits(path: object, report: LoadReport) -> CheckpointError:
    """Return the error for a checkpoint that has nothing in common with the model."""
    return CheckpointError.of(
        "Nothing in the checkpoint fits the model.",
        expected="at least one name with the same shape in both, also with strict=False",
        got=joined(problems_in(report), 20, "; "),
        where=str(path),
        fix="check that it is the checkpoint of this model, and compare the names",
    )
