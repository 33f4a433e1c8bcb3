"""The tables that explain a layout and a sizing say what the managers have."""

from __future__ import annotations

from pathlib import Path

import pytest

from kv_cache_manager_v2 import ConfigError, EmulatedDriver, KVCacheManager, explain_sizing
from kv_cache_manager_v2.config import BufferConfig, HostCacheTierConfig, KVCacheManagerConfig, SsmLayerConfig
from kv_cache_manager_v2.ids import CacheLevel, CacheTier, DataRole, LayerId, PageIndexMode
from kv_cache_manager_v2.layout import pools
from kv_cache_manager_v2.layout.explain import FLOOR_OF_CONSTRAINTS, FLOOR_OF_ONE_REQUEST, draw_layout, human_bytes
from kv_cache_manager_v2.layout.pools import build_layout
from tests.support.models import KIB, MIB, attention, batch, model, ssm


def documented() -> KVCacheManagerConfig:
    """The model that the drawing in `pools` shows."""
    sizes = (64 * KIB, 64 * KIB, 2 * KIB, 2 * KIB)
    recurrent = SsmLayerConfig(LayerId(4), [BufferConfig(DataRole("state"), 256 * KIB), BufferConfig(DataRole("conv"), 24 * KIB)])
    layers = [attention(layer, *sizes, window=1024 if layer % 2 else None) for layer in range(4)]
    return model([*layers, recurrent], gpu=256 * MIB)


def test_the_drawing_in_the_documentation_is_true() -> None:
    """The text in `pools` is what `draw_layout` draws, and each offset in it is where a manager has the buffer."""
    drawing = draw_layout(build_layout(documented()))
    source = Path(pools.__file__).parent / "pools.py"
    indented = "\n".join("    " + line for line in drawing.splitlines())
    assert indented in source.read_text()
    with KVCacheManager(documented(), driver=EmulatedDriver()) as manager:
        for desc in manager.pool_group_descs:
            assert desc.num_slots > 0
            for variant in desc.slot_desc.variants:
                assert variant.slot_size_list == tuple(pool.slot_bytes for pool in desc.pools)
                for pool, coalesced in zip(desc.pools, variant.coalesced_buffers, strict=True):
                    assert coalesced.size == coalesced.num_buffers * coalesced.single_buffer_size == pool.slot_bytes
                    for position, (layer, role) in enumerate(coalesced.buffer_ids):
                        offset = position * coalesced.single_buffer_size
                        assert f"{offset}: {layer} {role} |" in drawing
                        assert manager.get_layer_group_id(layer) == variant.layer_group_id
                        assert manager.get_mem_pool_base_address(layer, role, PageIndexMode.PER_LAYER) == pool.base_address
                        assert manager.get_mem_pool_base_address(layer, role, PageIndexMode.SHARED) == pool.base_address + offset
        value = manager.get_mem_pool_base_address(LayerId(2), DataRole("value"), PageIndexMode.SHARED)
        assert value == manager.pool_group_descs[0].pools[0].base_address + 196608


def test_every_buffer_is_described_once() -> None:
    """The descriptors are complete: all buffers of the model, each in exactly one place, in a reproducible order."""
    with KVCacheManager(documented(), driver=EmulatedDriver()) as one, KVCacheManager(documented(), driver=EmulatedDriver()) as two:
        described = [
            buffer
            for desc in one.pool_group_descs
            for variant in desc.slot_desc.variants
            for coalesced in variant.coalesced_buffers
            for buffer in coalesced.buffer_ids
        ]
        assert sorted(described) == sorted(one.all_buffer_ids)
        assert [desc.slot_desc for desc in one.pool_group_descs] == [desc.slot_desc for desc in two.pool_group_descs]
        first, second = [
            [(d.size, d.stride, d.layer_group_id, d.buffers) for d in m.get_aggregated_pages(m.all_buffer_ids)] for m in (one, two)
        ]
        assert first == second


