"""The CUDA driver tells streams apart, where the library can, and processes."""

from __future__ import annotations

import os

import pytest

from kv_cache_manager_v2.errors import LogicError
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


def test_a_forked_child_is_refused_and_may_close_the_driver() -> None:
    scene = StandIn()
    driver = CudaDriver(bindings=scene.module())
    stream = driver.create_stream()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for call, arguments in (("create_stream", ()), ("copy", (stream, 1, 2, 3)), ("synchronize", ())):
                with pytest.raises(LogicError, match=r"os\.fork"):
                    getattr(driver, call)(*arguments)
            driver.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    driver.destroy_stream(stream)
    driver.close()
    scene.close()


def test_a_library_that_cannot_tell_streams_apart_says_so() -> None:
    scene = StandIn()
    module = scene.module()
    del module.cuStreamGetId
    driver = CudaDriver(bindings=module)
    assert driver.stream_identity(Stream(0)) == 0
    driver.close()
    scene.close()
