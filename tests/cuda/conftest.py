"""The same tests on the CUDA driver over the stand-in, everywhere, and over the real bindings, where there is a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kv_cache_manager_v2.extras.cuda import CudaDriver
from tests.extras.cuda_standin import StandIn


@pytest.fixture(params=["stand-in", pytest.param("gpu", marks=pytest.mark.cuda)])
def driver(request: pytest.FixtureRequest) -> Iterator[CudaDriver]:
    """A driver that must have got everything back when the test ends."""
    if request.param == "gpu":
        made = CudaDriver()
        yield made
        made.close()
        return
    scene = StandIn()
    made = CudaDriver(bindings=scene.module())
    try:
        yield made
        made.close()
        assert scene.held() == []
        assert scene.faults == []
    finally:
        scene.close()
