"""What a full collection of the cyclic collector has to walk while many blocks are cached, and once they are gone."""

from __future__ import annotations

import gc

import pytest

from kv_cache_manager_v2.build import COMPILED
from tests.support.models import small
from tests.support.rig import Rig, toks

BLOCKS = 2000
LONG = BLOCKS // 2


def large_containers() -> int:
    """Elements of all long containers that the collector walks."""
    return sum(len(found) for found in gc.get_objects() if isinstance(found, list | dict | set | tuple) and len(found) >= LONG)


def references() -> int:
    """References that the collector walks in a full collection."""
    return sum(len(gc.get_referents(found)) for found in gc.get_objects())


def cache_blocks(rig: Rig) -> None:
    cache = rig.manager.create_kv_cache()
    assert cache.resume(rig.stream)
    assert cache.resize(4 * BLOCKS)
    cache.commit(toks(0, 4 * BLOCKS))
    cache.close()


def test_no_table_grows_with_cached_blocks_or_free_slots() -> None:
    """There is no list with an entry for each slot, taken or free, on either build."""
    with Rig(small(2048), engine=False) as rig:
        gc.collect()
        before = large_containers()
        cache_blocks(rig)
        gc.collect()
        assert large_containers() - before < LONG
        rig.manager.clear_reusable_blocks()
        gc.collect()
        assert large_containers() - before < LONG


@pytest.mark.skipif(not COMPILED, reason="interpreted objects are all seen by the collector")
def test_a_collection_does_not_see_cached_blocks() -> None:
    """On the compiled build the collector visits nothing for 2,000 cached blocks and 2,000 free slots."""
    with Rig(small(2048), engine=False) as rig:
        gc.collect()
        before = references()
        cache_blocks(rig)
        gc.collect()
        assert references() - before < BLOCKS // 4
        rig.manager.clear_reusable_blocks()
        gc.collect()
        assert references() - before < BLOCKS // 4
