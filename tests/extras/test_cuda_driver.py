"""The CUDA driver where only the stand-in can show it: what is missing, what fails, what is counted."""

from __future__ import annotations

import builtins
import gc
import sys
import threading

import pytest

from kv_cache_manager_v2.errors import (
    ConfigError,
    CuError,
    DeviceUnavailableError,
    HostRegistrationError,
    LogicError,
    OutOfMemoryError,
)
from kv_cache_manager_v2.extras.cuda import CudaDriver
from kv_cache_manager_v2.ids import Stream
from tests.extras.conftest import Make
from tests.extras.cuda_standin import CONTEXT, StandIn
from tests.extras.cuda_standin_types import CUresult
from tests.extras.helpers import DeviceBuffer, HostBuffer, TemporaryFile, hold, pattern


@pytest.mark.parametrize("option", ["device", "io_threads", "transfer_timeout", "move"])
@pytest.mark.parametrize("value", [None, "1", True, float("nan"), -1, 1 << 70, [1]])
def test_wrong_options_are_refused_before_a_device_is_touched(option: str, value: object) -> None:
    """With the option's name, and no context taken."""
    if option == "transfer_timeout" and value == 1 << 70:
        return  # a long time, but a time
    scene = StandIn()
    with pytest.raises(ConfigError, match=option):
        CudaDriver(bindings=scene.module(), **{option: value})  # type: ignore[arg-type]
    assert scene.held() == []
    scene.close()


