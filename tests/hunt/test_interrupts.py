"""Ctrl-C inside of the manager's calls, at chosen places and driver calls. `make hunt` interrupts at length, by a timer too."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kv_cache_manager_v2 import build_info
from tests.hunt.interrupts import Calls, InterruptedHunter, Places, Timer, follow
from tests.hunt.setups import MODELS, SCHEDULES, draw

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # handles are dropped on purpose
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # interrupts strike in finalisers too
]


@pytest.mark.skipif(build_info().compiled, reason="compiled code has no places that can be counted")
@pytest.mark.parametrize("seed", range(12))
def test_an_interrupt_at_any_place(tmp_path: Path, seed: int) -> None:
    """The manager works afterwards, or says that it is poisoned and can be shut down; no byte is wrong."""
    rng = random.Random(seed)
    source = Places(rng.sample(range(40_000), 3))
    follow(InterruptedHunter(draw(seed, "eager", MODELS[seed % len(MODELS)], False), str(tmp_path), source), 300)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(6))
def test_an_interrupt_after_any_driver_call(tmp_path: Path, seed: int, schedule: str) -> None:
    """The same, where the device has done what it was asked to, and the manager does not know."""
    setup = draw(seed, schedule, MODELS[seed % len(MODELS)], False, handles_return=False)
    numbers = random.Random(seed).sample(range(1000), 20)
    follow(InterruptedHunter(setup, str(tmp_path), Calls(numbers, setup)), 200)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(2))
def test_a_signal_at_any_time(tmp_path: Path, seed: int, schedule: str) -> None:
    """On the compiled build it is handled where the package calls interpreted code, waits, or returns."""
    rng = random.Random(seed)
    source = Timer(lambda: rng.random() ** 2 * 0.001 if rng.random() < 0.3 else 0.0)
    follow(InterruptedHunter(draw(seed, schedule, MODELS[seed], False), str(tmp_path), source), 200)
