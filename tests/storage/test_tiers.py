"""Tiers and copies: bytes in flight, staging, odd sizes, and devices that refuse or fail."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kv_cache_manager_v2 import (
    CacheTier,
    ConfigError,
    DiskCacheTierConfig,
    EmulatedDriver,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    HostRegistrationError,
    KVCacheError,
    KVCacheManager,
    OutOfMemoryError,
    PageDataLostError,
)
from kv_cache_manager_v2.config import CacheTierConfig, LayerConfig
from kv_cache_manager_v2.device.staging import DEFAULT_RING_BYTES
from kv_cache_manager_v2.storage.copier import REGION_BYTES
from tests.support import inside
from tests.support.models import GRAIN, KIB, MIB, Kind, attention, hybrid, model, small
from tests.support.rig import GPU, HOST, Rig, toks

NUM_REGIONS = DEFAULT_RING_BYTES // REGION_BYTES


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_source_is_read_when_the_copy_runs(tmp_path: object, tier: str, seed: int) -> None:
    """Pages are offloaded while the engine's writes to them still wait behind a gate, and their slots are written by others at
    once: every request gets its own bytes back."""
    config = small(4, host_slots=8) if tier == "host" else small(4, disk=(str(tmp_path), 8))
    with Rig(config, "random", seed) as rig:
        gate = rig.driver.gate(rig.stream)
        first = rig.start()
        assert first.advance(toks(0, 16))
        first.suspend()
        second = rig.start(stream=rig.new_stream())
        assert second.advance(toks(100, 116))
        second.suspend()
        assert first.resume(rig.new_stream())
        first.write([])
        gate.open()
        first.check()
        first.suspend()
        assert second.resume()
        second.check()


def test_an_index_buffer_is_the_engines_to_overwrite() -> None:
    """What was read from it before a launch counts: overwriting or re-attaching it afterwards changes no queued work."""
    with Rig(small(8)) as rig:
        request = rig.start()
        request.use_buffers(8)
        gate = rig.driver.gate(rig.stream)
        assert request.advance(toks(0, 12))
        assert request.buffers is not None
        for buffer in request.buffers:
            kept = list(buffer)
            buffer[:] = type(buffer)("i", [0] * 8)
            buffer[:] = type(buffer)("i", kept)
        gate.open()
        request.check()


@pytest.mark.parametrize("schedule", ["eager", "random"])
@pytest.mark.parametrize(
    "blocks",
    [
        NUM_REGIONS - 1,
        NUM_REGIONS,
        NUM_REGIONS + 1,
        NUM_REGIONS * 5 // 2,
    ],
)
def test_staging_wraps(tmp_path: object, blocks: int, schedule: str) -> None:
    """GPU and disk only: batches of as many pages as the staging area has regions, one more or less, and more than twice as many,
    back to back without a sync; all bytes right."""
    size = GRAIN // 200 // 64 * 64
    tiers: list[CacheTierConfig] = [GpuCacheTierConfig(GRAIN), DiskCacheTierConfig(2 * GRAIN, str(tmp_path))]
    with Rig(model([attention(0, size)], tokens_per_block=4, tiers=tiers, max_util=1.0), schedule, blocks) as rig:
        slots = rig.counts().total
        assert slots >= blocks
        first, second = rig.start(), rig.request()
        assert first.advance(toks(0, 4 * blocks))
        first.suspend()
        assert second.resume()
        assert second.advance(toks(1000, 1000 + 4 * slots))
        second.suspend()
        for _ in range(2):
            for request in (first, second):
                assert request.resume()
                request.write([])
                request.suspend()
        assert first.resume()
        first.check()


@pytest.mark.parametrize("size", [REGION_BYTES - 32, REGION_BYTES, REGION_BYTES + 32, 3 * REGION_BYTES])
def test_a_page_larger_than_a_region(tmp_path: object, size: int) -> None:
    """A slot that fills a region of the staging area, exceeds it by a little, or by far: split, with the right bytes."""
    grains = -(-2 * size // GRAIN)
    tiers: list[CacheTierConfig] = [GpuCacheTierConfig(grains * GRAIN), DiskCacheTierConfig(2 * grains * GRAIN, str(tmp_path))]
    with Rig(model([attention(0, size)], tokens_per_block=4, tiers=tiers, max_util=1.0), "random", size) as rig:
        slots = rig.counts().total
        first, second = rig.start(), rig.request()
        assert first.advance(toks(0, 8))
        first.suspend()
        assert second.resume()
        assert second.advance(toks(100, 100 + 4 * slots))
        second.suspend()
        assert first.resume()
        first.check()


@pytest.mark.parametrize("end", ["close", "suspend", "shrink"])
def test_a_slot_is_handed_on_after_its_last_user(end: str) -> None:
    """The producer's stream is blocked at a gate when its slots pass to the consumer: the consumer's stream waits until it
    opens."""
    with Rig(small(4, host_slots=4)) as rig:
        producer = rig.start()
        assert producer.advance(toks(0, 12))
        gate = rig.driver.gate(rig.stream)
        producer.cache.stop_committing()
        assert producer.cache.resize(16, 12)
        producer.write(toks(12, 16))
        if end == "close":
            producer.close()
        elif end == "suspend":
            producer.suspend()
        else:
            assert producer.cache.resize(12)
        stream = rig.new_stream()
        consumer = rig.start(stream=stream)
        assert consumer.cache.resize(4 if end == "shrink" else 16)
        passed: list[int] = []
        rig.driver.launch(stream, lambda: passed.append(1))
        assert not passed
        consumer.write(toks(100, 104))
        gate.open()
        assert passed == [1]
        consumer.check()


def test_a_private_copy_waits_for_its_slots_last_user() -> None:
    """The copy of a partly matched block goes into a slot that a gated producer still writes to: the copy comes after."""
    with Rig(small(4)) as rig:
        rig.seed(toks(0, 6))
        gate = rig.driver.gate(rig.stream)
        producer = rig.take(2)
        producer.write(toks(100, 108))
        producer.cache.stop_committing()
        producer.close()
        consumer = rig.start(toks(0, 6), stream=rig.new_stream())
        assert len(consumer.tokens) == 6
        gate.open()
        consumer.check()
        assert consumer.advance(toks(50, 53))
        consumer.check()


def test_a_snapshot_waits_for_its_slots_last_user() -> None:
    """A snapshot goes into a slot that a gated producer's state still writes to: the snapshot comes after."""
    with Rig(hybrid(2, 8)) as rig:
        gate = rig.driver.gate(rig.stream)
        producer = rig.start()
        assert producer.cache.resize(4)
        producer.write(toks(100, 104))
        producer.cache.stop_committing()
        producer.close()
        consumer = rig.start(stream=rig.new_stream())
        assert consumer.advance(toks(0, 6))
        gate.open()
        consumer.close()
        again = rig.start(toks(0, 6))
        assert len(again.tokens) == 6
        again.check()