class TestUnavailable:
    @pytest.mark.parametrize(
        ("scene", "reason"),
        [
            (StandIn(library=False), "cannot be found"),
            (StandIn(devices=0), "CUDA_ERROR_NO_DEVICE"),
        ],
        ids=["no library", "no device"],
    )
    def test_the_error_names_both_ways_out(self, scene: StandIn, reason: str) -> None:
        """Whether the driver library is missing (raised) or sees no device (returned)."""
        with pytest.raises(DeviceUnavailableError) as caught:
            CudaDriver(bindings=scene.module())
        text = str(caught.value)
        assert reason in text
        assert "cuda extra" in text
        assert "EmulatedDriver()" in text
        assert "KVCM_DEVICE=emulated" in text

    def test_a_missing_package_is_the_same_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without cuda-bindings nothing else is tried."""
        real_import = builtins.__import__

        def refuse(name: str, *args: object, **kwargs: object) -> object:
            if name.split(".")[0] == "cuda":
                raise ImportError(f"No module named {name!r}")
            return real_import(name, *args, **kwargs)  # type: ignore[arg-type]

        for name in [name for name in sys.modules if name.split(".")[0] == "cuda"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "cuda", None)
        monkeypatch.setattr(builtins, "__import__", refuse)
        with pytest.raises(DeviceUnavailableError, match=r"cuda\.bindings\.driver cannot be imported.*KVCM_DEVICE=emulated"):
            CudaDriver()

    def test_an_ordinal_beyond_the_visible_devices(self) -> None:
        """The error says how many there are."""
        with pytest.raises(DeviceUnavailableError, match="device 2 was requested and 2 are visible"):
            CudaDriver(2, bindings=StandIn(devices=2).module())

    def test_a_device_without_virtual_memory_management(self) -> None:
        """Without it no address could stay where it is."""
        scene = StandIn()
        scene.attributes[102] = 0
        with pytest.raises(DeviceUnavailableError, match="no virtual memory management"):
            CudaDriver(bindings=scene.module())

    def test_a_failure_halfway_leaves_nothing_behind(self) -> None:
        """The context is released again."""
        scene = StandIn()
        scene.fail("cuMemHostAlloc", CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        with pytest.raises(OutOfMemoryError, match="cuMemHostAlloc"):
            CudaDriver(bindings=scene.module())
        assert scene.held() == []

    @pytest.mark.parametrize("options", [{"device": -1}, {"io_threads": 0}, {"transfer_timeout": 0.0}])
    def test_arguments_that_can_never_work(self, options: dict[str, int]) -> None:
        """ConfigError before anything is initialised."""
        scene = StandIn()
        with pytest.raises(ConfigError):
            CudaDriver(bindings=scene.module(), **options)  # type: ignore[arg-type]
        assert scene.calls["cuInit"] == 0


class TestContext:
    def test_the_primary_context_is_retained_once_and_released(self, make: Make) -> None:
        """The thread that made the driver is left without a current context, as it was."""
        scene, driver = make()
        assert scene.retained[0] == 1
        assert int(scene.cuCtxGetCurrent()[1] or 0) == 0
        driver.close()
        assert scene.retained[0] == 0

    def test_a_current_context_of_the_device_is_used(self) -> None:
        """An engine that has made its own keeps the only reference."""
        scene = StandIn()
        api = scene.module()
        api.cuInit(0)
        api.cuDevicePrimaryCtxRetain(0)
        api.cuCtxPushCurrent(CONTEXT)
        driver = CudaDriver(bindings=api)
        assert scene.retained[0] == 1
        driver.close()
        assert scene.retained[0] == 1
        scene.close()

    def test_another_device_that_is_current_is_neither_used_nor_disturbed(self) -> None:
        """Each call pushes its own context and pops it; the default stream is the driver's device's."""
        scene = StandIn(devices=2)
        api = scene.module()
        api.cuInit(0)
        api.cuDevicePrimaryCtxRetain(1)
        api.cuCtxPushCurrent(CONTEXT + 1)
        driver = CudaDriver(0, bindings=api)
        event = driver.create_event()
        driver.record_event(event, Stream(0))
        driver.synchronize()
        assert driver.query_event(event)
        assert int(api.cuCtxGetCurrent()[1]) == CONTEXT + 1
        driver.destroy_event(event)
        driver.close()
        assert scene.held() == ["context 0x1"]
        scene.close()

    def test_threads_without_a_context_can_use_the_driver(self, make: Make) -> None:
        """Nothing has to be prepared on a thread."""
        _scene, driver = make()
        problems: list[Exception] = []

        def use() -> None:
            try:
                stream, event = driver.create_stream(), driver.create_event()
                driver.record_event(event, stream)
                driver.synchronize_event(event)
                driver.destroy_event(event)
                driver.destroy_stream(stream)
            except Exception as error:
                problems.append(error)

        threads = [threading.Thread(target=use) for _i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []


class TestBatches:
    @pytest.mark.parametrize(
        ("version", "bindings", "batched"),
        [
            (13000, 13050, True),
            (12090, 13050, False),
            (12090, 12090, True),
            (12080, 12080, True),
            (12040, 12090, False),
            (12040, 12060, False),
        ],
    )
    def test_one_call_where_driver_and_bindings_have_it(self, make: Make, version: int, bindings: int, batched: bool) -> None:
        """Else one call a copy; the bytes are the same. Bindings of CUDA 13 call an entry point that drivers of 12 lack."""
        scene, driver = make(StandIn(version=version, bindings=bindings))
        host, device, stream = HostBuffer(driver, 8192), DeviceBuffer(driver, 1), driver.create_stream()
        host.write(pattern(400))
        driver.copy_batch(stream, [device.address + 100 * i for i in range(4)], [host.address + 100 * i for i in range(4)], 100)
        driver.copy(stream, host.address + 4096, device.address, 400)
        driver.synchronize()
        assert host.read(400, at=4096) == pattern(400)
        assert scene.calls["cuMemcpyBatchAsync"] == int(batched)
        assert scene.calls["cuMemcpyAsync"] == (1 if batched else 5)
        assert ("batched copies" in driver.describe()) == batched
        driver.destroy_stream(stream)
        device.close()
        host.close()


class TestErrors:
    def test_out_of_device_memory(self, make: Make) -> None:
        """OutOfMemoryError names the call; nothing is held."""
        scene, driver = make(StandIn(memory=4 << 20))
        chunk = driver.create_chunk(4 << 20)
        with pytest.raises(OutOfMemoryError, match="cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY"):
            driver.create_chunk(2 << 20)
        driver.destroy_chunk(chunk)
        assert "chunk" not in " ".join(scene.held())

    def test_host_memory_that_cannot_be_pinned(self, make: Make) -> None:
        """HostRegistrationError names the size, the limit and what to do."""
        _scene, driver = make(StandIn(pinnable=8192))
        first = HostBuffer(driver, 8192)
        with pytest.raises(HostRegistrationError) as caught:
            HostBuffer(driver, 4096)
        text = str(caught.value)
        assert "4096 bytes of host memory" in text
        assert "8192 bytes are registered already" in text
        assert "RLIMIT_MEMLOCK is" in text
        assert "ulimit -l" in text
        first.close()

    def test_any_other_result_is_a_cu_error(self, make: Make) -> None:
        """With the driver's code, its name and the call."""
        scene, driver = make()
        scene.fail("cuStreamCreate", CUresult.CUDA_ERROR_NOT_PERMITTED)
        with pytest.raises(CuError, match=r"cuStreamCreate failed: CUDA_ERROR_NOT_PERMITTED \(800\)") as caught:
            driver.create_stream()
        assert caught.value.error_code == 800
        assert caught.value.call == "cuStreamCreate"

    def test_memory_for_network_cards_is_given_up_where_it_is_refused(self, make: Make) -> None:
        """The device says that it can, the system that it may not: the chunk is made without, and the next at once."""
        scene, driver = make()
        scene.fail("cuMemCreate", CUresult.CUDA_ERROR_NOT_PERMITTED)
        chunks = [driver.create_chunk(2 << 20) for _i in range(2)]
        assert scene.calls["cuMemCreate"] == 3
        for chunk in chunks:
            driver.destroy_chunk(chunk)

    def test_a_failed_record_leaves_no_event_behind(self, make: Make) -> None:
        """A transfer that could not be submitted holds nothing."""
        scene, driver = make()
        file = TemporaryFile(b"x")
        scene.fail("cuEventRecord", CUresult.CUDA_ERROR_INVALID_VALUE)
        with pytest.raises(CuError, match="cuEventRecord"):
            driver.read_file(Stream(0), file.fd, 0, 0, 1)
        file.close()


