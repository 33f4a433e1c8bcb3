"""Batch tables: a row always has exactly the page indices of its request."""

from __future__ import annotations

import gc
import random
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kv_cache_manager_v2 import (
    BAD_PAGE_INDEX,
    ConfigError,
    KVCache,
    KVCacheManager,
    OutOfMemoryError,
    PlainBatchTables,
    commit_batch,
    resize_batch,
)
from kv_cache_manager_v2.extras import arrays
from kv_cache_manager_v2.ids import INT32_MAX
from tests.support.models import GRAIN, hybrid, model, small
from tests.support.rig import Rig, toks

Make = Callable[[KVCacheManager, int, int], PlainBatchTables]


def with_tensors(manager: KVCacheManager, rows: int, blocks: int) -> PlainBatchTables:
    pytest.importorskip("torch")
    from kv_cache_manager_v2.extras import torch

    return torch.BatchTables(manager, rows, blocks)


def with_null_block(manager: KVCacheManager, rows: int, blocks: int) -> PlainBatchTables:
    return PlainBatchTables(manager, rows, blocks, pad_value=0, offset=1)


def with_wide_arrays(manager: KVCacheManager, rows: int, blocks: int) -> PlainBatchTables:
    return arrays.BatchTables(manager, rows, blocks, pad_value=1 << 40, offset=1 << 33, int64=True)


def with_wide_tensors(manager: KVCacheManager, rows: int, blocks: int) -> PlainBatchTables:
    torch: Any = pytest.importorskip("torch")
    from kv_cache_manager_v2.extras import torch as extra

    tables = extra.BatchTables(manager, rows, blocks, pad_value=-7, offset=3, int64=True)
    assert tables.table(0).dtype == torch.int64
    return tables


MAKERS: list[Make] = [PlainBatchTables, arrays.BatchTables, with_tensors]
SHOWN: dict[Make, tuple[int, int]] = {with_null_block: (0, 1), with_wide_arrays: (1 << 40, 1 << 33), with_wide_tensors: (-7, 3)}


def widths_of(manager: KVCacheManager) -> list[int]:
    """Entries of a row: by layer group, 0 for attention, where it is `max_blocks`."""
    return [0 if life_cycle.is_attention else 1 for life_cycle in manager.shared.life_cycles]


def check(tables: PlainBatchTables, manager: KVCacheManager, rows: dict[int, KVCache], pad: int = -1, offset: int = 0) -> None:
    """Each row equals its cache's page indices, and unused entries are padding."""

    def shown(pages: list[int], count: int) -> list[int]:
        return [pad if page == BAD_PAGE_INDEX else page + offset for page in pages] + [pad] * (count - len(pages))

    manager.check_invariants()
    for group, recurrent in enumerate(widths_of(manager)):
        entries: Any = tables.table(group).tolist()
        for row, cache in rows.items():
            assert tables.row(cache) == row
            if recurrent:
                assert entries[row] == shown([cache.get_ssm_block_base_index(group)], 1)
                continue
            pages = list(cache.get_base_page_indices(group))[: cache.num_blocks]
            assert entries[row] == shown(pages, len(entries[row]))
            if cache.is_active:
                assert max(pages, default=0) >= 0


def snapshot(tables: PlainBatchTables, manager: KVCacheManager) -> list[Any]:
    return [tables.table(group).tolist() for group in range(len(manager.layer_grouping))]


@pytest.mark.parametrize("make", [*MAKERS, *SHOWN])
@pytest.mark.parametrize("seed", range(4))
def test_rows_follow_their_requests(make: Make, seed: int) -> None:
    """Growth, windows, adoption, suspension with pages moved away, resumption, a wider beam and back, close and drop, in any order.

    A version changes if an entry of its table or row has changed. Entries are as the caller has chosen.
    """
    pad, offset = SHOWN.get(make, (BAD_PAGE_INDEX, 0))
    rng = random.Random(seed)
    with Rig(hybrid(16, 32, kinds=("full", (6, 0)), host_slots=64), engine=False) as rig:
        manager = rig.manager
        tables = make(manager, 5, 16)
        rows: dict[int, KVCache] = {}
        groups = range(len(manager.layer_grouping))
        for _step in range(120):
            before, versions = snapshot(tables, manager), [tables.version(group) for group in groups]
            act = rng.randrange(8)
            cache = rng.choice(list(rows.values())) if rows else None
            if (act == 0 or cache is None) and tables.num_unused_rows > 0:
                cache = rig.create(toks(0, rng.randrange(20)))
                if rng.random() < 0.5 and cache.resume(rig.stream):
                    cache.resize(cache.capacity + rng.randrange(9))
                rows[tables.add(cache)] = cache
            elif cache is None:
                continue
            elif act == 1 and cache.status.name == "SUSPENDED":
                cache.resume(rig.stream)
            elif act == 2 and cache.is_active:
                cache.suspend()
            elif act == 3:
                del rows[tables.row(cache)]
                if rng.random() < 0.3:
                    tables.remove(cache)
                cache.close()
            elif act == 4 and cache.is_active and cache.history_length == cache.capacity:
                cache.beam_width = 2
                check(tables, manager, rows, pad, offset)
                cache.resize(cache.capacity + 1)
                cache.commit([7], [1])
                cache.beam_width = 1
            elif cache.is_active and cache.resize(min(64, cache.capacity + rng.randrange(6))):
                cache.commit(toks(cache.num_committed_tokens, cache.capacity))
            check(tables, manager, rows, pad, offset)
            after = snapshot(tables, manager)
            for group in groups:
                assert before[group] == after[group] or tables.version(group) > versions[group]


