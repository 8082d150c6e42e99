"""How ranks of one host exchange data, for the environment of ``run_ranks``, also in a run that
forces another way on all other tests:

    FSDP_COMPAT_SAME_HOST=messages pytest ...    # or counters
    FSDP_COMPAT_MAP_FROM=1 pytest ...            # pads shards to pages: tests that count elements
                                                 # of small models fail"""

from __future__ import annotations

import pytest

COPIED = {"FSDP_COMPAT_SAME_HOST": "counters"}
MESSAGES = {"FSDP_COMPAT_SAME_HOST": "messages"}
# Shards of any size are mapped.
MAPPED = {"FSDP_COMPAT_SAME_HOST": "mapped", "FSDP_COMPAT_MAP_FROM": "1"}
# No shards are: a rank waits where it gathers parameters, and each rank has parts of small ones.
NOT_MAPPED = {"FSDP_COMPAT_MAP_FROM": str(1 << 62)}

mapped_or_sent = pytest.mark.parametrize(
    "environment", [MAPPED, MESSAGES], ids=["mapped", "messages"]
)
copied_or_sent = pytest.mark.parametrize(
    "environment", [COPIED, MESSAGES], ids=["copied", "messages"]
)