class TestClose:
    def test_what_leaked_is_named_and_given_back(self) -> None:
        """LogicError lists it; afterwards the device holds nothing of ours, and a second close does nothing."""
        scene = StandIn()
        driver = CudaDriver(bindings=scene.module())
        granule = driver.granularity()
        host, base, chunk = HostBuffer(driver, 4096), driver.reserve(granule), driver.create_chunk(granule)
        driver.map_chunk(base, granule, chunk)
        stream, event = driver.create_stream(), driver.create_event()
        with pytest.raises(LogicError) as caught:
            driver.close()
        text = str(caught.value)
        for leak in (
            f"stream {stream:#x}",
            f"event {event:#x}",
            f"host registration at {host.address:#x} (4096 bytes)",
            f"mapping at {base:#x} ({granule} bytes)",
            f"chunk {chunk:#x}",
            f"reservation at {base:#x}",
        ):
            assert leak in text
        assert scene.held() == []
        driver.close()
        scene.close()

    def test_gates_that_were_not_released_are_leaks_too(self) -> None:
        """Named with the file range."""
        scene, file = StandIn(), TemporaryFile(b"12345678")
        driver = CudaDriver(bindings=scene.module())
        host = HostBuffer(driver, 4096)
        driver.read_file(Stream(0), file.fd, 0, host.address, 8)
        driver.synchronize()
        host.close()
        with pytest.raises(LogicError, match="gate 1 of the read of 8 bytes at offset 0"):
            driver.close()
        assert scene.held() == []
        file.close()
        scene.close()

    def test_a_lost_device_does_not_keep_the_rest_from_being_given_back(self) -> None:
        """The error says what the device said."""
        scene = StandIn()
        driver = CudaDriver(bindings=scene.module())
        scene.fail("cuCtxSynchronize", CUresult.CUDA_ERROR_NOT_PERMITTED)
        driver.create_stream()
        with pytest.raises(LogicError, match="cuCtxSynchronize failed: CUDA_ERROR_NOT_PERMITTED"):
            driver.close()
        assert [kind.split()[0] for kind in scene.held()] == ["pinned"]  # a stream may still look at the gate words
        scene.close()

    def test_a_closed_driver_refuses_work(self, make: Make) -> None:
        """LogicError, not a call on a context that is gone."""
        _scene, driver = make()
        driver.close()
        with pytest.raises(LogicError, match="is closed"):
            driver.create_stream()
        with pytest.raises(LogicError, match="is closed"):
            driver.copy(Stream(0), 1, 2, 3)


class TestPools:
    def test_events_are_pooled(self, make: Make) -> None:
        """Used one after the other, a hundred events are one of the driver's, made without timing."""
        scene, driver = make()
        for _i in range(100):
            event = driver.create_event()
            driver.record_event(event, Stream(0))
            driver.synchronize_event(event)
            driver.destroy_event(event)
        assert scene.calls["cuEventCreate"] == 1

    def test_a_launched_function_lives_until_it_ran(self, make: Make) -> None:
        """Nothing else refers to it, and the collector has run."""
        _scene, driver = make()
        stream, go, seen = driver.create_stream(), threading.Event(), list[str]()
        hold(driver, stream, go)
        driver.launch(stream, lambda: seen.append("ran"))
        gc.collect()
        go.set()
        driver.synchronize()
        assert seen == ["ran"]
        driver.destroy_stream(stream)

    def test_a_launch_that_fails_forgets_the_function(self, make: Make) -> None:
        """It must not run with some later launch."""
        scene, driver = make()
        seen: list[int] = []
        scene.fail("cuLaunchHostFunc", CUresult.CUDA_ERROR_NOT_SUPPORTED)
        with pytest.raises(CuError, match="cuLaunchHostFunc"):
            driver.launch(Stream(0), lambda: seen.append(1))
        driver.launch(Stream(0), lambda: seen.append(2))
        driver.synchronize()
        assert seen == [2]
