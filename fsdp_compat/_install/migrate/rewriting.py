"""One text in, one text out."""

from __future__ import annotations

import libcst as cst

from .bindings import Bindings
from .findings import Migrated
from .fsdp_imports import rewrite_fsdp_imports
from .new_imports import Imports
from .optimizers import Optimizers
from .places import Places
from .source import Source
from .state import State
from .uses import Uses
from .wrapping import Wrapping


def rewrite(text: str, path: str) -> Migrated:
    """Migrate the text of one file. Raises SyntaxError if it is not Python, ValueError if it
    cannot be handled."""
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    try:
        source = Source(text.removeprefix(mark), path)
        rewrite_fsdp_imports(source)
        state, wraps = _rewrite_ddp(source)
        after = mark + source.result()
    except cst.ParserSyntaxError as error:
        raise SyntaxError(error.message, (path, error.raw_line, error.raw_column, "")) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return Migrated(path, text, after, source.left, source.notes, state.suspects, wraps)


def _rewrite_ddp(source: Source) -> tuple[State, int]:
    bindings = Bindings(source)
    places, imports = Places(source, bindings), Imports(source)
    wrapping = Wrapping(source, places, imports)
    wrapping.find()
    places.follow_models()
    optimizers = Optimizers(source, places, bindings)
    optimizers.find()
    state = State(source, places, optimizers, wrapping)
    state.rewrite()
    Uses(source, places, imports, state, wrapping).rewrite()
    state.report_guarded_functions()
    wrapping.rewrite_tests()
    imports.write()
    return state, len(wrapping.calls)
