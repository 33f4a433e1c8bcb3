"""Fixtures of the storage room's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.storage_rig import StorageRig

NewRig = Callable[..., StorageRig]


@pytest.fixture
def new_rig(tmp_path: Path) -> Iterator[NewRig]:
    """Makes rigs with their files in `tmp_path`. All are checked and closed after the test."""
    made: list[StorageRig] = []

    def make(*arguments: Any, **named: Any) -> StorageRig:
        made.append(StorageRig(*arguments, **{"path": str(tmp_path), **named}))
        return made[-1]

    yield make
    for rig in made:
        rig.check()
        rig.close()