def test_a_version_stays_while_nothing_changes() -> None:
    """A decode step inside a block changes neither table nor row; one that begins a block changes both, and no other row."""
    with Rig(small(32), engine=False) as rig:
        tables = PlainBatchTables(rig.manager, 4, 8)
        first, second = rig.create(), rig.create()
        for cache in (first, second):
            tables.add(cache)
            assert cache.resume(rig.stream)
            assert cache.resize(5)
        versions = tables.version(0), first.get_base_page_indices_version(0), second.get_base_page_indices_version(0)
        commit_batch([first, second], [toks(0, 5), toks(5, 10)])
        assert resize_batch([first, second], [6, 8]) == 2
        assert versions == (tables.version(0), first.get_base_page_indices_version(0), second.get_base_page_indices_version(0))
        assert first.resize(9)
        assert tables.version(0) > versions[0]
        assert first.get_base_page_indices_version(0) > versions[1]
        assert second.get_base_page_indices_version(0) == versions[2]


@pytest.mark.parametrize("make", MAKERS)
def test_rows_are_where_the_kernel_reads_them(make: Make) -> None:
    """One array for each layer group, never replaced: what a kernel has been given shows all later changes."""
    with Rig(small(32, kinds=("full", (6, 0))), engine=False) as rig:
        tables = make(rig.manager, 3, 8)
        full = tables.table(0)
        cache = rig.create()
        assert tables.add(cache) == 0
        assert tables.add(rig.create()) == 1
        assert cache.resume(rig.stream)
        assert cache.resize(12)
        assert full.tolist()[0][:3] == list(cache.get_base_page_indices(0))[:3]
        assert tables.table(0) is full or np.shares_memory(np.asarray(tables.table(0)), np.asarray(full))
        cache.close()
        assert full.tolist()[0] == [BAD_PAGE_INDEX] * 8
        assert tables.add(rig.create()) == 0, "the row that was freed last is used first"
        assert tables.num_unused_rows == 1


def test_memory_of_the_caller_is_used_and_kept_alive() -> None:
    """The rows of open caches are written even after the tables object is dropped."""
    torch: Any = pytest.importorskip("torch")
    from kv_cache_manager_v2.extras import torch as extra

    with Rig(small(32), engine=False) as rig:
        memory = np.full((3, 8), 77, np.int32)
        tables = PlainBatchTables(rig.manager, 3, 8, [memory])
        assert tables.table(0) is memory
        assert memory.tolist() == [[BAD_PAGE_INDEX] * 8] * 3
        cache, other = rig.create(), rig.create()
        tables.add(cache)
        of_tensors = extra.BatchTables(rig.manager, 3, 8)
        assert of_tensors.table(0).dtype == torch.int32
        of_tensors.add(other)
        del tables, of_tensors
        gc.collect()
        for each in (cache, other):
            assert each.resume(rig.stream)
            assert each.resize(8)
        assert memory[0, :2].tolist() == list(cache.get_base_page_indices(0))[:2]
        assert list(other.get_base_page_indices(0))[2:] == [BAD_PAGE_INDEX] * 6


