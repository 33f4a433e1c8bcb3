"""Rows of page indices: views of them, their version, and the memory that an engine may attach."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from kv_cache_manager_v2 import BAD_PAGE_INDEX, ConfigError, KVCache
from kv_cache_manager_v2.request.page_index_row import PageIndexRow, bad_run
from tests.support.models import small
from tests.support.rig import Rig, toks

CHANGES: list[Callable[[PageIndexRow], None]] = [
    lambda row: row.append(7),
    lambda row: row.extend(array("i", [7, 8])),
    lambda row: row.truncate(1),
    lambda row: row.fill(array("i", [4, 5, 6, 7])),
    lambda row: row.fill(array("i", [4])),
]


def row_of(*values: int) -> PageIndexRow:
    row = PageIndexRow()
    row.extend(array("i", values))
    return row


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_a_view_never_stops_a_change_of_length_and_keeps_its_entries(number: int) -> None:
    """The row moves to a new array, whose entries are the same as without a view."""
    row, alone = row_of(1, 2, 3), row_of(1, 2, 3)
    view = memoryview(row.live())  # type: ignore[arg-type]
    CHANGES[number](row)
    CHANGES[number](alone)
    assert list(row.live()) == list(alone.live())
    assert row.version == alone.version
    assert list(view) == [1, 2, 3]


def test_a_view_shows_changes_in_place() -> None:
    row = row_of(1, 2, 3)
    view = memoryview(row.live())  # type: ignore[arg-type]
    row.set(1, 9)
    assert list(view) == [1, 9, 3]
    row.blank()
    assert list(view) == [BAD_PAGE_INDEX] * 3


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("attached", [False, True])
def test_the_version_changes_exactly_when_an_entry_or_the_array_does(seed: int, attached: bool) -> None:
    rng = random.Random(seed)
    row = row_of(1, 2)
    if attached:
        row.attach(array("i", bad_run(64)))
    views = []
    for _ in range(300):
        before = (list(row.live())[: row.length], id(row.live()), row.length)
        version = row.version
        values = array("i", [rng.choice([BAD_PAGE_INDEX, 3]) for _ in range(rng.randrange(4))])
        act = rng.randrange(8)
        if act == 0 and row.length < 50:
            row.append(rng.choice([BAD_PAGE_INDEX, 3]))
        elif act == 1 and row.length < 50:
            row.extend(values)
        elif act == 2:
            row.truncate(rng.randrange(row.length + 2))
        elif act == 3:
            row.fill(values)
        elif act == 4:
            row.blank()
        elif act == 5 and row.length > 0:
            row.set(rng.randrange(row.length), rng.choice([BAD_PAGE_INDEX, 3]))
        elif act == 6:
            start = rng.randrange(row.length + 1)
            row.blank_range(start, start + rng.randrange(4))
        elif act == 7 and not attached:
            views.append((memoryview(row.live()), list(row.live())))  # type: ignore[arg-type]
            del views[:-3]
        after = (list(row.live())[: row.length], id(row.live()), row.length)
        if row.live() is not None and before != after:
            assert row.version > version, (act, before, after)
        if before[0] == after[0] and before[1:] == after[1:]:
            assert row.version == version, (act, before, after)


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize(("start", "end"), [(0, 0), (1, 2), (1, 4), (2, 9), (5, 7)])
def test_a_range_is_blanked_as_far_as_there_are_blocks(start: int, end: int, attached: bool) -> None:
    row = row_of(1, 2, 3, 4, 5)
    if attached:
        row.attach(array("i", bad_run(8)))
    view = memoryview(row.live())  # type: ignore[arg-type]
    row.blank_range(start, end)
    expected = [BAD_PAGE_INDEX if start <= ordinal < end else ordinal + 1 for ordinal in range(5)]
    assert list(row.values()) == expected
    assert list(view)[:5] == expected  # in place
    assert row.length == 5


def test_attaching_and_detaching_change_the_version() -> None:
    row = row_of(1, 2)
    versions = [row.version]
    buffer = array("i", [0] * 4)
    row.attach(buffer)
    versions.append(row.version)
    assert list(buffer) == [1, 2, BAD_PAGE_INDEX, BAD_PAGE_INDEX]
    row.detach()
    versions.append(row.version)
    row.detach()
    assert versions[0] < versions[1] < versions[2] == row.version


STEPS: list[Callable[[KVCache], bool | None]] = [
    lambda cache: cache.resize(20),
    lambda cache: cache.resize(60),
    lambda cache: cache.resize(8, 0),
    lambda cache: cache.commit(toks(0, 16)),
    lambda cache: cache.suspend(),
    lambda cache: cache.close(),
]


@pytest.mark.parametrize("number", range(len(STEPS)))
@pytest.mark.parametrize("kinds", [("full",), ("full", (6, 0))])
def test_a_request_goes_on_whatever_views_of_its_rows_there_are(number: int, kinds: tuple[object, ...]) -> None:
    with Rig(small(32, kinds=kinds), engine=False) as rig:  # type: ignore[arg-type]
        cache = rig.open()
        assert cache.resize(16)
        views = [memoryview(cache.get_base_page_indices(group)) for group in range(len(kinds))]  # type: ignore[arg-type]
        assert STEPS[number](cache) in (True, None)
        rig.manager.check_invariants()
        del views


def test_the_version_of_a_request_tells_whether_a_view_is_up_to_date() -> None:
    with Rig(small(16), engine=False) as rig:
        cache = rig.open()
        assert cache.resize(9)
        version = cache.get_base_page_indices_version(0)
        assert cache.resize(12), "within the block"
        cache.commit(toks(0, 8))
        assert cache.get_base_page_indices_version(0) == version
        assert cache.resize(13)
        assert cache.get_base_page_indices_version(0) > version
        with pytest.raises(ConfigError):
            cache.get_base_page_indices_version(7)


def listed(tensor: Any) -> list[int]:
    values: list[int] = tensor.tolist()
    return values


def test_a_torch_tensor_in_host_memory_is_written_in_place() -> None:
    torch = pytest.importorskip("torch")
    with Rig(small(16), engine=False) as rig:
        cache = rig.open()
        tensor: Any = torch.full((8,), 77, dtype=torch.int32)
        cache.set_base_page_index_buf(0, 0, tensor)
        assert cache.resize(16)
        assert cache.get_base_page_indices(0) is tensor
        pages = listed(tensor)
        assert sorted(pages[:4]) == sorted(set(pages[:4]))
        assert min(pages[:4]) >= 0
        assert pages[4:] == [BAD_PAGE_INDEX] * 4
        wrong = [
            torch.zeros(8, dtype=torch.int64),
            torch.zeros((8, 1), dtype=torch.int32),
            torch.zeros(16, dtype=torch.int32)[::2],
            torch.zeros(8, dtype=torch.int32, device="meta"),
            torch.zeros(3, dtype=torch.int32),
        ]
        for bad in wrong:
            with pytest.raises(ConfigError):
                cache.set_base_page_index_buf(0, 0, bad)
            assert listed(tensor) == pages