@pytest.mark.parametrize("seed", range(12))
def test_a_snapshot_is_taken_before_the_state_goes_on(seed: int) -> None:
    """One state on the GPU: the snapshot goes to the host, on a stream of the manager's, while the engine already writes the
    next state."""
    with Rig(hybrid(1, 8, host_slots=8), "random", seed) as rig:
        request = rig.start()
        assert request.advance(toks(0, 4))
        assert request.advance(toks(4, 6))
        assert request.advance(toks(6, 11))
        request.check()
        request.close()
        for length in (4, 11):
            again = rig.start(toks(0, length))
            assert len(again.tokens) == length
            again.check()
            again.close()


def test_a_new_stream_waits_for_the_old_one() -> None:
    """Setting cuda_stream orders what follows on the new stream behind what is queued on the old one."""
    with Rig(small(4)) as rig:
        request = rig.start()
        gate = rig.driver.gate(rig.stream)
        assert request.advance(toks(0, 6))
        stream = rig.new_stream()
        request.cache.cuda_stream = stream
        passed: list[int] = []
        rig.driver.launch(stream, lambda: passed.append(1))
        assert not passed
        gate.open()
        assert passed == [1]
        request.check()


@pytest.mark.parametrize("size", [MIB + 1, 4097, 333, 16])
def test_any_number_of_bytes(tmp_path: object, size: int) -> None:
    """Buffers whose size is no multiple of a copy's grain go down to host and disk and come back whole."""
    layers: list[LayerConfig] = [attention(0, size, size + 1), attention(1, size)]
    config = model(layers, tokens_per_block=4, gpu=MIB, max_util=1.0)
    with Rig(config) as rig:
        slots = [rig.counts(group=group).total for group in range(len(rig.manager.pool_group_descs))]
    few = min(min(slots), 6)
    total = 3 * size + 1
    tiers: list[CacheTierConfig] = [
        GpuCacheTierConfig(MIB),
        HostCacheTierConfig(few * total),
        DiskCacheTierConfig(8 * few * total + 4 * MIB, str(tmp_path)),
    ]
    with Rig(replace(config, cache_tiers=tiers)) as rig:
        blocks = min(few, 2)
        first = rig.start()
        assert first.advance(toks(0, 4 * blocks))
        first.suspend()
        groups = len(rig.manager.pool_group_descs)
        free = min(rig.counts(group=group).total for group in range(groups))
        for tag in (1, 2):
            hog = rig.start()
            if not hog.cache.resize(4 * free):
                assert hog.cache.resize(4)
            hog.write(toks(100 * tag, 100 * tag + 4))
            hog.close()
        assert first.resume()
        first.check()


