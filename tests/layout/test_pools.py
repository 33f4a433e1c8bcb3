"""Layouts: which buffers lie together, which layer groups share slots, and where each buffer is."""

from __future__ import annotations

import copy
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_cache_manager_v2.config import LayerConfig
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.ids import DataRole, LayerId
from kv_cache_manager_v2.layout.pools import BufferId, CoalescedBuffer, build_layout
from tests.support.models import KEY, KIB, VALUE, attention, model, ssm


def test_buffer_id_is_a_tuple() -> None:
    """Equality, hash, length, index and unpacking interchange with a plain tuple; a field cannot be set."""
    buffer = BufferId(LayerId(3), KEY)
    assert buffer == (3, "key")
    assert hash(buffer) == hash((3, "key"))
    assert {buffer: 1}[(3, "key")] == 1  # type: ignore[index]
    assert len(buffer) == 2
    assert buffer[0] == 3
    layer, role = buffer
    assert (layer, role) == (3, "key")
    with pytest.raises(AttributeError):
        buffer.layer_id = LayerId(4)  # type: ignore[misc]


def test_uniform_layers() -> None:
    """Uniform layers give one life cycle, one group, one pool, slot = layers * roles * size."""
    layout = build_layout(model([attention(layer, 1024, 1024) for layer in range(4)]))
    assert layout.num_life_cycles == 1
    assert layout.slot_sizes == [[4 * 2 * 1024]]
    assert layout.slot_bytes(0) == 8192
    assert layout.frac_max(0) == (2, 8)


def test_window_and_full_share_a_group() -> None:
    """Window and full layers of equal size give two life cycles in one group, in first-seen order."""
    layout = build_layout(
        model([attention(0, 1024), attention(1, 1024, window=64), attention(2, 1024), attention(3, 1024, window=64)])
    )
    assert [cycle.window_size for cycle in layout.life_cycles] == [None, 64]
    assert layout.pool_group_of == [0, 0]
    assert layout.members == [[0, 1]]
    assert layout.layers_of == [[0, 2], [1, 3]]
    assert [variant.layer_group_id for variant in layout.slot_descs[0].variants] == [0, 1]


def test_different_slot_sizes() -> None:
    """Different slot sizes give two groups."""
    layout = build_layout(model([attention(0, 1024), attention(1, 2048, window=64)]))
    assert layout.slot_sizes == [[1024], [2048]]
    assert layout.pool_group_of == [0, 1]


def test_quantisation_scales() -> None:
    """Scale buffers add a second, smaller pool after the larger one, at any position in the layer."""
    layout = build_layout(model([attention(0, 64, 1024, 1024), attention(1, 64, 1024, 1024)]))
    assert layout.slot_sizes == [[4096, 128]]
    place = layout.place(LayerId(1), VALUE)
    assert (place.pool, place.offset, place.size, place.scale, place.position) == (0, 2048, 1024, 4, 2)
    assert (place.layer_util, place.layer_first) == (2, 2)
    scale = layout.place(LayerId(1), KEY)
    assert (scale.pool, scale.offset, scale.size, scale.scale, scale.position) == (1, 64, 64, 2, 1)


def test_equal_totals_of_unequal_sizes_are_separate_pools() -> None:
    """Coalesced buffers of other sizes but equal total keep pools of their own, in order of appearance."""
    layout = build_layout(model([attention(0, 512, 512, 1024)]))
    assert layout.slot_sizes == [[1024, 1024]]
    variant = layout.slot_descs[0].variants[0]
    assert [coalesced.single_buffer_size for coalesced in variant.coalesced_buffers] == [512, 1024]
    assert variant.slot_size_list == (1024, 1024)


def test_variants_of_a_group_may_divide_slots_differently() -> None:
    """Equal lists of totals share a group although buffer sizes and counts differ."""
    layout = build_layout(model([attention(0, 512, 512), attention(1, 1024, window=64)]))
    assert layout.slot_sizes == [[1024]]
    first, second = layout.slot_descs[0].variants
    assert first.coalesced_buffers[0].num_buffers == 2
    assert second.coalesced_buffers == (CoalescedBuffer(1024, (BufferId(LayerId(1), KEY),)),)


def test_sinks_collapse_to_blocks() -> None:
    """Different sink token counts with equal sink blocks are one life cycle."""
    layout = build_layout(
        model([attention(0, 64, window=8, sink=1), attention(1, 64, window=8, sink=32), attention(2, 64, window=8)])
    )
    assert [cycle.num_sink_blocks for cycle in layout.life_cycles] == [1, 0]
    assert layout.life_cycle_of_layer(LayerId(1)) == 0
    assert layout.life_cycle_of_layer(LayerId(2)) == 1


