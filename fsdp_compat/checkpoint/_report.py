"""What a load with ``strict=False`` did not take, and what it left as it was."""

from __future__ import annotations

import dataclasses

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