def test_pinning_refused(tmp_path: object) -> None:
    """A refused registration is a typed error that leaves nothing behind; without the host tier the rest works, a disk tier
    included."""
    config = small(4, host_slots=8, disk=(str(tmp_path), 8))
    assert issubclass(HostRegistrationError, OutOfMemoryError)
    for nth in (1, 2, 3):
        driver = EmulatedDriver()
        driver.fail("host_register", nth)
        try:
            manager = KVCacheManager(config, driver=driver)
        except HostRegistrationError:
            driver.heal()
            without = KVCacheManager(config.without_tier(CacheTier.HOST_MEM), driver=driver)
            assert without.cache_tier_list == [CacheTier.GPU_MEM, CacheTier.DISK]
            without.shutdown()
            retry = KVCacheManager(config, driver=driver)
            retry.shutdown()
        else:
            assert nth > 1
            manager.shutdown()
        driver.close()


@pytest.mark.parametrize("call", ["reserve", "create_chunk", "map_chunk", "set_access", "host_register"])
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_construction_is_all_or_nothing(tmp_path: object, call: str, nth: int) -> None:
    """Whatever device call fails while a manager is made, it raises a typed error and leaks nothing; then it works."""
    layers: list[LayerConfig] = [attention(0, 4 * KIB, 2 * KIB), attention(1, 8 * KIB, window=64)]
    tiers: list[CacheTierConfig] = [
        GpuCacheTierConfig(8 * MIB),
        HostCacheTierConfig(8 * MIB),
        DiskCacheTierConfig(8 * MIB, str(tmp_path)),
    ]
    config = model(layers, tiers=tiers)
    driver = EmulatedDriver()
    driver.fail(call, nth)
    try:
        manager = KVCacheManager(config, driver=driver)
    except KVCacheError:
        driver.heal()
        manager = KVCacheManager(config, driver=driver)
    manager.shutdown()
    driver.close()
    assert os.listdir(str(tmp_path)) == []


def test_bad_paths(tmp_path: Path) -> None:
    """Missing, not a directory: refused when configured; not writable: at construction, with nothing left behind."""
    missing, file = tmp_path / "missing", tmp_path / "file"
    file.write_bytes(b"")
    for path in (missing, file):
        with pytest.raises(ConfigError, match="directory"):
            DiskCacheTierConfig(MIB, str(path))
    gone = tmp_path / "gone"
    gone.mkdir()
    config = small(4, disk=(str(gone), 4))
    gone.rmdir()
    driver = EmulatedDriver()
    with pytest.raises(KVCacheError):
        KVCacheManager(config, driver=driver)
    driver.close()


def on_disk(rig: Rig, blocks: int) -> None:
    """A cached prefix of so many blocks, all of it on disk (GPU of 4 slots, disk of 4)."""
    rig.seed(toks(0, 4 * blocks))
    hog = rig.start()
    assert hog.cache.resize(16)
    hog.close()
    rig.settle()
    assert inside.pages_by_level(rig.manager, toks(0, 4 * blocks)) == [1] * blocks


@pytest.mark.parametrize("schedule", ["eager", "random"])
@pytest.mark.parametrize("effect", ["error", "short"])
@pytest.mark.parametrize("bad", [0, 1, 3])
def test_a_failed_read_loses_one_page(tmp_path: object, bad: int, effect: str, schedule: str) -> None:
    """EIO or a short count on one block: that request fails as a whole and says so, never with wrong bytes; the next one reuses up
    to the bad block, and no more; it is not tried for ever."""
    with Rig(small(4, disk=(str(tmp_path), 4)), schedule, bad) as rig:
        on_disk(rig, 4)
        rig.driver.fail("read_file", bad + 1, 1, effect)
        request = rig.request(toks(0, 16))
        assert len(request.tokens) == 16
        try:
            if request.cache.resume(rig.stream):
                rig.driver.synchronize()
                with pytest.raises(PageDataLostError):
                    request.cache.resize(17)
                with pytest.raises(PageDataLostError):
                    request.cache.suspend()
        except PageDataLostError:
            pass
        request.close()
        assert rig.reused(toks(0, 16)) == 4 * bad
        again = rig.start(toks(0, 16))
        assert len(again.tokens) == 4 * bad
        again.check()
        assert again.advance(toks(4 * bad, 16))
        again.check()
        again.close()
        assert rig.reused(toks(0, 16)) == 16


