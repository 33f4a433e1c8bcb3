"""Queries: which file transfers they settle, and what they leave unchanged."""

from __future__ import annotations

import pytest

from kv_cache_manager_v2 import CacheLevel, ReuseScope, sequence_to_blockchain_keys
from tests.support.engine import Token
from tests.support.models import small
from tests.support.rig import Rig, toks


def look(rig: Rig, how: str, tokens: list[Token]) -> int:
    """How many of these tokens are said to be cached."""
    manager = rig.manager
    if how == "probe_reuse":
        return manager.probe_reuse(None, tokens)
    keys = [key for _tokens, key in sequence_to_blockchain_keys(4, ReuseScope(), tokens)][1:]
    if how == "probe_reuse_by_keys":
        return manager.probe_reuse_by_keys(None, keys)
    if how == "explain_miss":
        return manager.explain_miss(None, tokens).num_tokens
    key = manager.probe_first_new_block_key(None, tokens)
    return len(tokens) if key is None else 4 * keys.index(key)


@pytest.mark.parametrize("how", ["probe_reuse", "probe_reuse_by_keys", "probe_first_new_block_key", "explain_miss"])
def test_who_only_looks_sees_a_failed_write(tmp_path: object, how: str) -> None:
    """A router that only queries learns of a failed write from its first query afterwards. The slots used before count in the
    peaks."""
    with Rig(small(4, disk=(str(tmp_path), 4))) as rig:
        rig.seed(toks(0, 16))
        assert look(rig, how, toks(0, 16)) == 16
        rig.manager.get_and_reset_iteration_peak_block_stats(CacheLevel(1))
        rig.driver.fail("write_file", 3)
        rig.take(4)
        rig.settle()
        assert look(rig, how, toks(0, 16)) == 4
        rig.settle()
        (peaks,) = rig.manager.get_and_reset_iteration_peak_block_stats(CacheLevel(1))
        assert (peaks.evictable, peaks.available) == (4, 4)
        assert rig.manager.get_storage_statistics(CacheLevel(1))[0].evictable < 4


def test_a_priority_callback_may_look_while_a_transfer_has_failed(tmp_path: object) -> None:
    """A query in a callback settles no transfers, because another call is in progress."""
    seen: list[int] = []
    with Rig(small(4, disk=(str(tmp_path), 4))) as rig:

        def priority(ordinal: int, life_cycle: object) -> int:
            if armed:
                gate.open()
                rig.driver.synchronize()
                seen.append(rig.probe(toks(0, 16)))
            return 50

        armed: list[int] = []
        rig.seed(toks(0, 16))
        request = rig.open(None, priority=priority)
        gate = rig.driver.hang("write_file", 1)
        rig.driver.fail("write_file", 1)
        assert request.resize(8)
        armed.append(1)
        assert request.resize(12)
        assert seen == [16]
        armed.clear()
        assert rig.probe(toks(0, 16)) < 16
