"""Programs that end without shutting their manager down: by an exception, or because the program does not call it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.cli.helpers import child_environment


@pytest.mark.parametrize("schedule", ["eager", "threads", "random"])
@pytest.mark.parametrize(("ending", "status"), [("pass", 0), ("raise SystemExit(3)", 3), ("raise ValueError", 1)])
def test_a_program_ends_whatever_its_device_is_doing(schedule: str, ending: str, status: int) -> None:
    """Worker threads are frozen when the interpreter ends, and keep their locks: a manager that was not shut down does not wait for
    them."""
    script = f"""
        import threading
        import kv_cache_manager_v2 as kvcm
        driver = kvcm.EmulatedDriver({schedule!r})
        stream = driver.create_stream()
        layers = [kvcm.AttentionLayerConfig(0, [kvcm.BufferConfig("key", 4096)])]
        tiers = [kvcm.GpuCacheTierConfig(1 << 21), kvcm.HostCacheTierConfig(1 << 20)]
        manager = kvcm.KVCacheManager(kvcm.KVCacheManagerConfig(4, tiers, layers), driver=driver)
        cache = manager.create_kv_cache()
        assert cache.resume(stream) and cache.resize(9)
        if {schedule == "threads"}:
            driver.launch(stream, threading.Event().wait)  # a kernel that never ends
        {ending}
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=child_environment())
    assert done.returncode == status, done.stderr
    assert "Exception ignored" not in done.stderr
