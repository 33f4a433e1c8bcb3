"""A sample of child processes whose calls find no memory. `make hunt` runs many."""

from __future__ import annotations

import pytest

from kv_cache_manager_v2.build import COMPILED
from tests.hunt.starving import WELL, starve

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # handles are dropped on purpose


@pytest.mark.skipif(
    COMPILED, reason="few calls of compiled code fail in a short run; tests/manager/test_no_memory.py has each of them"
)
def test_a_call_without_memory_changes_nothing_or_poisons() -> None:
    """No child ends in any other way, or hangs."""
    for seed in range(40, 80, 4):  # what a child has left over may be enough for all of its calls
        ended = starve(seed, 4, 150)
        assert set(ended) <= WELL, ended
        if ended["calls failed"] + ended["poisoned"] > 0:
            return
    pytest.fail(f"no call of any child found too little memory: {ended}")