@pytest.mark.parametrize("gpu", [8 * MIB, 64 * MIB, 3 << 30])
def test_the_table_is_what_a_manager_has(gpu: int) -> None:
    """Slots, quotas and slot sizes by level and pool group, as the manager's own statistics say."""
    config = model(
        [attention(0, 64 * KIB), attention(1, 96 * KIB, window=128, sink=8), ssm(2, 40 * KIB)],
        gpu=gpu,
        colder=[HostCacheTierConfig(5 * MIB)],
    )
    table = explain_sizing(config)
    with KVCacheManager(config, driver=EmulatedDriver()) as manager:
        for level in table.levels:
            number = CacheLevel(level.level)
            stats = manager.get_storage_statistics(number)
            assert [row.slots for row in level.rows] == [group.total for group in stats]
            assert [row.slot_bytes for row in level.rows] == [sum(group.slot_sizes) for group in stats]
            assert level.quota == manager.get_quota(number)
            assert level.minimum <= level.used <= level.quota
            assert level.used % level.granularity == level.quota % level.granularity == 0
            assert sum(row.slots_bytes for row in level.rows) <= level.used
            assert sum(row.share for row in level.rows) == pytest.approx(1.0)
            assert sum(row.share_asked for row in level.rows) == pytest.approx(1.0)
            assert all(row.slots >= row.floor for row in level.rows)
        assert [row.layer_groups for row in table.levels[0].rows] == [(0,), (1,), (2,)]
        assert table.rows == [row for level in table.levels for row in level.rows]


def test_it_says_what_bound_each_group() -> None:
    """A floor of constraints, a floor of one request, or the configured shares."""
    layers = (attention(0, 1 * MIB), attention(1, 3 * MIB, window=64))
    free = explain_sizing(model(layers, gpu=256 * MIB, ratio=[0.5, 0.5]))
    assert [row.decided_by for row in free.rows] == ["initial_pool_ratio"] * 2
    tight = explain_sizing(model(layers, gpu=64 * MIB, ratio=[0.01, 0.99]))
    assert tight.rows[0].decided_by.startswith(FLOOR_OF_ONE_REQUEST)
    assert tight.rows[0].slots >= tight.rows[0].floor == 3  # a window of 64 in blocks of 32
    bound = explain_sizing(model(layers, gpu=512 * MIB, ratio=[0.01, 0.99], constraints=[batch(4, 320)]))
    assert bound.rows[0].decided_by.startswith(FLOOR_OF_CONSTRAINTS)
    assert bound.rows[0].floor > tight.rows[0].floor
    assert bound.rows[1].decided_by == "initial_pool_ratio"


def test_a_raised_quota_is_shown_and_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Also with strict_quota, which a manager would refuse: the table is how to find out."""
    config = model([attention(0, 4 * MIB, window=64)], gpu=2 * MIB, strict_quota=True)
    table = explain_sizing(config)
    (level,) = table.levels
    assert level.raised
    assert level.quota == level.minimum > level.asked == 2 * MIB
    assert "raised to the minimum from 2.0 MiB asked" in str(table)
    assert caplog.records == []
    with pytest.raises(ConfigError, match="strict_quota"):
        KVCacheManager(config, driver=EmulatedDriver())


def test_the_printed_table_is_aligned() -> None:
    """A line for each level, a header, a line for each pool group; numbers end, texts begin in one column."""
    config = model(
        [attention(0, 64 * KIB), attention(1, 96 * KIB, window=128, sink=40), ssm(2, 40 * KIB)],
        colder=[HostCacheTierConfig(5 * MIB)],
    )
    lines = str(explain_sizing(config)).splitlines()
    assert lines[0].startswith("level 0, GPU_MEM: quota 64.0 MiB of 64.0 MiB asked; minimum ")
    assert lines[5] == ""
    assert lines[6].startswith("level 1, HOST_MEM: ")
    for beg in (1, 7):
        header, rows = lines[beg], lines[beg + 1 : beg + 4]
        assert " ".join(header.split()) == "pool group layer groups bytes/slot floor share asked slots bytes share decided by"
        end = header.index("bytes/slot") + len("bytes/slot")
        assert [row[:end].split()[-1] for row in rows] == ["65,536", "98,304", "40,960"]
        texts = header.index("layer groups")
        assert [row[texts : texts + 2] for row in rows] == ["0:", "1:", "2:"]
    assert "1: window 128 + 2 sink blocks, 1 layer" in lines[3]
    assert "2: recurrent, 1 layer" in lines[4]


def test_bytes_for_people() -> None:
    assert [human_bytes(count) for count in (0, 1023, 1024, 1536, MIB, 5 << 40, 3 << 60)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 KiB",
        "1.0 MiB",
        "5.0 TiB",
        "3145728.0 TiB",
    ]


def test_tiers_are_named() -> None:
    assert [level.tier for level in explain_sizing(documented()).levels] == [CacheTier.GPU_MEM]
