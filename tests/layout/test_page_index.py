"""Page indices: the formulas, BAD, expansion, scratch, and the int32 limit."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache_manager_v2.config import LayerConfig
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.ids import INT32_MAX, DataRole, LayerId, LifeCycleId, PageIndexMode, PoolGroupId, PoolId
from kv_cache_manager_v2.layout.arithmetic import HalfOpenRange
from kv_cache_manager_v2.layout.page_index import (
    PageIndexConverter,
    ScratchDesc,
    buffer_base,
    page_index_upper_bound,
    resolve_mode,
)
from kv_cache_manager_v2.layout.pools import BufferPlace, StorageLayout, build_layout
from kv_cache_manager_v2.layout.sizing import check_index_range, size_levels
from tests.support.models import GIB, KEY, VALUE, attention, model

SHARED, PER_LAYER = PageIndexMode.SHARED, PageIndexMode.PER_LAYER


def small_layout(*layers: LayerConfig) -> StorageLayout:
    return build_layout(model(layers, tokens_per_block=8))


def test_shared_and_per_layer() -> None:
    """Index = i * scale, plus the buffer's position if PER_LAYER; BAD stays BAD, for keys and for values."""
    place = small_layout(attention(0, 64, 64), attention(1, 64, 64)).place(LayerId(1), VALUE)
    convert = PageIndexConverter(place)
    assert list(convert([0, 2, -1])) == [0, 8, -1]
    assert list(convert([0, 2, -1], SHARED)) == [0, 8, -1]
    assert list(convert([0, 2, -1], PER_LAYER)) == [3, 11, -1]
    assert convert([5]).typecode == "i"
    assert list(convert([])) == []


def test_expansion() -> None:
    """A layer with half-size blocks has two indices per block; without a page, both are BAD."""
    layout = build_layout(model([attention(0, 2048), attention(1, 1024, override=64)], tokens_per_block=128))
    convert = PageIndexConverter(layout.place(LayerId(1), KEY))
    assert list(convert([3, -1])) == [12, 13, -1, -1]
    assert list(convert([3, -1], PER_LAYER)) == [14, 15, -1, -1]


@pytest.mark.parametrize("kind", ["list", "tuple", "array", "memoryview", "numpy", "int64", "generator"])
def test_inputs(kind: str) -> None:
    """Any sequence or buffer of integers is accepted, and a list is not changed."""
    values = [1, -1, 3]
    indices: Any = values
    if kind == "tuple":
        indices = tuple(values)
    elif kind == "array":
        indices = array("i", values)
    elif kind == "memoryview":
        indices = memoryview(array("i", values))
    elif kind in ("numpy", "int64"):
        numpy = pytest.importorskip("numpy")
        indices = numpy.array(values, dtype=numpy.int32 if kind == "numpy" else numpy.int64)
    elif kind == "generator":
        indices = (value for value in values)
    convert = PageIndexConverter(small_layout(attention(0, 64, 64)).place(LayerId(0), VALUE))
    assert list(convert(indices, PER_LAYER)) == [3, -1, 7]
    assert values == [1, -1, 3]


def test_int32_overflow_is_refused() -> None:
    """With scale 262144, base 8191 fits int32, and 8192 does not: that is an error, not a wrapped index."""
    place = BufferPlace(LifeCycleId(0), PoolGroupId(0), PoolId(0))
    place.scale = 262144
    convert = PageIndexConverter(place)
    assert list(convert([8191, -1])) == [8191 * 262144, -1]
    for base in range(8192, 8201):
        with pytest.raises(ConfigError, match=f"page index {base * 262144} does not fit int32"):
            convert([base, -1])
    place.position = 262143
    assert list(PageIndexConverter(place)([8191], PER_LAYER)) == [INT32_MAX]


