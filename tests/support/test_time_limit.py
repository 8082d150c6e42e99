"""Time limits of tests are longer where processes start slower, and never shorter."""

from __future__ import annotations

import pytest

from tests.support import time_limit
from tests.support.time_limit import limit_s


@pytest.mark.parametrize(("usual_s", "is_longer"), [(1e-6, True), (1e6, False)])
def test_a_limit_grows_where_a_process_starts_slower_than_usual(
    usual_s: float, is_longer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limit, "_QUIET_START_S", usual_s)
    time_limit._slowness.cache_clear()
    assert (limit_s(3.0) > 300.0) == is_longer
    assert limit_s(3.0) >= 3.0
    time_limit._slowness.cache_clear()
