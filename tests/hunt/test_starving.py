"""A sample of child processes whose calls find no memory. `make hunt` runs many."""

from __future__ import annotations

import pytest

from tests.hunt.starving import WELL, starve

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # handles are dropped on purpose


def test_a_call_without_memory_changes_nothing_or_poisons() -> None:
    """On the compiled build too: where mypyc's code would end the process, it takes spare objects."""
    ended = starve(40, 4, 150)
    assert set(ended) <= WELL, ended
    assert ended["calls failed"] + ended["poisoned"] > 0, ended
