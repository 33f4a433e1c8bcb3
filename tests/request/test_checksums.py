"""Damaged bytes on disk give an engine an error or a shorter match, never wrong pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from kv_cache_manager_v2 import DiskCacheTierConfig, PageDataLostError, introspection
from kv_cache_manager_v2.device.checksums import EXTENT_BYTES
from tests.support.inside import flip
from tests.support.models import slot_size, small
from tests.support.rig import Request, Rig, toks

PROMPT = toks(0, 16)
SIZE = slot_size(4, 4)


def cached_on_disk(rig: Rig) -> None:
    """The prompt's four blocks, all of them on disk."""
    rig.seed(PROMPT)
    rig.take(4).close()
    rig.settle()
    assert introspection.path_levels(rig.manager, PROMPT) == [1] * 4


def damage(rig: Rig, block: int) -> int:
    """Flip a bit of a cached block in the file; returns its slot."""
    page = introspection.page_of(introspection.tree_path(rig.manager, PROMPT)[block], 0)
    assert page is not None
    arena = page.cell.arenas[0]
    flip(arena.fd, 8 * (arena.address(page.slot) + 100) + 3)
    return int(page.slot)


def use(rig: Rig, request: Request) -> None:
    """Load the pages of a request, and grow it."""
    request.cache.resume(rig.stream)
    rig.driver.synchronize()
    request.cache.resize(17)


@pytest.mark.parametrize("schedule", ["eager", "random", "threads"])
@pytest.mark.parametrize("block", [0, 2])
def test_a_damaged_block_is_an_error_for_its_request_and_a_miss_for_the_next(
    tmp_path: Path, schedule: str, block: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the range of the file; a request that comes later reuses the blocks before it."""
    with Rig(small(4, disk=(str(tmp_path), 4)), schedule) as rig:
        cached_on_disk(rig)
        slot = damage(rig, block)
        request = rig.request(PROMPT)
        assert len(request.tokens) == 16
        with pytest.raises(PageDataLostError):
            use(rig, request)
        end = SIZE * slot + min(SIZE, EXTENT_BYTES)
        assert f"bytes {SIZE * slot} to {end} of the file are damaged: the checksum" in caplog.text
        request.close()
        assert sum(rig.manager.movement.lost) == 1
        again = rig.start(PROMPT)
        assert len(again.tokens) == 4 * block
        assert again.advance(PROMPT[4 * block :])
        again.check()
        again.close()
        assert rig.reused(PROMPT) == 16


def test_damaged_bytes_of_a_suspended_request(tmp_path: Path) -> None:
    """The bytes are lost: the request fails as a whole, `close` works, and its slots are freed."""
    with Rig(small(4, disk=(str(tmp_path), 4))) as rig:
        request = rig.start()
        assert request.advance(PROMPT)
        request.suspend()
        other = rig.take(4)
        rig.settle()
        other.close()
        damage(rig, 3)
        with pytest.raises(PageDataLostError):
            use(rig, request)
        request.close()
        assert rig.counts().unavailable == 0


def test_without_checksums_nothing_is_compared(tmp_path: Path) -> None:
    """With `checksum=None` damaged bytes are not detected."""
    config = small(4, disk=(str(tmp_path), 4))
    disk = config.cache_tiers[1]
    assert isinstance(disk, DiskCacheTierConfig)
    disk.checksum = None
    with Rig(config, engine=False) as rig:
        cached_on_disk(rig)
        damage(rig, 0)
        cache = rig.open(PROMPT)
        rig.driver.synchronize()
        assert cache.is_loaded
        cache.close()
        assert sum(rig.manager.movement.lost) == 0
