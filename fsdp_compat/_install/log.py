"""What ``install()`` replaces and what programs read, for ``FSDP_COMPAT_LOG=install``."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("fsdp_compat.install")
_READ = "private name %s.%s is read"
_seen: set[tuple[object, ...]] = set()


def _is_new(record: logging.LogRecord) -> bool:
    """False for a name that the same line has read before."""
    if record.msg != _READ:
        return True
    key = (record.args, record.pathname, record.lineno)
    is_new = key not in _seen
    _seen.add(key)
    return is_new


logger.addFilter(_is_new)


def begin() -> None:
    """Show the log on stderr if the environment asks for it."""
    asked = "install" in os.environ.get("FSDP_COMPAT_LOG", "").replace(" ", "").split(",")
    if asked and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s (%(pathname)s:%(lineno)d)"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def read(module: str, name: str) -> None:
    """Log, once for each line of code, that it reads a private name of a module of torch's FSDP."""
    logger.info(_READ, module, name, stacklevel=3)