def test_rows_of_a_batch() -> None:
    """`rows` returns rows in the order of the caches, or writes them to `out`."""
    with Rig(small(32), engine=False) as rig:
        tables = PlainBatchTables(rig.manager, 4, 8)
        caches = [rig.create() for _i in range(4)]
        for cache in reversed(caches):
            tables.add(cache)
        assert tables.rows(caches).tolist() == [3, 2, 1, 0]
        out = np.full(6, 77, np.int64)
        assert tables.rows(caches[1:], out=out) is out
        assert out.tolist() == [2, 1, 0, 77, 77, 77]
        with pytest.raises(ConfigError, match="out has 3 entries; it must have at least 4"):
            tables.rows(caches, out=out[:3])
        tables.remove(caches[0])
        with pytest.raises(ConfigError, match=r"caches\[0\] \(id 1\) has no row in these tables; add\(\) it first"):
            tables.rows(caches, out=out)
        assert out.tolist() == [2, 1, 0, 77, 77, 77]


def test_a_cache_that_was_removed_goes_on_with_rows_of_its_own() -> None:
    with Rig(small(32), engine=False) as rig:
        tables = PlainBatchTables(rig.manager, 2, 8)
        cache = rig.create()
        cache.set_base_page_index_buf(0, 0, array("i", [7] * 8))
        tables.add(cache)
        assert cache.resume(rig.stream)
        assert cache.resize(32)
        pages = list(cache.get_base_page_indices(0))
        tables.remove(cache)
        assert list(cache.get_base_page_indices(0)) == pages
        assert tables.table(0).tolist() == [[BAD_PAGE_INDEX] * 8] * 2
        assert cache.resize(36), "more blocks than a row has"
        rig.manager.check_invariants()


def test_mistakes_change_nothing() -> None:
    """Each error names the mistake and the remedy."""
    with Rig(small(32), engine=False) as rig, Rig(small(32), engine=False) as other:
        tables = PlainBatchTables(rig.manager, 2, 2)
        cache, closed, foreign = rig.create(), rig.create(), other.create()
        tables.add(cache)
        closed.close()
        assert cache.resume(rig.stream)
        with pytest.raises(ConfigError, match="has a row of a batch table already"):
            tables.add(cache)
        with pytest.raises(ConfigError, match="has a row of a batch table already"):
            PlainBatchTables(rig.manager, 2, 2).add(cache)
        with pytest.raises(ConfigError, match="a closed cache has no pages"):
            tables.add(closed)
        with pytest.raises(ConfigError, match="of another manager"):
            tables.add(foreign)
        with pytest.raises(ConfigError, match="has no row in these tables"):
            tables.remove(rig.create())
        with pytest.raises(ConfigError, match="remove it there"):
            cache.set_base_page_index_buf(0, 0, array("i", [0] * 8))
        with pytest.raises(ConfigError, match="remove it there"):
            cache.set_base_page_index_buf(0, 0, None)
        with pytest.raises(ConfigError, match="too short: 2 entries for 3 blocks"):
            cache.resize(9)
        long = rig.open()
        assert long.resize(9)
        with pytest.raises(ConfigError, match="has 3 blocks, and a row has 2; raise max_blocks"):
            tables.add(long)
        assert tables.num_unused_rows == 1
        tables.add(rig.create())
        with pytest.raises(ConfigError, match="all 2 rows are in use; close or remove a cache, or raise max_requests"):
            tables.add(rig.create())
        assert cache.resize(8)
        check(tables, rig.manager, {0: cache})


@pytest.mark.parametrize(
    "wrong",
    [
        [np.zeros((3, 8), np.int32)] * 2,
        [np.zeros((8, 3), np.int32)],
        [np.zeros((3, 8), np.int16)],
        [np.zeros(24, np.int32)],
        [np.zeros((3, 16), np.int32)[:, ::2]],
        [array("i", [0] * 24)],
        np.zeros((3, 8), np.int32),
        7,
    ],
)
def test_wrong_memory_is_refused(wrong: Any) -> None:
    with Rig(small(32), engine=False) as rig, pytest.raises(ConfigError, match="arrays"):
        PlainBatchTables(rig.manager, 3, 8, wrong)


@pytest.mark.parametrize(("requests", "blocks"), [(2, 1 << 50), (1 << 50, 2), (1 << 62, 1 << 62)])
def test_tables_larger_than_the_machine_are_refused_at_once(requests: int, blocks: int) -> None:
    with Rig(small(32), engine=False) as rig, pytest.raises(OutOfMemoryError, match="max_blocks make"):
        PlainBatchTables(rig.manager, requests, blocks)


