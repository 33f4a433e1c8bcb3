"""The hunt, short: fixed seeds over every schedule. `make hunt` runs it at length."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hunt.hunter import hunt
from tests.hunt.setups import MODELS, SCHEDULES, draw

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # handles are dropped on purpose

OPERATIONS = 700


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_byte_that_a_step_may_read_is_right(tmp_path: Path, schedule: str, model: str) -> None:
    """Random operations of an engine with many habits; then every slot is free and the device has all back."""
    hunter = hunt(draw(7, schedule, model, False), OPERATIONS, str(tmp_path))
    assert hunter.outcomes["closed"] > 20


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loss_is_named_and_a_refused_call_has_changed_nothing(tmp_path: Path, schedule: str, seed: int) -> None:
    """Driver calls fail, file transfers fail, end short or hang past their limit; afterwards all is as if nothing had been."""
    hunter = hunt(draw(seed, schedule, None, True), 900, str(tmp_path))
    assert hunter.disturbed
