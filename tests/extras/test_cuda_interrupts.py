"""Ctrl-C while file transfers are given to the CUDA driver, on the stand-in: each is queued, and its gate known, or it is not."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from kv_cache_manager_v2.build import COMPILED
from kv_cache_manager_v2.device.driver import GATE_DONE
from kv_cache_manager_v2.errors import OutOfMemoryError
from kv_cache_manager_v2.extras.cuda import CudaDriver
from kv_cache_manager_v2.ids import Stream
from tests.extras.cuda_standin import StandIn
from tests.extras.helpers import HostBuffer, TemporaryFile
from tests.support.interrupts import interruptions

FILES = ("extras/cuda_io.py", "device/waiters.py", *(() if COMPILED else ("device/file_transfers.py",)))


def test_an_interrupted_submission_is_all_or_nothing_for_each_transfer() -> None:
    """Those that are queued end, and no gate is left behind. No lock stays taken."""
    for interrupter in interruptions(FILES):
        scene, file = StandIn(), TemporaryFile(b"12345678" * 3)
        driver = CudaDriver(bindings=scene.module())
        host = HostBuffer(driver, 4096)
        gates: list[int] = []
        addresses = [host.address + 8 * i for i in range(3)]
        interrupter.run(partial(driver.read_files, Stream(0), file.fd, [0, 8, 16], addresses, 8, gates))
        driver.synchronize()
        for gate in gates:
            assert driver.poll_gate(gate) == GATE_DONE, interrupter.where
            driver.release_gate(gate)
        leaks = driver._transfers.close(10)
        assert leaks == [], interrupter.where
        host.close()
        file.close()
    assert interrupter.nth > 10


def test_without_a_thread_no_transfer_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call says what is missing; once threads can be started again, the same call works."""

    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("kvcm"):
            raise RuntimeError("can't start new thread")
        start(thread)

    scene, file = StandIn(), TemporaryFile(b"12345678")
    driver = CudaDriver(bindings=scene.module())
    host = HostBuffer(driver, 4096)
    monkeypatch.setattr(driver._transfers, "_is_ready", lambda waiting: False)  # the stream has work to do first
    gates: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OutOfMemoryError, match="cannot start a thread"):
            driver.read_files(Stream(0), file.fd, [0], [host.address], 8, gates)
    assert gates == []
    monkeypatch.undo()
    driver.read_files(Stream(0), file.fd, [0], [host.address], 8, gates)
    driver.synchronize()
    assert driver.poll_gate(gates[0]) == GATE_DONE
    driver.release_gate(gates[0])
    host.close()
    file.close()
