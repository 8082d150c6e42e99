"""What ``install()`` replaces and what programs read, for ``FSDP_COMPAT_LOG=install``."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("fsdp_compat.install")  # replacements, and what programs read
_seen: set[tuple[str, str]] = set()


def begin() -> None:
    """Show the log on stderr if the environment asks for it."""
    asked = "install" in os.environ.get("FSDP_COMPAT_LOG", "").replace(" ", "").split(",")
    if asked and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def read(module: str, name: str, reader: str) -> None:
    """Log, once for each reader, that a private name of a module of torch's FSDP was read."""
    if logger.isEnabledFor(logging.INFO) and (f"{module}.{name}", reader) not in _seen:
        _seen.add((f"{module}.{name}", reader))
        logger.info("private name %s.%s is read by %s", module, name, reader)
