"""Fixtures of the tests of the CUDA driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kv_cache_manager_v2.extras.cuda import CudaDriver
from tests.extras.cuda_standin import StandIn

Made = tuple[StandIn, CudaDriver]
Make = Callable[..., Made]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes drivers over a scene; all are closed at the end, and everything that they allocated must be free."""
    made: list[Made] = []

    def build(scene: StandIn | None = None, **options: object) -> Made:
        scene = scene or StandIn()
        driver = CudaDriver(bindings=scene.module(), **options)  # type: ignore[arg-type]
        made.append((scene, driver))
        return scene, driver

    yield build
    for scene, driver in made:
        driver.close()
        assert scene.held() == []
        assert scene.faults == []
        scene.close()
