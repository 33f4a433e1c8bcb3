"""Page tables: built from public descriptors, complete, extracted, and equal after a journey through a dictionary."""

from __future__ import annotations

import json

import pytest

from kv_cache_manager_v2 import (
    ConfigError,
    DataRole,
    EmulatedDriver,
    KVCacheManager,
    LayerGroupId,
    LayerId,
    LogicError,
    PageIndexMode,
)
from kv_cache_manager_v2.disagg.page_table import (
    HEADS_FIRST,
    INDEXED,
    TOKENS_FIRST,
    BufferEntry,
    KVCachePageTable,
    LayerInfo,
    MemoryRegion,
    PoolView,
    build_page_table,
    page_table_of,
    virtual_layer_id,
)
from tests.disagg.helpers import HEADS, Rank, Split
from tests.support.models import KIB, attention, model, ssm
from tests.support.rig import Rig, toks

HYBRID = Split(((0, 1, 2, 3, 4),), 1, TOKENS_FIRST, recurrent=4)
BOTH = Split(((0, 1, 2, 3),), 1, TOKENS_FIRST, both=1)


def rank(split: Split = HYBRID) -> Rank:
    return Rank(EmulatedDriver(), split, 0, 0)


def done(of: Rank) -> None:
    of.close()
    of.driver.close()


@pytest.mark.parametrize("split", [HYBRID, BOTH])
def test_every_buffer_has_the_address_that_the_manager_gives(split: Split) -> None:
    """Base address, offset, slot size and size of each buffer, as the manager's own answers say; each buffer once."""
    one = rank(split)
    seen = []
    for index, group in enumerate(one.table.layer_groups):
        for view in group.pool_views:
            assert view.mapper_kind == INDEXED
            assert view.pool_role == {entry.role for entry in view.entries}
            pool = one.table.pool(index, view)
            for entry in view.entries:
                layer = LayerId(entry.local_layer_id)
                role = DataRole(entry.role)
                assert pool.base_address + entry.offset == one.manager.get_mem_pool_base_address(layer, role, PageIndexMode.SHARED)
                assert entry.size == one.manager.get_page_stride(layer, role)
                assert one.manager.get_layer_group_id(layer, role) == index
                seen.append((layer, role))
    assert sorted(seen) == sorted(one.manager.all_buffer_ids)
    assert [len(group.pools) for group in one.table.pool_groups] == [len(desc.pools) for desc in one.manager.pool_group_descs]
    done(one)


def test_groups_say_what_their_layers_are() -> None:
    """Windows, heads and global ids of attention; recurrent layers are marked, and have no heads."""
    one = rank()
    full, window, recurrent = one.table.layer_groups
    assert (full.sliding_window_size, window.sliding_window_size, recurrent.sliding_window_size) == (None, 8, None)
    assert (full.recurrent, window.recurrent, recurrent.recurrent) == (False, False, True)
    assert (full.kv_head_num_per_rank, recurrent.kv_head_num_per_rank) == (HEADS, 0)
    assert [layer.global_id for layer in full.local_layers] == [0, 2]
    assert full.pool_group_idx == window.pool_group_idx != recurrent.pool_group_idx
    sections = one.table.state_sections(2)
    assert [(section.global_layer_id, section.role, section.nbytes) for section in sections] == [
        (4, "state", 8192),
        (4, "conv", 1024),
    ]
    assert sections[0].address == one.manager.get_mem_pool_base_address(*one.manager.all_buffer_ids[-2])
    assert [section.stride for section in sections] == [8192, 1024]
    with pytest.raises(ConfigError, match="layer group 0 is not recurrent"):
        one.table.state_sections(0)
    done(one)


def test_a_layer_with_a_state_is_in_two_groups() -> None:
    """Its heads and its window are those of its attention."""
    one = rank(BOTH)
    window, recurrent = one.table.layer_groups[1:]
    assert (window.recurrent, window.sliding_window_size, window.kv_head_num_per_rank) == (False, 8, HEADS)
    assert (recurrent.recurrent, recurrent.sliding_window_size, recurrent.kv_head_num_per_rank) == (True, None, 0)
    assert [layer.global_id for layer in window.local_layers] == [1, 3]
    assert [layer.global_id for layer in recurrent.local_layers] == [1]
    assert [section.role for section in one.table.state_sections(2)] == ["state", "conv"]
    done(one)


