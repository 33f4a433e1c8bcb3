"""Quotas that change while requests are suspended."""

from __future__ import annotations

import pytest

from kv_cache_manager_v2 import (
    ConfigError,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    LogicError,
)
from kv_cache_manager_v2.storage.tiers import spare_host_bytes
from tests.request.test_single_request import alternating
from tests.support import inside
from tests.support.models import KIB, MIB, attention, model
from tests.support.rig import DISK, GPU, HOST, Rig, toks
from tests.support.storage_rig import resize_quota


def test_quotas_shrink_and_grow_under_suspended_requests(tmp_path: object) -> None:
    """Three full tiers of 64, 128 and 128 MiB shrink to 32, 16 and 32: of two suspended requests of 704 tokens the first resumes,
    the second finds no room; grown again, a prefetch takes all its pages from disk to the host, none to the GPU, and both run."""
    tiers = [GpuCacheTierConfig(64 * MIB), HostCacheTierConfig(128 * MIB), DiskCacheTierConfig(128 * MIB, str(tmp_path))]
    with Rig(model(alternating(36, 32 * KIB, 32 * KIB, window=128, sink=1), tiers=tiers)) as rig:
        tag = 0
        while rig.counts(2).free > 0:  # fill all three
            tag += 1000
            filler = rig.start()
            assert filler.cache.resize(704, 0)
            filler.cache.commit(toks(tag, tag + 704))
            filler.close()
        first, second = rig.start(), rig.request()
        first.prefill(toks(0, 704), 352)
        first.suspend()
        assert second.resume()
        second.prefill(toks(500_000, 500_704), 352)
        second.suspend()
        for level, quota in ((GPU, 32), (HOST, 16), (DISK, 32)):
            assert rig.manager.resize(level, quota * MIB), rig.manager.last_resize
            assert rig.manager.get_quota(level) <= quota * MIB
        assert first.resume()
        first.check()
        assert second.resume() is False
        first.suspend()
        assert rig.manager.resize(HOST, 128 * MIB)
        assert rig.manager.resize(DISK, 128 * MIB)
        assert first.resume()
        assert second.resume() is False
        levels = [page.level for page in inside.live_pages(second.cache)]
        on_disk, on_gpu = levels.count(2), levels.count(0)
        assert second.cache.prefetch(HOST)
        rig.settle()
        levels = [page.level for page in inside.live_pages(second.cache)]
        assert (levels.count(2), levels.count(0)) == (0, on_gpu)
        assert levels.count(1) >= on_disk
        assert all(page.queued for page in inside.live_pages(second.cache))
        first.suspend()
        assert rig.manager.resize(GPU, 128 * MIB)
        assert first.resume()
        assert second.resume()
        first.check()
        second.check()


def test_a_resize_needs_every_cache_suspended() -> None:
    """One is ACTIVE: refused with the count, nothing changed. A level that does not exist is an error."""
    with Rig(model([attention(0, 64 * KIB)], gpu=8 * MIB)) as rig:
        request = rig.start()
        with pytest.raises(LogicError, match="1 KV cache"):
            rig.manager.resize(GPU, 4 * MIB)
        with pytest.raises(LogicError, match="1 KV cache"):
            rig.manager.adjust()
        assert rig.manager.get_quota(GPU) == 8 * MIB
        request.suspend()
        assert rig.manager.resize(GPU, 4 * MIB)
        with pytest.raises(ConfigError):
            rig.manager.resize(HOST, 4 * MIB)


@pytest.mark.parametrize("best_efforts", [False, True])
def test_a_shrink_that_does_not_fit(best_efforts: bool) -> None:
    """What suspended requests hold must survive: a smaller quota, and with it every one below, is refused with the reason, nothing
    changed; the smallest that holds them is fine."""
    with Rig(model([attention(0, 512 * KIB)], gpu=16 * MIB, max_util=1.0)) as rig:
        request = rig.start()
        assert request.advance(toks(0, 32 * 10))
        request.suspend()
        before = inside.all_counts(rig.manager)
        nothing: object = rig.manager.last_resize
        assert nothing is None
        assert rig.manager.resize(GPU, 4 * MIB, best_efforts) is False
        result = rig.manager.last_resize
        assert result is not None
        assert result.reason
        assert (rig.manager.get_quota(GPU), inside.all_counts(rig.manager)) == (16 * MIB, before)
        assert rig.manager.resize(GPU, 6 * MIB, best_efforts) is True
        assert rig.manager.get_quota(GPU) == 6 * MIB
        assert request.resume()
        request.check()


@pytest.mark.parametrize("best_efforts", [False, True])
@pytest.mark.parametrize("chunks", [0, 1, 3])
def test_a_growth_that_the_device_refuses(chunks: int, best_efforts: bool) -> None:
    """No device memory for all of it: every size is the old one again; with best efforts it is what could be had, not above the
    asked one."""
    with Rig(model([attention(0, 512 * KIB)], gpu=8 * MIB, max_util=1.0)) as rig:
        request = rig.start()
        assert request.advance(toks(0, 32 * 10))
        request.suspend()
        rig.driver.fail("create_chunk", chunks + 1, None)
        try:
            done = rig.manager.resize(GPU, 16 * MIB, best_efforts)
        except MemoryError:
            done = False
        quota = rig.manager.get_quota(GPU)
        assert 8 * MIB <= quota < 16 * MIB
        assert bool(done) == (quota > 8 * MIB) == (best_efforts and chunks > 0)
        rig.driver.heal()
        assert rig.manager.resize(GPU, 16 * MIB)
        assert request.resume()
        request.check()


GIB = 1 << 30


def test_best_efforts_leave_host_memory_free() -> None:
    """The larger of 1 GiB and 5 % of what is available stays free for other uses; an exact quota is not limited."""
    assert [spare_host_bytes(there) for there in (0, GIB, GIB + 5, 20 * GIB, 100 * GIB)] == [0, 0, 5, 19 * GIB, 95 * GIB]
    tiers = [GpuCacheTierConfig(8 * MIB), HostCacheTierConfig(8 * MIB)]
    with Rig(model([attention(0, 512 * KIB)], tiers=tiers)) as rig:
        hierarchy = rig.manager.shared.hierarchy
        before = rig.manager.get_quota(HOST)
        for available in (0, GIB):
            refused = resize_quota(hierarchy, HOST, 64 * MIB, True, available)
            assert not refused
            assert "must stay free" in refused.reason
        assert rig.manager.get_quota(HOST) == before
        assert resize_quota(hierarchy, HOST, 64 * MIB, True, GIB + 6 * MIB)
        assert rig.manager.get_quota(HOST) == before + 6 * MIB
        assert resize_quota(hierarchy, HOST, 32 * MIB, False, GIB)
        assert rig.manager.get_quota(HOST) == 32 * MIB
        assert resize_quota(hierarchy, HOST, 8 * MIB, True, 0)
        assert rig.manager.get_quota(HOST) == 8 * MIB


def test_a_quota_below_the_minimum_changes_nothing() -> None:
    """`last_resize` says why."""
    with Rig(model([attention(0, 512 * KIB, window=128)], gpu=16 * MIB)) as rig:
        assert not rig.manager.resize(GPU, MIB)
        result = rig.manager.last_resize
        assert result is not None
        assert "minimum" in result.reason
        assert rig.manager.get_quota(GPU) == 16 * MIB
