"""The CUDA driver tells streams apart, where the library can."""

from __future__ import annotations

from kv_cache_manager_v2.extras.cuda import CudaDriver
from kv_cache_manager_v2.ids import Stream
from tests.extras.cuda_standin import StandIn
from tests.extras.cuda_standin_types import CUresult


def test_every_stream_has_a_number_of_its_own() -> None:
    """Also the default streams; a handle that stands for nothing has none, and a closed driver says nothing."""
    scene = StandIn()
    driver = CudaDriver(bindings=scene.module())
    streams = [Stream(0), driver.create_stream(), driver.create_stream()]
    numbers = [driver.stream_identity(stream) for stream in streams]
    assert min(numbers) > 0
    assert len(set(numbers)) == 3
    assert numbers == [driver.stream_identity(stream) for stream in streams]
    assert driver.stream_identity(Stream(999_999)) == 0
    scene.fail("cuStreamGetId", CUresult.CUDA_ERROR_NOT_PERMITTED, times=2)
    assert driver.stream_identity(streams[1]) == 0
    for stream in streams[1:]:
        driver.destroy_stream(stream)
    driver.close()
    assert driver.stream_identity(Stream(0)) == 0
    scene.close()


def test_a_library_that_cannot_tell_streams_apart_says_so() -> None:
    scene = StandIn()
    module = scene.module()
    del module.cuStreamGetId
    driver = CudaDriver(bindings=module)
    assert driver.stream_identity(Stream(0)) == 0
    driver.close()
    scene.close()