@pytest.mark.parametrize("split", [HYBRID, BOTH, Split(((0, 1),), 2, HEADS_FIRST, override=2)])
def test_dictionaries_go_round(split: Split) -> None:
    """to_dict is good for JSON, sorted and plain; from_dict gives an equal table."""
    one = rank(split)
    data = one.table.to_dict()
    assert KVCachePageTable.from_dict(data) == one.table
    text = json.dumps(data)
    assert KVCachePageTable.from_dict(json.loads(text)) == one.table
    assert json.dumps(KVCachePageTable.from_dict(json.loads(text)).to_dict()) == text
    roles = data["layer_groups"][0]["pool_views"][0]["pool_role"]  # type: ignore[index]
    assert roles == ["key", "value"]
    done(one)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"format": 2}, "format 2"),
        ({"tokens_per_block": "4"}, "'4' is not an integer"),
        ({"tensor_rank": True}, "True is not an integer"),
        ({"layer_groups": 3}, "3 is not a list"),
        ({"layer_groups": [3]}, "3 is not a dictionary"),
        ({"layer_groups": [{}]}, "no field 'sliding_window_size'"),
        ({"pool_groups": [[[1, 2]]]}, "2 items, not 3"),
    ],
)
def test_malformed_dictionaries_are_refused(change: dict[str, object], match: str) -> None:
    one = rank()
    data = one.table.to_dict()
    with pytest.raises(ConfigError, match=match):
        KVCachePageTable.from_dict({**data, **change})
    del data["pool_groups"]
    with pytest.raises(ValueError, match="no field 'pool_groups'"):
        KVCachePageTable.from_dict(data)
    done(one)


def test_slot_regions() -> None:
    """address = base + slot bytes * slot id; absent pages are left out; a slot past the end is refused."""
    config = model([attention(0, 64 * KIB, 4 * KIB), attention(1, 64 * KIB, 4 * KIB, window=64)], gpu=32 << 20)
    with Rig(config, engine=False) as rig:
        table = page_table_of(rig.manager)
        cache = rig.start(toks(0, 1)).cache
        assert cache.resize(256, 256)
        slots = table.request_slots(cache)
        assert slots[0] == rig.indices(cache, 0)
        assert [slot >= 0 for slot in slots[1]] == [False] * 6 + [True] * 2
        (pools,) = [group.pools for group in table.pool_groups]
        valid = slots[1][6:]
        assert table.slot_regions(1, slots[1]) == [
            (pool.base_address + pool.slot_bytes * slot, pool.slot_bytes) for pool in pools for slot in valid
        ]
        assert len(table.slot_regions(0, slots[0])) == 16
        with pytest.raises(ValueError, match=f"slot {pools[0].num_slots} of layer group 0"):
            table.slot_regions(0, [0, pools[0].num_slots])
        described = [page for page in rig.manager.get_aggregated_pages(rig.manager.all_buffer_ids) if page.layer_group_id == 1]
        assert [(page.base, page.size, page.stride) for page in described] == [
            (pool.base_address, pool.slot_bytes, pool.slot_bytes) for pool in pools
        ], "the aggregated pages say the same"


def test_memory_is_registered_once() -> None:
    """Layer groups that share pools share their memory: each range appears once, numbered."""
    one = rank()
    regions = one.table.memory_regions()
    assert len(regions) == len({(region.address, region.nbytes) for region in regions}) == 4
    assert [region.name for region in regions] == [f"kv_cache_memory_pool{number}" for number in range(4)]
    pools = [pool for group in one.table.pool_groups for pool in group.pools]
    assert [(region.address, region.nbytes) for region in regions] == [(pool.base_address, pool.nbytes) for pool in pools]
    twice = KVCachePageTable(4, one.table.layer_groups, (*one.table.pool_groups, *one.table.pool_groups))
    assert twice.memory_regions() == regions
    assert regions[0] == MemoryRegion("kv_cache_memory_pool0", pools[0].base_address, pools[0].slot_bytes * pools[0].num_slots)
    done(one)


def test_layers_are_ordered_by_offset() -> None:
    """Layers are ordered by their smallest offset, not by the order of the entries."""
    entries = (BufferEntry(5, "key", 96, 32, 1), BufferEntry(7, "key", 32, 32, 1), BufferEntry(5, "value", 0, 32, 1))
    assert PoolView(0, entries, frozenset({"key", "value"})).layer_order == [5, 7]
    assert PoolView(0, (), frozenset({"key"}), "FLAT").layer_order == []