def test_entries_that_do_not_fit_are_refused() -> None:
    """With the layer group, before any row is written; a row of the caller's may be int64."""
    with Rig(small(32), engine=False) as rig:
        memory = np.full((3, 8), 77, np.int32)
        with pytest.raises(ConfigError, match=r"offset gives entries of \d+ in layer group 0; use int64 arrays"):
            PlainBatchTables(rig.manager, 3, 8, [memory], offset=INT32_MAX)
        with pytest.raises(ConfigError, match="offset gives entries of"):
            PlainBatchTables(rig.manager, 3, 8, offset=INT32_MAX - 1000)  # the pool may grow
        with pytest.raises(ConfigError, match="pad_value gives entries of -2147483649"):
            PlainBatchTables(rig.manager, 3, 8, [memory], pad_value=-INT32_MAX - 2)
        with pytest.raises(ConfigError, match="offset is -1"):
            PlainBatchTables(rig.manager, 3, 8, [memory], offset=-1)
        assert memory.tolist() == [[77] * 8] * 3
        wide = memory.astype(np.int64)
        assert PlainBatchTables(rig.manager, 3, 8, [wide], -INT32_MAX - 2).table(0) is wide
        assert wide.tolist() == [[-INT32_MAX - 2] * 8] * 3


def test_page_indices_of_a_cache_are_base_page_indices_in_any_table() -> None:
    """Only the table has the offset; limits of a row hold for it too."""
    with Rig(small(32), engine=False) as rig:
        tables = with_null_block(rig.manager, 2, 4)
        cache = rig.open()
        tables.add(cache)
        assert cache.resize(12)
        pages = list(cache.get_base_page_indices(0))
        assert pages == list(cache.get_aggregated_page_indices(0)) == [0, 1, 2]
        assert tables.table(0).tolist() == [[1, 2, 3, 0], [0, 0, 0, 0]]
        with pytest.raises(ConfigError, match="too short: 4 entries for 5 blocks"):
            cache.resize(17)
        tables.remove(cache)
        assert tables.table(0).tolist() == [[0] * 4] * 2
        assert cache.resize(17)
        assert list(cache.get_base_page_indices(0))[:3] == pages


def test_a_dropped_cache_frees_its_row_with_its_pages() -> None:
    """The next call closes the cache."""
    with Rig(small(32), engine=False) as rig:
        tables = PlainBatchTables(rig.manager, 1, 8)
        cache = rig.manager.create_kv_cache()
        assert cache.resume(rig.stream)
        assert cache.resize(8)
        tables.add(cache)
        del cache
        gc.collect()
        with pytest.warns(ResourceWarning):
            rig.manager.create_kv_cache().close()
        assert tables.num_unused_rows == 1
        assert tables.table(0).tolist() == [[BAD_PAGE_INDEX] * 8]


def test_a_model_of_recurrent_layers_only() -> None:
    """Its table has one entry for each request."""
    from tests.support.models import ssm

    with Rig(model([ssm(0, GRAIN // 8)], gpu=GRAIN), engine=False) as rig:
        tables = PlainBatchTables(rig.manager, 3, 4)
        cache = rig.create()
        row = tables.add(cache)
        version = tables.version(0)
        assert tables.table(0).tolist() == [[BAD_PAGE_INDEX]] * 3
        assert cache.resume(rig.stream)
        assert tables.table(0).tolist()[row] == [cache.get_ssm_block_base_index(0)]
        assert tables.version(0) > version
        cache.suspend()
        assert tables.table(0).tolist() == [[BAD_PAGE_INDEX]] * 3


def test_memory_that_cannot_be_pinned_is_an_error_of_ours() -> None:
    """torch pins memory only where it has a GPU."""
    torch: Any = pytest.importorskip("torch")
    from kv_cache_manager_v2.extras import torch as extra

    with Rig(small(32), engine=False) as rig:
        if torch.cuda.is_available():
            assert extra.BatchTables(rig.manager, 3, 8, pin_memory=True).table(0).is_pinned()
            return
        with pytest.raises(ConfigError, match="pin_memory is True, but torch finds no GPU"):
            extra.BatchTables(rig.manager, 3, 8, pin_memory=True)


def test_a_cache_that_is_closed_on_a_poisoned_manager_frees_its_row() -> None:
    """The manager is repaired afterwards, and the tables serve as many requests as before."""
    with Rig(small(16)) as rig:
        tables = PlainBatchTables(rig.manager, 1, 8)
        cache = rig.create()
        tables.add(cache)
        cache.state.shared.corrupt("a cause")
        cache.close()
        assert tables.num_unused_rows == 1
        rig.manager.clear_reusable_blocks()
        assert rig.manager.take_poison() == "a cause"
        assert tables.add(rig.open()) == 0
