"""Cached pages dropped by their index, the counts of slots in one call, and scopes of strings."""

from __future__ import annotations

from hashlib import sha256

import pytest

from kv_cache_manager_v2 import ConfigError, ReuseScope
from tests.support.models import small
from tests.support.rig import Rig, toks


def test_a_cached_page_is_dropped_with_what_follows_it() -> None:
    """An index that names no cached page is passed over."""
    with Rig(small(16)) as rig:
        rig.seed(toks(0, 12))
        indices = rig.manager.find_reuse(None, toks(0, 12)).get_gpu_page_indices(0)
        assert rig.manager.drop_cached_pages(0, [indices[1], 15]) == 1
        assert rig.probe(toks(0, 12)) == 4
        assert rig.counts().unavailable == 0
        assert rig.manager.drop_cached_pages(0, indices[1:]) == 0


def test_a_page_in_use_stays_with_its_request() -> None:
    """Its bytes are what the request reads; only later prompts do not find them."""
    with Rig(small(16)) as rig:
        request = rig.start()
        assert request.advance(toks(0, 8))
        before = rig.indices(request.cache)
        assert rig.manager.drop_cached_pages(0, before[:1]) == 1
        assert rig.probe(toks(0, 8)) == 0
        assert rig.indices(request.cache) == before
        assert request.advance(toks(8, 12))
        request.check()


def test_only_pages_of_the_layer_group_are_dropped() -> None:
    """Layer groups of one size share slots: an index of another group is passed over. A window's page leaves no hole behind it."""
    with Rig(small(16, kinds=("full", (4, 0)))) as rig:
        rig.seed(toks(0, 8), chunk=4)
        found = rig.manager.find_reuse(None, toks(0, 8))
        full, window = found.get_gpu_page_indices(0), found.get_gpu_page_indices(1)
        assert rig.manager.drop_cached_pages(0, window[1:]) == 0
        assert rig.manager.drop_cached_pages(1, [window[1], *full]) == 1
        assert rig.probe(toks(0, 8)) == 4


@pytest.mark.parametrize(
    ("group", "indices", "text"), [(5, [0], "layer group 5"), (0, [0, 16], "page_indices has 16"), (0, [-1], "page_indices")]
)
def test_indices_out_of_range_drop_nothing(group: int, indices: list[int], text: str) -> None:
    with Rig(small(16)) as rig:
        rig.seed(toks(0, 8))
        with pytest.raises(ConfigError, match=text):
            rig.manager.drop_cached_pages(group, indices)
        assert rig.probe(toks(0, 8)) == 8


def test_free_and_evictable_slots_are_those_of_the_statistics() -> None:
    with Rig(small(16, host_slots=4)) as rig:
        rig.seed(toks(0, 8))
        request = rig.take(3)
        assert rig.manager.free_and_evictable() == (11, 2)
        assert rig.manager.free_and_evictable(0, 1) == (4, 0)
        for arguments in ((1,), (-1,), (0, 2)):
            with pytest.raises(ConfigError, match="out of range"):
                rig.manager.free_and_evictable(*arguments)
        request.close()


def test_a_string_is_hashed_to_the_number_of_a_scope() -> None:
    """The first 8 bytes of its SHA-256, as engines do it: the same scope as that number, another than any other string's."""
    number = int.from_bytes(sha256("tenant ä".encode()).digest()[:8], "little")
    assert ReuseScope(salt="tenant ä") == ReuseScope(None, number) == (None, number)
    assert ReuseScope("adapter").lora_id != ReuseScope("adapter ").lora_id
    with Rig(small(16)) as rig:
        rig.seed(toks(0, 8), ReuseScope(salt="tenant ä"))
        assert rig.manager.probe_reuse((None, "tenant ä"), toks(0, 8)) == 8
        assert rig.manager.probe_reuse((None, number), toks(0, 8)) == 8
        assert rig.manager.probe_reuse((None, "tenant"), toks(0, 8)) == 0
