"""Several threads, each with requests and streams of its own, on one manager."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hunt.crew import crew
from tests.hunt.setups import SCHEDULES, draw

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_threads_that_share_a_manager_leave_every_byte_right(tmp_path: Path, schedule: str, seed: int) -> None:
    """Whatever they do to each other's pages through the manager; every slot is accounted for at the end."""
    captain = crew(draw(seed, schedule, None, False), str(tmp_path), 3, 250)
    assert captain.outcomes["closed"] > 20