def test_byte_offsets_do_not_wrap() -> None:
    """Page stride 1,039,680 at index 2066 is a byte offset above 2**31."""
    layout = build_layout(model([attention(0, 1039680)]))
    place = layout.place(LayerId(0), KEY)
    (index,) = PageIndexConverter(place)([2066])
    assert buffer_base(place, 1 << 40, SHARED) + place.stride * index == (1 << 40) + 2147978880


def test_a_layout_beyond_int32_is_refused_at_construction() -> None:
    """A quota that gives more page indices than fit int32 is a ConfigError that names the limit."""
    layers = [attention(layer, 1, 1) for layer in range(8)]
    config = model(layers, gpu=GIB)
    layout = build_layout(config)
    assert size_levels(layout, config)[0].slots == [GIB // 16]
    assert layout.max_slots(0) == (1 << 31) // 16
    config = model(layers, gpu=2 * GIB + 64)
    with pytest.raises(ConfigError, match=r"at most 134217728 slots are possible"):
        size_levels(layout, config)
    check_index_range(layout, [layout.max_slots(0)])
    with pytest.raises(ConfigError, match="more than fit int32"):
        check_index_range(layout, [layout.max_slots(0) + 1])


def test_the_largest_index_fits_the_limit() -> None:
    """With max_slots slots the last index fits int32; with one slot more it does not."""
    layout = build_layout(model([attention(0, 64), attention(1, 64), attention(2, 16, override=2)], tokens_per_block=8))
    limit = layout.max_slots(0)
    largest = 0
    for layer in range(3):
        convert = PageIndexConverter(layout.place(LayerId(layer), KEY))
        largest = max(largest, *convert([limit - 1], PER_LAYER))
    assert largest <= INT32_MAX
    with pytest.raises(ConfigError, match="does not fit int32"):
        PageIndexConverter(layout.place(LayerId(2), KEY))([limit], PER_LAYER)


@given(
    st.lists(st.lists(st.sampled_from([8, 16]), min_size=1, max_size=3), min_size=1, max_size=5),
    st.sampled_from([None, 4, 2]),
    st.lists(st.integers(-1, 50), max_size=20),
    st.integers(0, 1 << 48),
)
def test_index_and_stride_give_the_slot_address(
    sizes: list[list[int]], override: int | None, bases: list[int], pool_base: int
) -> None:
    """Base + stride * index is the address of the buffer in its slot, in both modes, for each of its own blocks."""
    layout = small_layout(*[attention(layer, *of_layer, override=override) for layer, of_layer in enumerate(sizes)])
    for buffer in layout.all_buffer_ids:
        place = layout.place(*buffer)
        slot_bytes = layout.slot_sizes[place.pool_group][place.pool]
        bound = page_index_upper_bound(layout, place, 51)
        for mode in (SHARED, PER_LAYER):
            indices = PageIndexConverter(place)(bases, mode)
            assert len(indices) == len(bases) * place.expansion
            for position, index in enumerate(indices):
                base, repetition = bases[position // place.expansion], position % place.expansion
                if base < 0:
                    assert index == -1
                    continue
                address = pool_base + base * slot_bytes + place.offset + repetition * place.stride
                assert buffer_base(place, pool_base, mode) + place.stride * index == address
                assert mode is PER_LAYER or index < bound
        assert place.offset + bound * place.stride == 51 * slot_bytes  # a tensor of `bound` pages ends where the pool ends


@given(
    st.lists(st.lists(st.sampled_from([8, 16]), min_size=1, max_size=3), min_size=1, max_size=5),
    st.integers(0, 4),
    st.integers(0, 20),
)
def test_scratch_parts_of_a_layer_never_meet(sizes: list[list[int]], beg: int, num_blocks: int) -> None:
    """The buffers of one layer in all scratch blocks occupy distinct bytes, all of them inside the scratch slots."""
    layout = small_layout(*[attention(layer, *of_layer, window=8) for layer, of_layer in enumerate(sizes)])
    slots = [100 + 7 * number for number in range(layout.scratch_slots(0, num_blocks))]
    scratch = ScratchDesc(HalfOpenRange(beg, beg + num_blocks), slots)
    bases = [50 + ordinal for ordinal in range(beg)] + [-1] * num_blocks + [90]
    for layer, of_layer in enumerate(sizes):
        taken: set[tuple[int, int]] = set()
        for number in range(len(of_layer)):
            role = DataRole(["key", "value", "key_scale"][number])
            place = layout.place(LayerId(layer), role)
            indices = PageIndexConverter(place, True)(bases, PER_LAYER, scratch)
            for ordinal, index in enumerate(indices):
                slot, part = divmod(index, place.scale)
                if beg <= ordinal < beg + num_blocks:
                    assert slot in slots
                    assert (place.pool, index) not in taken
                    taken.add((place.pool, index))
                else:
                    assert (slot, part) == (bases[ordinal], place.position)


def test_scratch_formula() -> None:
    """The p-th block of the scratch range, in layers of u buffers each: with t = p * u its slot is t // scale, its part
    (t mod scale + position) mod scale."""
    layout = small_layout(*[attention(layer, 64, 64, window=8) for layer in range(4)])
    slots = [11, 5]
    scratch = ScratchDesc(HalfOpenRange(1, 8), slots)
    for buffer in layout.all_buffer_ids:
        place = layout.place(*buffer)
        indices = PageIndexConverter(place)([3] + [-1] * 7 + [4], PER_LAYER, scratch)
        expected = [3 * 8 + place.position]
        for number in range(7):
            part = number * 2
            expected.append(slots[part // 8] * 8 + (part % 8 + place.position) % 8)
        expected.append(4 * 8 + place.position)
        assert list(indices) == expected


def test_scratch_with_expansion() -> None:
    """A scratch block of a layer with half-size blocks has two consecutive indices like any other."""
    layout = small_layout(attention(0, 64, window=8, override=4), attention(1, 64, window=8, override=4))
    convert = PageIndexConverter(layout.place(LayerId(1), KEY))
    scratch = ScratchDesc(HalfOpenRange(0, 2), [6])
    assert list(convert([-1, -1, 2], PER_LAYER, scratch)) == [26, 27, 24, 25, 10, 11]


def test_scratch_beyond_the_list_is_cut() -> None:
    """A list shorter than the scratch range is converted up to its end."""
    convert = PageIndexConverter(small_layout(attention(0, 64, window=8)).place(LayerId(0), KEY))
    assert list(convert([-1, -1], PER_LAYER, ScratchDesc(HalfOpenRange(1, 9), [4, 5, 6, 7, 8, 9, 10, 11]))) == [-1, 4]


def test_scratch_needs_the_mode() -> None:
    """Scratch blocks need PER_LAYER, so with scratch reuse the mode must always be given."""
    place = small_layout(attention(0, 64, window=8)).place(LayerId(0), KEY)
    scratch = ScratchDesc(HalfOpenRange(0, 1), [4])
    with pytest.raises(AssertionError, match="mode is missing"):
        PageIndexConverter(place)([-1], None, scratch)
    with pytest.raises(ConfigError, match="cannot be addressed in mode"):
        PageIndexConverter(place)([-1], SHARED, scratch)
    with pytest.raises(ConfigError, match="mode is missing"):
        PageIndexConverter(place, True)([1])
    assert list(PageIndexConverter(place, True)([1], SHARED, ScratchDesc(HalfOpenRange(0, 0), []))) == [1]
    assert list(PageIndexConverter(place)([1], None, ScratchDesc(HalfOpenRange(0, 0), []))) == [1]


def test_too_few_scratch_slots() -> None:
    """A ScratchDesc with too few slots is refused."""
    place = small_layout(attention(0, 64, window=8), attention(1, 64, window=8)).place(LayerId(0), KEY)
    with pytest.raises(ConfigError, match="3 scratch blocks of 1 buffers each need 2 slots of 2 buffers, but the descriptor has 1"):
        PageIndexConverter(place)([-1, -1, -1], PER_LAYER, ScratchDesc(HalfOpenRange(0, 3), [4]))


def test_scratch_desc_is_true_iff_it_has_blocks() -> None:
    """A ScratchDesc is true if its range has blocks, whatever its slots, and compares by value."""
    assert not ScratchDesc(HalfOpenRange(3, 3), [1])
    assert ScratchDesc(HalfOpenRange(3, 4), [1])
    assert ScratchDesc(HalfOpenRange(3, 4), [1]) == ScratchDesc(HalfOpenRange(3, 4), (1,))
    assert ScratchDesc(HalfOpenRange(3, 4), [1]) != ScratchDesc(HalfOpenRange(3, 4), [2])
    assert hash(ScratchDesc(HalfOpenRange(3, 4), [1])) == hash(ScratchDesc(HalfOpenRange(3, 4), [1]))


def test_scratch_shares_slots() -> None:
    """32 layers with a window of 128 and a step of 1024 tokens: 28 scratch blocks share one slot, with distinct indices in each
    layer."""
    config = model([attention(layer, 64, window=128) for layer in range(32)], scratch_rewind=0)
    layout = build_layout(config)
    beg, end = layout.life_cycles[0].scratch(0, 1024, 0)
    assert (beg, end) == (0, 28)
    assert layout.scratch_slots(0, end - beg) == 1
    bases = [-1] * 28 + [1, 2, 3, 4]
    for layer in range(32):
        place = layout.place(LayerId(layer), KEY)
        indices = list(PageIndexConverter(place, True)(bases, PER_LAYER, ScratchDesc(HalfOpenRange(beg, end), [0])))
        assert len(set(indices)) == 32
        assert min(indices) >= 0


def test_upper_bound() -> None:
    """The upper bound is (slot size / size * slots - offset / size) * expansion."""
    layout = build_layout(model([attention(0, 2048), attention(1, 1024, override=64)], tokens_per_block=128))
    assert page_index_upper_bound(layout, layout.place(LayerId(0), KEY), 10) == 20
    assert page_index_upper_bound(layout, layout.place(LayerId(1), KEY), 10) == 38


def test_default_mode() -> None:
    """A mode left out means SHARED; with scratch reuse on it is a ValueError."""
    plain = build_layout(model([attention(0, 64)]))
    assert resolve_mode(plain, None) is SHARED
    assert resolve_mode(plain, PER_LAYER) is PER_LAYER
    scratch = build_layout(model([attention(0, 64, window=8)], scratch_rewind=0))
    assert resolve_mode(scratch, SHARED) is SHARED
    with pytest.raises(ValueError, match="mode is missing"):
        resolve_mode(scratch, None)


@pytest.mark.parametrize(("window", "scratch_rewind", "refused"), [(8, 0, True), (None, 0, False), (8, None, False)])
def test_scratch_pages_of_a_kernel_that_crosses_no_slot(window: int | None, scratch_rewind: int | None, refused: bool) -> None:
    """Two buffers of a layer in a slot of three: a kernel that computed scratch indices itself would make them overlap."""
    layers = (attention(0, 64, 64, window=window), attention(1, 64, window=window))
    layout = build_layout(model(layers, tokens_per_block=8, scratch_rewind=scratch_rewind))
    whole = PageIndexConverter(layout.place(LayerId(1), KEY))
    assert whole.scratch_pages_per_block == 1
    converter = PageIndexConverter(layout.place(LayerId(0), KEY))
    if not refused:
        assert converter.scratch_pages_per_block == 2
        return
    with pytest.raises(ConfigError, match=r"the layer's 2 buffers do not divide a slot of 3.*calling the converter"):
        _ = converter.scratch_pages_per_block
