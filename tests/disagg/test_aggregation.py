"""Aggregated descriptors: contiguous runs, a reproducible order, and the pool groups' descriptions."""

from __future__ import annotations

import random

import pytest

from kv_cache_manager_v2.disagg.aggregation import AggregatedPageDesc, ExpandedBuffer, aggregate, pool_group_descs
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.ids import DataRole, LayerId
from kv_cache_manager_v2.layout.pools import BufferId, PoolDesc, build_layout
from tests.support.models import KEY, VALUE, attention, model

BASES = [[0x10000, 0x20000], [0x30000, 0x40000]]


def buffer(layer: int, role: str) -> BufferId:
    return BufferId(LayerId(layer), DataRole(role))


def test_all_buffers_of_a_group_are_one_run_in_each_pool() -> None:
    """All buffers together give the whole slot of each pool of each layer group."""
    layout = build_layout(model([attention(0, 64, 64, 8), attention(1, 64, 64, 8, window=16), attention(2, 64, 64, 8)]))
    first, second = layout.slot_sizes
    descs = aggregate(layout, layout.all_buffer_ids, [[1000, 2000], [3000, 4000]])
    assert [(d.layer_group_id, d.base, d.size, d.stride) for d in descs] == [
        (0, 1000, first[0], first[0]),
        (0, 2000, first[1], first[1]),
        (1, 3000, second[0], second[0]),
        (1, 4000, second[1], second[1]),
    ]


def test_runs() -> None:
    """A run has base = pool base + start of the run, stride = slot size; a gap begins a new run."""
    layout = build_layout(model([attention(layer, 64, 64) for layer in range(3)]))
    ids = [buffer(2, "value"), buffer(0, "value"), buffer(1, "key")]
    group = layout.slot_descs[0].variants[0].layer_group_id
    assert aggregate(layout, ids, BASES) == [
        AggregatedPageDesc(0x10000 + 64, 128, 384, group, (ExpandedBuffer(ids[1], 1), ExpandedBuffer(ids[2], 1))),
        AggregatedPageDesc(0x10000 + 320, 64, 384, group, (ExpandedBuffer(ids[0], 1),)),
    ]


def test_order_is_that_of_the_layout() -> None:
    """The order of the request and repeated ids do not matter."""
    layout = build_layout(model([attention(7, 64, 64), attention(3, 64, 64, window=8), attention(5, 64, 64)]))
    expected = aggregate(layout, layout.all_buffer_ids, BASES)
    shuffled = list(layout.all_buffer_ids) * 2
    random.Random(7).shuffle(shuffled)
    assert aggregate(layout, shuffled, BASES) == expected
    assert [[b.id.layer_id for b in d.buffers] for d in expected] == [[7, 7, 5, 5], [3, 3]]


def test_expansion_is_told() -> None:
    """Buffers of half-size blocks keep their expansion in the run."""
    layout = build_layout(model([attention(0, 2048), attention(1, 1024, override=64)], tokens_per_block=128))
    (desc,) = aggregate(layout, layout.all_buffer_ids, BASES)
    assert [b.expansion for b in desc.buffers] == [1, 2]


def test_plain_tuples_and_unknown_buffers() -> None:
    """Plain tuples name buffers too; an unknown one is refused; nothing asked, nothing told."""
    layout = build_layout(model([attention(0, 64, 64)]))
    assert aggregate(layout, [(0, "key")], BASES) == aggregate(layout, [buffer(0, "key")], BASES)  # type: ignore[list-item]
    assert aggregate(layout, [], BASES) == []
    with pytest.raises(ConfigError, match="no buffer of role 'z'"):
        aggregate(layout, [buffer(0, "z")], BASES)


def test_pool_groups() -> None:
    """Each pool group tells its slots, its pools with addresses, and its variants."""
    layout = build_layout(model([attention(0, 64, 64, 8), attention(1, 32, 32, window=16)]))
    descs = pool_group_descs(layout, [10, 20], [[1000, 2000], [3000]])
    assert [desc.pool_group_index for desc in descs] == [0, 1]
    assert [desc.num_slots for desc in descs] == [10, 20]
    assert [(p.pool_index, p.base_address, p.slot_bytes) for p in descs[0].pools] == [(0, 1000, 128), (1, 2000, 8)]
    assert descs[1].pools == (PoolDesc(layout.place(LayerId(1), KEY).pool, 3000, 64),)
    assert descs[1].slot_desc.variants[0].coalesced_buffers[0].buffer_ids == ((1, KEY), (1, VALUE))
    assert descs[0].slot_desc.slot_size_list == (128, 8)