def test_what_the_descriptors_lack_must_be_passed() -> None:
    """A layer without information, two layers with one global id, a layer group that no descriptor names, a bad rank or order."""
    with KVCacheManager(model([attention(0, 4 * KIB), attention(1, 4 * KIB, window=64)]), driver=EmulatedDriver()) as manager:
        descs = manager.pool_group_descs
        both = {LayerId(0): LayerInfo(0), LayerId(1): LayerInfo(1)}
        assert len(build_page_table(descs, 32, both).layer_groups) == 2
        with pytest.raises(ConfigError, match="no entry for layer 1"):
            build_page_table(descs, 32, {LayerId(0): LayerInfo(0)})
        with pytest.raises(ConfigError, match="layers 0 and 1 both have the global id 3"):
            build_page_table(descs, 32, {LayerId(0): LayerInfo(3), LayerId(1): LayerInfo(3)})
        for rank_, size in ((1, 1), (-1, 2), (0, 0)):
            with pytest.raises(ConfigError, match=r"tensor_rank|tensor_size is 0"):
                build_page_table(descs, 32, both, rank_, size)
        with pytest.raises(ConfigError, match="head_order"):
            build_page_table(descs, 32, both, head_order="HDN")
        (desc,) = descs
        without = type(desc)(desc.pool_group_index, desc.num_slots, type(desc.slot_desc)(desc.slot_desc.variants[1:]), desc.pools)
        assert without.slot_desc.variants[0].layer_group_id == LayerGroupId(1)
        with pytest.raises(ValueError, match="no descriptor names layer group 0"):
            build_page_table([without], 32, both)
        with pytest.raises(ConfigError, match="layer 1"):
            page_table_of(manager, 1, {LayerId(0): 0})
        table = page_table_of(manager, {LayerId(0): 8}, {LayerId(0): 10, LayerId(1): 11})
        assert [group.local_layers[0] for group in table.layer_groups] == [(0, 10, 8), (1, 11, 0)]


def test_virtual_layers() -> None:
    """One model layer with several kinds of attention: ids never collide, over the whole range of kinds."""
    ids = {virtual_layer_id(layer, kind, 3) for layer in range(5) for kind in range(3)}
    assert len(ids) == 15
    with pytest.raises(ConfigError, match="attention_type 3"):
        virtual_layer_id(0, 3, 3)


def test_recurrent_slots_of_a_request() -> None:
    """Attention: a slot a block; recurrent: the one live state."""
    config = model([attention(0, 4 * KIB), ssm(1, 64 * KIB)], gpu=8 << 20)
    with Rig(config, engine=False) as rig:
        table = page_table_of(rig.manager)
        cache = rig.start().cache
        assert cache.resize(64)
        assert table.request_slots(cache) == [rig.indices(cache), [cache.get_ssm_block_base_index(LayerGroupId(1))]]


def test_slots_of_a_further_beam() -> None:
    """What it shares with beam 0 is absent, so that each block is moved once; a beam that there is not is refused."""
    config = model([attention(0, 4 * KIB), ssm(1, 64 * KIB)], gpu=8 << 20)
    with Rig(config, engine=False) as rig:
        table = page_table_of(rig.manager)
        cache = rig.start().cache
        assert cache.resize(80, 70)  # two full blocks of history, and a third that is still written
        cache.beam_width = 2
        attended, states = zip(table.request_slots(cache), table.request_slots(cache, 1), strict=True)
        assert [slot >= 0 for slot in attended[1]] == [False, False, True]
        assert attended[1] == list(cache.get_aggregated_page_indices(LayerGroupId(0), 1))
        assert states[0] != states[1]
        assert len({attended[0][2], attended[1][2]}) == 2
        with pytest.raises(ConfigError, match="beam 2 is out of range"):
            table.request_slots(cache, 2)


def test_only_an_active_request_has_slots() -> None:
    """A plan made of the slots of any other would silently move nothing."""
    with Rig(model([attention(0, 4 * KIB)], gpu=8 << 20), engine=False) as rig:
        table = page_table_of(rig.manager)
        cache = rig.start().cache
        assert cache.resize(40)
        cache.suspend()
        with pytest.raises(LogicError, match="ACTIVE"):
            table.request_slots(cache)
        cache.close()
        with pytest.raises(LogicError, match="ACTIVE"):
            table.request_slots(cache)