def test_ssm_layers_form_one_life_cycle() -> None:
    """All recurrent layers share one life cycle, named by `ssm`; without any it is None."""
    layout = build_layout(model([ssm(0, 4096), attention(1, 1024), ssm(2, 4096)]))
    assert layout.ssm is layout.life_cycles[0]
    assert layout.slot_sizes == [[8192], [1024]]
    assert build_layout(model([attention(0, 64)])).ssm is None


def test_override_expands() -> None:
    """Half-size blocks repeat twice; a buffer of half the size with them lies with the others."""
    layout = build_layout(model([attention(0, 2048), attention(1, 1024, override=64)], tokens_per_block=128))
    assert layout.slot_sizes == [[4096]]
    plain, halves = layout.place(LayerId(0), KEY), layout.place(LayerId(1), KEY)
    assert (plain.size, plain.expansion, plain.stride) == (2048, 1, 2048)
    assert (halves.size, halves.expansion, halves.stride, halves.offset) == (2048, 2, 1024, 2048)


def test_largest_fraction_is_exact() -> None:
    """frac_max is the exact largest part of a pool that one layer fills, over layers and pools."""
    layout = build_layout(model([attention(0, 64, 64, 128), attention(1, 64, 128), attention(2, 128)], scratch_rewind=0))
    assert layout.slot_sizes == [[384, 192]]
    assert layout.frac_max(0) == (2, 3)  # layer 0 has 2 of the 3 buffers of 64 bytes, and 1 of the 3 of 128
    assert [layout.scratch_slots(0, blocks) for blocks in (0, 1, 2, 3, 4)] == [0, 1, 2, 2, 3]


def test_unknown_layers_and_roles() -> None:
    """A layer or role that is not configured is refused, naming what there is."""
    layout = build_layout(model([attention(5, 64, 64)]))
    with pytest.raises(ConfigError, match=r"layer 4 is not configured; the layers are \[5\]"):
        layout.life_cycle_of_layer(LayerId(4))
    with pytest.raises(ConfigError, match="layer 4 is not configured"):
        layout.place(LayerId(4), KEY)
    with pytest.raises(ConfigError, match=r"layer 5 has no buffer of role 'x'; its roles are \['key', 'value'\]"):
        layout.place(LayerId(5), DataRole("x"))


def test_a_changed_configuration_is_checked() -> None:
    """What was assigned after construction is checked before anything is built."""
    config = model([attention(0, 64)])
    config.layers[0].buffers[0].size = 0
    with pytest.raises(ConfigError, match="size of buffer 'key' is 0"):
        build_layout(config)


def test_records_are_values() -> None:
    """The descriptors compare by value, and can be copied, replaced and turned into dicts, but not changed."""
    desc = build_layout(model([attention(0, 1 * KIB, 1 * KIB)])).slot_descs[0]
    again = copy.deepcopy(desc)
    assert again == desc
    assert hash(again) == hash(desc)
    coalesced = desc.variants[0].coalesced_buffers[0]
    assert (coalesced.size, coalesced.num_buffers) == (2048, 2)
    assert dataclasses.asdict(coalesced)["buffer_ids"] == ((0, "key"), (0, "value"))
    with pytest.raises(AttributeError):
        coalesced.single_buffer_size = 3  # type: ignore[misc]


@st.composite
def layer_lists(draw: st.DrawFn) -> list[LayerConfig]:
    layers: list[LayerConfig] = []
    for layer in range(draw(st.integers(1, 6))):
        sizes = draw(st.lists(st.sampled_from([8, 16, 24, 48]), min_size=1, max_size=4))
        if draw(st.integers(0, 4)) == 0:
            layers.append(ssm(layer, *sizes))
        else:
            window = draw(st.sampled_from([None, 8, 16]))
            override = draw(st.sampled_from([None, 4, 2]))
            layers.append(attention(layer, *sizes, window=window, override=override))
    return layers


@given(layer_lists())
def test_no_byte_of_a_slot_is_shared_or_lost(layers: list[LayerConfig]) -> None:
    """In each layer group the buffers tile the slot's pools exactly; equal size lists, and only they, share a group."""
    layout = build_layout(model(layers, tokens_per_block=8))
    layout.check_invariants()
    for cycle in layout.life_cycles:
        sizes = layout.slot_sizes[layout.pool_group_of[cycle.index]]
        used = [0] * len(sizes)
        ends = [0] * len(sizes)
        for buffer in layout.all_buffer_ids:
            if layout.life_cycle_of_layer(buffer.layer_id) == cycle.index:
                place = layout.place(*buffer)
                used[place.pool] += place.size
                ends[place.pool] = max(ends[place.pool], place.offset + place.size)
        assert used == sizes
        assert ends == sizes
    assert len({tuple(sizes) for sizes in layout.slot_sizes}) == layout.num_pool_groups
