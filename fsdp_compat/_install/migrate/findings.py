"""What a migration did with a file, and what it left alone."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, order=True)
class Finding:
    """A place in a file, and what its owner has to know about it."""

    path: str
    line: int
    what: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what} — {self.why}; {self.fix}"


@dataclass
class Migrated:
    """The result for one file. ``left`` needs a person; ``notes`` are advice.

    suspects: places that need a person only if a model in them was wrapped in another file."""

    path: str
    before: str
    after: str
    left: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    suspects: list[Finding] = field(default_factory=list)
    wraps: int = 0  # DistributedDataParallel(...) that became FullyShardedDataParallel(...)

    @property
    def changed(self) -> bool:
        return self.before != self.after
