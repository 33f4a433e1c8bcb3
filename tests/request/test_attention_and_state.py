"""Layers with attention and a recurrent state: one layer of the model, in two layer groups."""

from __future__ import annotations

import numpy as np
import pytest

from kv_cache_manager_v2 import ConfigError, KVCacheEventManager, LayerId, PlainBatchTables, UnknownBufferError
from kv_cache_manager_v2.disagg.aggregation import ExpandedBuffer
from kv_cache_manager_v2.layout.explain import draw_layout, explain_sizing
from kv_cache_manager_v2.layout.pools import BufferId
from tests.support.models import KIB, MIB, attention, both, model, ssm
from tests.support.rig import Rig, mixed

STATE = "state0"


def test_the_layer_is_in_two_groups() -> None:
    """Every call that takes a layer and a role finds the buffer; without a role, the layer's group is that of its attention."""
    layers = [ssm(4, 24 * KIB), both(0, [8 * KIB, 8 * KIB], [24 * KIB, KIB]), attention(1, 8 * KIB, 8 * KIB), ssm(2, 24 * KIB)]
    with Rig(model(layers, gpu=8 * MIB), engine=False) as rig:
        manager = rig.manager
        assert manager.layer_ids == [4, 0, 1, 2]
        assert manager.num_layers == 4
        assert manager.layer_grouping == [[4, 0, 2], [0, 1]]
        assert [manager.get_layer_group_id(0), manager.get_layer_group_id(0, "value"), manager.get_layer_group_id(0, STATE)] == [
            1,
            1,
            0,
        ]
        with pytest.raises(UnknownBufferError, match=r"roles are \['key', 'value', 'state0', 'state1'\]"):
            manager.get_layer_group_id(0, "nothing")
        assert [buffer.role for buffer in manager.all_buffer_ids if buffer.layer_id == 0] == ["key", "value", STATE, "state1"]
        assert [manager.get_page_stride(0, "value"), manager.get_page_stride(0, STATE)] == [8 * KIB, 24 * KIB]
        state_group = manager.pool_group_descs[manager.get_life_cycle_pool_group_indices()[0]]
        assert manager.get_mem_pool_base_address(0, STATE) == state_group.pools[0].base_address + 24 * KIB
        runs = manager.get_aggregated_pages([BufferId(LayerId(0), "key"), BufferId(LayerId(0), STATE)])
        assert [(run.layer_group_id, run.buffers) for run in runs] == [
            (0, (ExpandedBuffer(BufferId(LayerId(0), STATE), 1),)),
            (1, (ExpandedBuffer(BufferId(LayerId(0), "key"), 1),)),
        ]
        assert explain_sizing(rig.config).group_names == ["recurrent, 3 layers", "full attention, 2 layers"]
        assert "0: 4 key | 24576: 0 state0 | 49152: 2 key" in draw_layout(manager.shared.layout)
        tables = PlainBatchTables(manager, 2, 8)
        cache = rig.open()
        row = tables.add(cache)
        assert np.asarray(tables.table(0))[row, 0] == cache.get_ssm_block_base_index(0) >= 0
        with pytest.raises(ConfigError, match="layer group 1 is not recurrent"):
            cache.get_ssm_block_base_index(1)


@pytest.mark.parametrize("schedule", ["eager", "threads", "random"])
@pytest.mark.parametrize("window", [None, 6])
def test_pages_and_states_hold_their_own_bytes(schedule: str, window: int | None) -> None:
    """Through prefill, decode, suspension, and reuse of a prefix: both parts of the layer are right, to the byte."""
    layers = [both(0, [8 * KIB], [24 * KIB, KIB], window), both(1, [8 * KIB], [24 * KIB, KIB]), attention(2, 8 * KIB)]
    events = KVCacheEventManager(64, window_size=window or 1 << 20, hash_algo="v2_sha256")
    with Rig(model(layers, tokens_per_block=4, gpu=8 * MIB), schedule, 7, events=events) as rig:
        tokens = mixed(90, 120)
        first = rig.start(tokens[:16])
        first.prefill(tokens[:16], 8)
        first.suspend()
        assert first.resume()
        for position in range(16, 20):
            assert first.advance(tokens[position : position + 1])
        first.check()
        first.close()
        second = rig.start(tokens)
        assert len(second.tokens) == 20
        assert second.advance(tokens[20:])
        second.check()
        events.flush_iteration_events()
        stored = [event.layer_group_id for event in events.get_latest_events(0) if type(event.data).__name__ == "KVCacheStoredData"]
        assert set(stored) == set(range(len(rig.manager.layer_grouping)))
