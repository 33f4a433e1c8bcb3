"""Token slots: the positions that a step writes and reads, against their definition written as a loop over positions."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kv_cache_manager_v2 import (
    BAD_PAGE_INDEX,
    ConfigError,
    KVCache,
    LayerId,
    LogicError,
    PageIndexConverter,
    PageIndexMode,
    TokenSlots,
    slots_to_read,
    slots_to_write,
)
from kv_cache_manager_v2.buffers import numpy_or_none
from kv_cache_manager_v2.config import LayerConfig
from tests.charter.toys import ChunkedLayerConfig
from tests.support.models import KEY, MIB, VALUE, attention, buffers, model, small
from tests.support.rig import Rig, toks

PER_LAYER = PageIndexMode.PER_LAYER
SIZE = 8  # tokens per block


def layers() -> list[LayerConfig]:
    """Full attention twice, a window, and a window with sinks that do not fill their last block."""
    return [
        attention(0, 64, 64),
        attention(1, 64, 64),
        attention(2, 64, 64, window=20),
        attention(3, 64, 64, window=11, sink=13),
    ]


def rig_of(scratch_rewind: int | None = None) -> Rig:
    return Rig(model(layers(), tokens_per_block=SIZE, gpu=8 * MIB, scratch_rewind=scratch_rewind), engine=False)


def seen(layer: LayerConfig, begin: int, end: int) -> list[int]:
    """The positions that queries at begin .. end - 1 read, by definition."""
    window = layer.window_size
    found: set[int] = set()
    for query in range(begin, end):
        for position in range(query + 1):
            if window is None or query - position < window or position < layer.sink_size:
                found.add(position)
    return sorted(found)


def expected(
    cache: KVCache, group: int, positions: Sequence[int], converter: PageIndexConverter | None, mode: PageIndexMode | None
) -> list[int]:
    pages = list(cache.get_base_page_indices(group))
    if converter is not None:
        pages = list(converter(pages, mode, cache.get_scratch_desc(group)))
    return [pages[p // SIZE] * SIZE + p % SIZE if pages[p // SIZE] >= 0 else BAD_PAGE_INDEX for p in positions]


def by_cache(result: TokenSlots) -> list[list[int]]:
    slots, offsets = result.slots.tolist(), result.offsets.tolist()
    return [slots[offsets[i] : offsets[i + 1]] for i in range(len(offsets) - 1)]


def started(rig: Rig, lengths: Sequence[tuple[int, int]]) -> list[KVCache]:
    """ACTIVE caches of (history, capacity)."""
    caches = [rig.create() for _length in lengths]
    for cache, (history, capacity) in zip(caches, lengths, strict=True):
        assert cache.resume(rig.stream)
        assert cache.resize(capacity, history), cache.last_shortage
    return caches


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("longest", [30, 1500])
def test_slots_are_those_of_the_definition(longest: int, seed: int) -> None:
    """For several requests at once, each layer and mode; short and long runs; by default from history to capacity."""
    rng = random.Random(seed)
    with rig_of() as rig:
        lengths = []
        for _request in range(5):
            capacity = rng.randrange(longest)
            lengths.append((rng.randrange(max(0, capacity - 200), capacity + 1), capacity))
        caches = started(rig, lengths)
        begins = [history for history, _capacity in lengths]
        ends = [capacity for _history, capacity in lengths]
        later = [rng.randrange(begin, end + 1) for begin, end in zip(begins, ends, strict=True)]
        for layer in layers():
            group = rig.group(layer.layer_id)
            converter = rig.manager.get_page_index_converter(layer.layer_id, VALUE)
            wanted = [
                (seen(layer, begins[number], ends[number]), seen(layer, later[number], ends[number]))
                for number in range(len(caches))
            ]
            for convert, mode in ((None, None), (converter, None), (converter, PER_LAYER)):
                written = by_cache(slots_to_write(caches, group, converter=convert, index_mode=mode))
                read = by_cache(slots_to_read(caches, group, converter=convert, index_mode=mode))
                some = by_cache(slots_to_read(caches, group, array("q", later), np.array(ends), convert, mode))
                for number, cache in enumerate(caches):
                    begin, end = begins[number], ends[number]
                    assert written[number] == expected(cache, group, range(begin, end), convert, mode)
                    assert read[number] == expected(cache, group, wanted[number][0], convert, mode)
                    assert BAD_PAGE_INDEX not in read[number]
                    assert some[number] == expected(cache, group, wanted[number][1], convert, mode)


@pytest.mark.parametrize("capacity", [60, 900])
def test_scratch_blocks_have_slots_too(capacity: int) -> None:
    """In a long prefill step with scratch reuse: one layer at a time, with its converter and PER_LAYER."""
    with rig_of(scratch_rewind=0) as rig:
        caches = started(rig, [(0, capacity), (0, 3)])
        assert caches[0].has_scratch_slots
        for layer in layers():
            group = rig.group(layer.layer_id)
            converter = rig.manager.get_page_index_converter(layer.layer_id, VALUE)
            for slots in (slots_to_read, slots_to_write):
                result = by_cache(slots(caches, group, converter=converter, index_mode=PER_LAYER))
                for number, cache in enumerate(caches):
                    assert result[number] == expected(cache, group, range(cache.capacity), converter, PER_LAYER)
                    assert BAD_PAGE_INDEX not in result[number]
                with pytest.raises(ConfigError, match="mode is missing"):
                    slots(caches, group, converter=converter)
        with pytest.raises(ConfigError, match="no base page index"):
            slots_to_write(caches, rig.group(2))


def test_a_life_cycle_of_ones_own_says_what_it_reads() -> None:
    """Chunked attention reads its chunk; `first_read` follows from the stale blocks, and its window."""
    layer = ChunkedLayerConfig(LayerId(0), buffers(64), chunk=16)
    with Rig(model([layer], tokens_per_block=SIZE, gpu=4 * MIB), engine=False) as rig:
        for begin in range(40):
            (cache,) = started(rig, [(begin, begin + 3)])
            chunks = range(begin - begin % 16, begin + 3)
            assert by_cache(slots_to_read([cache], 0)) == [expected(cache, 0, chunks, None, None)]
            cache.close()


@pytest.mark.parametrize("capacity", [9, 4000])
@pytest.mark.parametrize("kind", ["array", "numpy", "torch"])
@pytest.mark.parametrize("wide", [False, True])
def test_buffers_of_the_caller_are_filled(kind: str, wide: bool, capacity: int) -> None:
    """Slots and prefix sums, of both widths; later entries are unchanged."""

    def buffer(length: int) -> Any:
        if kind == "torch":
            torch = pytest.importorskip("torch")
            return torch.full((length,), 77, dtype=torch.int64 if wide else torch.int32)
        if kind == "numpy":
            return np.full(length, 77, np.int64 if wide else np.int32)
        return array("q" if wide else "i", [77] * length)

    with rig_of() as rig:
        caches = started(rig, [(2, capacity), (5, 5), (0, 3)])
        plain = slots_to_write(caches, 0)
        out, offsets = buffer(plain.total + 3), buffer(6)
        result = slots_to_write(caches, 0, out=out, offsets=offsets)
        assert result.slots is out
        assert result.offsets is offsets
        assert result.total == plain.total == capacity + 1
        assert out.tolist() == [*plain.slots.tolist(), 77, 77, 77]
        assert offsets.tolist() == [0, capacity - 2, capacity - 2, capacity + 1, 77, 77]


def test_mistakes_write_nothing() -> None:
    """Each raises before the buffers change, and says which cache or buffer it is."""
    with rig_of() as rig:
        caches = started(rig, [(2, 9), (0, 3)])
        out, offsets = np.full(20, 7, np.int32), np.full(3, 7, np.int32)

        def refused(error: type[Exception], match: str, *arguments: Any, **named: Any) -> None:
            with pytest.raises(error, match=match):
                slots_to_write(*arguments, **({"out": out, "offsets": offsets} | named))
            assert set(out.tolist()) == set(offsets.tolist()) == {7}

        refused(ConfigError, r"begins\[1\] is 0 and ends\[1\] is 4; .* at most the capacity, 3", caches, 0, [2, 0], [9, 4])
        refused(ConfigError, r"begins\[0\] is 9 and ends\[0\] is 2", caches, 0, [9, 0], [2, 3])
        refused(ConfigError, "begins has 1 positions for 2 caches", caches, 0, [9])
        refused(ConfigError, r"ends\[0\] is -1", caches, 0, None, [-1, 3])
        refused(ConfigError, "layer group 9 has no page per block; layer_group_id must be one of 0, 1, 2", caches, 9)
        refused(ConfigError, "out has 9 entries; it must have at least 10", caches, 0, out=np.zeros(9, np.int32))
        refused(ConfigError, "offsets has 2 entries; it must have at least 3", caches, 0, offsets=np.zeros(2, np.int32))
        caches[1].suspend()
        refused(LogicError, r"caches\[1\] is not: resume it first", caches, 0)
    assert slots_to_write([], 0).offsets.tolist() == [0]


def test_slots_beyond_int32_need_64_bits() -> None:
    """A converter whose token slots can pass 2**31 gives 64-bit slots, and refuses a narrower buffer."""
    with Rig(small(16), engine=False) as rig:
        (cache,) = started(rig, [(0, 16)])
        converter = rig.manager.get_page_index_converter(0, KEY)
        converter.scale = 1 << 28
        bases = list(cache.get_base_page_indices(0))
        wanted = [(base << 28) * 4 + position for base in bases for position in range(4)]
        assert max(wanted) > 1 << 31
        assert slots_to_write([cache], 0, converter=converter).slots.tolist() == wanted
        with pytest.raises(ConfigError, match="pass an int64 buffer"):
            slots_to_write([cache], 0, converter=converter, out=np.zeros(16, np.int32))
        converter.scale = 1 << 25  # the last slot of 16 pages is 2**31 - 1
        assert slots_to_write([cache], 0, converter=converter, out=np.zeros(16, np.int32)).total == 16


def test_a_committed_block_that_was_adopted_has_the_slots_of_its_new_page() -> None:
    """Slots follow the request's present pages."""
    with Rig(small(16), engine=False) as rig:
        first, second = started(rig, [(0, 8), (0, 8)])
        first.commit(toks(0, 8))
        before = slots_to_write([second], 0, [0], [8]).slots.tolist()
        second.commit(toks(0, 8))
        after = slots_to_write([second], 0, [0], [8]).slots.tolist()
        assert after != before
        assert after == slots_to_write([first], 0, [0], [8]).slots.tolist()


def test_numpy_is_there_for_the_tests_of_whole_arrays() -> None:
    assert numpy_or_none() is np
