"""Fixtures of the storage room's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.storage.helpers import Rig


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    """Rigs that a test appends here are checked and closed after it."""
    made: list[Rig] = []
    yield made
    for rig in made:
        rig.check()
        rig.close()