@pytest.mark.parametrize("effect", ["error", "short"])
def test_a_failed_write_loses_a_cached_page(tmp_path: object, effect: str) -> None:
    """A page that could not be written to disk is a miss, never wrong bytes."""
    with Rig(small(4, disk=(str(tmp_path), 4))) as rig:
        rig.seed(toks(0, 16))
        rig.driver.fail("write_file", 2, 1, effect)
        rig.take(4).close()
        rig.settle()
        rig.create().close()
        reused = rig.reused(toks(0, 16))
        assert reused < 16
        again = rig.start(toks(0, 16))
        assert len(again.tokens) == reused
        again.check()


def test_a_failed_write_of_a_suspended_request(tmp_path: object) -> None:
    """Its bytes cannot be had again: it fails as a whole, and close works."""
    with Rig(small(4, disk=(str(tmp_path), 4))) as rig:
        request = rig.start()
        assert request.advance(toks(0, 16))
        request.suspend()
        rig.driver.fail("write_file", 3)
        hog = rig.take(4)
        rig.driver.synchronize()
        hog.close()

        def go_on() -> None:
            if request.cache.resume(rig.stream):
                rig.driver.synchronize()
                request.cache.resize(17)

        with pytest.raises(PageDataLostError):
            go_on()
        request.close()
        assert rig.counts().unavailable == 0


@pytest.mark.parametrize("kinds", [["full"], [(8, 0)]])
def test_nothing_to_move(kinds: list[Kind]) -> None:
    """Resuming, prefetching, suspending and closing requests whose pages are all where they belong, or that have none, moves
    nothing."""
    with Rig(small(8, kinds=kinds, host_slots=8)) as rig:
        empty = rig.request()
        assert empty.cache.prefetch(HOST)
        assert empty.resume()
        empty.suspend()
        assert empty.resume()
        empty.close()
        request = rig.start()
        assert request.advance(toks(0, 12))
        for _ in range(3):
            request.suspend()
            assert request.cache.prefetch(GPU)
            assert request.cache.prefetch(HOST)
            assert request.resume()
        request.check()
        movement = rig.manager.movement
        assert [movement.pages_moved(a, b) for a in (0, 1) for b in (0, 1)] == [0, 0, 0, 0]


@pytest.mark.parametrize("active", [True, False])
def test_pages_stay_while_a_reader_has_them(active: bool) -> None:
    """An open cache after stop_committing keeps its pages through others' pressure, resizes of the quota and adjustments: its
    aggregated indices and bytes stay valid until it is closed; clear and shutdown refuse."""
    with Rig(small(4, host_slots=4)) as rig:
        reader = rig.start()
        assert reader.advance(toks(0, 8))
        reader.cache.stop_committing()
        group = rig.group(0)
        before = list(reader.cache.get_aggregated_page_indices(group, valid_only=True))
        assert len(before) == 2
        for tag in range(1, 4):
            other = rig.request()
            assert other.resume()
            assert other.cache.resize(16) is False
            assert other.advance(toks(100 * tag, 100 * tag + 8))
            other.close()
        assert list(reader.cache.get_aggregated_page_indices(group, valid_only=True)) == before
        reader.check()
        with pytest.raises(KVCacheError, match="1 KV cache"):
            rig.manager.shutdown()
        if not active:
            reader.suspend()
            rig.take(4).close()
            assert reader.resume()
        reader.check()
        reader.close()
        assert rig.probe(toks(0, 8)) == 8


def test_sparse_pages_are_listed_without_bad() -> None:
    """A window's aggregated indices with valid_only name the live pages only; without it absent ones read BAD."""
    with Rig(small(16, kinds=[(8, 4)])) as rig:
        request = rig.start()
        assert request.advance(toks(0, 32))
        every = list(request.cache.get_aggregated_page_indices(rig.group(0)))
        valid = list(request.cache.get_aggregated_page_indices(rig.group(0), valid_only=True))
        assert [slot >= 0 for slot in every] == [True, False, False, False, False, False, True, True]
        assert valid == [slot for slot in every if slot >= 0]
