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
    ended = starve(40, 4, 150)
    assert set(ended) <= WELL, ended
    assert ended["calls failed"] + ended["poisoned"] > 0, ended
