"""Numbers and names as people read them."""

from __future__ import annotations

import pytest

pytest.importorskip("rich")

from fsdp_compat._text import nbytes_text, shown
from fsdp_compat.checkpoint._tools.tables import ranks_text


def test_numbers_and_names_as_people_read_them() -> None:
    sizes = {0: "0 B", 999: "999 B", 1000: "1.00 kB", 9994: "9.99 kB", 9996: "10.0 kB"}
    sizes |= {99_960: "100 kB", 999_499: "999 kB", 999_501: "1.00 MB", 10**19: "10000 PB"}
    assert {nbytes: nbytes_text(nbytes) for nbytes in sizes} == sizes
    assert ranks_text([3, 0, 1, 2, 7, 9, 8]) == "0-3, 7-9" and ranks_text([]) == ""
    assert shown("é漢\ud800\x7f\u2028") == "é漢\\ud800\\x7f\\u2028"
