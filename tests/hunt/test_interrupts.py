"""Ctrl-C inside of the manager's calls, at chosen places. `make hunt` interrupts at length, by a timer too."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kv_cache_manager_v2 import build_info
from tests.hunt.interrupts import InterruptedHunter, Places, follow
from tests.hunt.setups import MODELS, draw

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
