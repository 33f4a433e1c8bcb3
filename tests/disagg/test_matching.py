"""Page tables of two ranks are matched: pipeline splits, tensor splits, and whole requests copied between managers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kv_cache_manager_v2 import ConfigError, EmulatedDriver, KVCache
from kv_cache_manager_v2.disagg.page_matching import ByteMove, TransferPlan, match_page_tables, missing_buffers
from kv_cache_manager_v2.disagg.page_table import FLAT, HEADS_FIRST, TOKENS_FIRST, KVCachePageTable, LayerGroup, PoolView
from tests.disagg.helpers import SIZE, Rank, Split, ranks

WHOLE = ((0, 1, 2, 3),)
HALVES = ((0, 1), (2, 3))
UNEVEN = ((3,), (0, 2), (1,))
LENGTH = 21  # tokens: six blocks, the last one partial


def move_request(givers: list[Rank], takers: list[Rank], driver: EmulatedDriver, early_close: bool) -> list[KVCache]:
    """Fill a request on the source ranks and copy it to the destination ranks, on streams of the copies' own.

    With `early_close` the source requests close, and others take and overwrite all of their memory, before any copy may run.
    """
    copies = driver.create_stream()
    filled = []
    for giver in givers:
        filled.append(giver.start(LENGTH))
        giver.write(filled[-1], LENGTH)
    taken = [taker.start(LENGTH) for taker in takers]
    gate = driver.gate(copies)
    for cache in filled + taken:
        cache.cuda_stream = copies  # after all work of its own stream, and before the next user of its pages
    for taker, cache in zip(takers, taken, strict=True):
        plans = [match_page_tables(giver.table, taker.table) for giver in givers]
        assert missing_buffers(taker.table, plans) == []
        for giver, given, plan in zip(givers, filled, plans, strict=True):
            for move in plan.moves(giver.table.request_slots(given), taker.table.request_slots(cache)):
                driver.copy(copies, move.destination, move.source, move.nbytes)
    for taker, cache in zip(takers, taken, strict=True):
        cache.cuda_stream = taker.stream
        taker.check(cache, LENGTH)
    if early_close:
        for cache in filled:
            cache.close()
        filled = [_take_everything(giver) for giver in givers]
    gate.open()
    driver.synchronize()
    for cache in filled:
        cache.close()
    driver.destroy_stream(copies)
    return taken


def _take_everything(giver: Rank) -> KVCache:
    """A request that takes all GPU slots of a rank and overwrites them."""
    cache = giver.manager.create_kv_cache()
    assert cache.resume(giver.stream)
    blocks = min(stats.total for stats in giver.manager.get_storage_statistics()[:1]) // len(
        [index for index in giver.manager.get_life_cycle_pool_group_indices() if index == 0]
    )
    assert cache.resize(blocks * SIZE)
    giver.write(cache, blocks * SIZE, salt=1)
    return cache


def run(source: Split, destination: Split, seed: int, early_close: bool) -> None:
    driver = EmulatedDriver("random", seed)
    givers, takers = ranks(driver, source), ranks(driver, destination)
    taken = move_request(givers, takers, driver, early_close)
    for taker, cache in zip(takers, taken, strict=True):
        assert taker.errors == []
        assert taker.checked > 0
        cache.close()
    for rank in givers + takers:
        rank.close()
    driver.close()


@pytest.mark.parametrize("order", [TOKENS_FIRST, HEADS_FIRST])
@pytest.mark.parametrize(
    ("source", "destination"),
    [
        ((WHOLE, 1), (WHOLE, 1)),
        ((WHOLE, 1), (HALVES, 1)),
        ((HALVES, 1), (WHOLE, 1)),
        ((HALVES, 1), (UNEVEN, 1)),
        ((WHOLE, 1), (WHOLE, 2)),
        ((WHOLE, 2), (WHOLE, 1)),
        ((HALVES, 2), (WHOLE, 4)),
        ((WHOLE, 4), (HALVES, 2)),
        ((UNEVEN, 2), (HALVES, 2)),
    ],
)
def test_a_request_moves_between_ranks_that_divide_the_model_differently(
    source: tuple[tuple[tuple[int, ...], ...], int], destination: tuple[tuple[tuple[int, ...], ...], int], order: str
) -> None:
    """Layers by pipeline, heads by tensor: every byte of the destination's pages is the right layer's, role's, head's and token's,
    although the source closes, and its memory is overwritten, before a copy has run."""
    run(Split(*source, order), Split(*destination, order), 3, True)


@pytest.mark.parametrize("seed", range(6))
def test_the_source_may_close_before_the_copies_end(seed: int) -> None:
    """The same under other interleavings of the streams, and with a source that stays open."""
    run(Split(WHOLE, 2, HEADS_FIRST), Split(HALVES, 1, HEADS_FIRST), seed, True)
    run(Split(HALVES, 1, TOKENS_FIRST), Split(WHOLE, 2, TOKENS_FIRST), seed, False)


@pytest.mark.parametrize("order", [TOKENS_FIRST, HEADS_FIRST])
def test_buffers_with_blocks_of_their_own_are_split_block_by_block(order: str) -> None:
    """Scales in blocks of 2 tokens, twice in a block of 4."""
    run(Split(WHOLE, 1, order, override=2), Split(HALVES, 2, order, override=2), 1, True)


def test_recurrent_layers_move_whole() -> None:
    """The live state of a request is copied with its pages under any pipeline split."""
    run(Split(((0, 1, 2, 3, 4),), 1, TOKENS_FIRST, recurrent=4), Split(((0, 1), (2, 3, 4)), 1, TOKENS_FIRST, recurrent=4), 2, False)


def test_both_parts_of_a_layer_move() -> None:
    """A layer with attention and a recurrent state: pages in its attention's group, the state in the recurrent one."""
    run(Split(WHOLE, 1, TOKENS_FIRST, both=3), Split(HALVES, 1, TOKENS_FIRST, both=3), 2, False)


class Tables:
    """Page tables without managers."""

    def __init__(self, split: Split) -> None:
        self.driver = EmulatedDriver()
        self.ranks = ranks(self.driver, split)
        self.tables = [rank.table for rank in self.ranks]
        for rank in self.ranks:
            rank.close()
        self.driver.close()


def table(split: Split, number: int = 0) -> KVCachePageTable:
    return Tables(split).tables[number]


def test_equal_ranks_move_whole_slots() -> None:
    """Bytes that are contiguous on both sides are one segment: one per pool and layer group."""
    one, two = table(Split(WHOLE, 1, TOKENS_FIRST)), table(Split(WHOLE, 1, TOKENS_FIRST))
    plan = match_page_tables(one, two)
    assert [(pairing.source_group, pairing.destination_group) for pairing in plan.pairings] == [(0, 0), (1, 1)]
    for pairing in plan.pairings:
        assert [segment.nbytes for segment in pairing.segments] == [pool.slot_bytes for pool in one.pool_groups[0].pools]
    (key, _scale) = plan.pairings[0].segments
    first, second = one.pool_groups[0].pools[0], two.pool_groups[0].pools[0]
    assert plan.moves([[2, -1], [0]], [[5, -1], [1]])[0] == ByteMove(
        first.base_address + 2 * first.slot_bytes, second.base_address + 5 * second.slot_bytes, key.nbytes
    )


def test_ranks_with_nothing_in_common() -> None:
    """Other layers, or other heads: an empty plan; missing buffers are named."""
    one, two = table(Split(HALVES, 1, TOKENS_FIRST), 0), table(Split(HALVES, 1, TOKENS_FIRST), 1)
    assert match_page_tables(one, two).pairings == []
    low, high = table(Split(WHOLE, 2, TOKENS_FIRST), 0), table(Split(WHOLE, 2, TOKENS_FIRST), 1)
    assert match_page_tables(low, high).pairings == []
    quarter = table(Split(WHOLE, 4, TOKENS_FIRST), 1)
    assert match_page_tables(high, quarter).pairings == []
    assert match_page_tables(low, quarter).pairings != []
    plan = match_page_tables(one, table(Split(WHOLE, 1, TOKENS_FIRST)))
    missing = missing_buffers(plan.destination, [plan])
    assert sorted(missing) == [(layer, role) for layer in (2, 3) for role in ("key", "key_scale", "value")]


def test_a_destination_gets_nothing_twice() -> None:
    """Two source ranks with the same buffer do not make a complete transfer."""
    plan = match_page_tables(table(Split(WHOLE, 1, TOKENS_FIRST)), table(Split(WHOLE, 1, TOKENS_FIRST)))
    assert missing_buffers(plan.destination, [plan]) == []
    assert len(missing_buffers(plan.destination, [plan, plan])) == 12


def test_blocks_out_of_the_window_are_skipped_on_both_sides() -> None:
    """A block without a page at the destination is not copied. One that the destination expects and the source lacks is an error
    that names it."""
    one, two = table(Split(WHOLE, 1, TOKENS_FIRST)), table(Split(WHOLE, 1, TOKENS_FIRST))
    plan = match_page_tables(one, two)
    assert plan.moves([[1, 2, 3], [-1, -1, 4]], [[-1, -1, -1], [-1, -1, 0]]) == plan.moves([[], [-1, -1, 4]], [[], [-1, -1, 0]])
    assert len(plan.moves([[1, 2, 3], [-1, -1, 4]], [[0, 1, 2], [-1, -1, 3]])) == 2 * 4
    with pytest.raises(ConfigError, match="no page for block 1 of its layer group 1"):
        plan.moves([[1, 2], [3, -1]], [[1, 2], [-1, 4]])
    with pytest.raises(ConfigError, match="no page for block 2 of its layer group 0"):
        plan.moves([[1, 2], [3]], [[1, 2, 3], [4]])
    slots = one.pool_groups[0].pools[0].num_slots
    for given, taken in (([[slots], []], [[0], []]), ([[0], []], [[slots], []])):
        with pytest.raises(ValueError, match=f"slot {slots} of layer group 0"):
            plan.moves(given, taken)


def test_what_cannot_be_matched_is_refused() -> None:
    """Other block lengths, sizes, orders, unknown heads, heads that do not divide evenly, recurrent layers split by tensor."""
    whole = table(Split(WHOLE, 1, TOKENS_FIRST))
    half = table(Split(WHOLE, 2, TOKENS_FIRST))
    with pytest.raises(ConfigError, match="blocks of 4 and of 8"):
        match_page_tables(whole, replace(whole, tokens_per_block=8))
    for other in (table(Split(WHOLE, 1, HEADS_FIRST)), table(Split(WHOLE, 2, HEADS_FIRST))):
        with pytest.raises(ConfigError, match="layer 0, key: head_order is 'NHD' on the source only"):
            match_page_tables(whole, other)
    with pytest.raises(ConfigError, match="layer 0, key: 8192 bytes in 1 blocks of its own per block on the source, 4096 bytes"):
        match_page_tables(whole, replace(half, tensor_size=1))
    with pytest.raises(ConfigError, match="needs INDEXED views and kv_heads"):
        match_page_tables(whole, without_heads(half))
    with pytest.raises(ConfigError, match="1 ranks of 4 heads are not 3 ranks of 2"):
        match_page_tables(whole, replace(half, tensor_size=3))
    with pytest.raises(ConfigError, match="bytes per head must be equal"):
        match_page_tables(whole, replace(with_heads(half, 1), tensor_size=4))
    recurrent = Split(((0, 4),), 1, TOKENS_FIRST, recurrent=4)
    with pytest.raises(ConfigError, match="layer 4, state: cannot be split"):
        match_page_tables(table(recurrent), table(replace(recurrent, tensor=2)))
    mistaken = table(recurrent)
    mistaken = replace(mistaken, layer_groups=tuple(replace(group, recurrent=False) for group in mistaken.layer_groups))
    with pytest.raises(ConfigError, match="recurrent on the other"):
        match_page_tables(table(recurrent), mistaken)
    own = table(Split(WHOLE, 1, TOKENS_FIRST, override=2))
    with pytest.raises(ConfigError, match="key_scale"):
        match_page_tables(own, whole)


def with_heads(of: KVCachePageTable, heads: int) -> KVCachePageTable:
    def changed(group: LayerGroup) -> LayerGroup:
        return replace(group, local_layers=tuple(layer._replace(kv_heads=heads) for layer in group.local_layers))

    return replace(of, layer_groups=tuple(changed(group) for group in of.layer_groups))


def without_heads(of: KVCachePageTable) -> KVCachePageTable:
    return with_heads(of, 0)


def flattened(of: KVCachePageTable) -> KVCachePageTable:
    """The same table, its views without entries."""

    def changed(view: PoolView) -> PoolView:
        return replace(view, entries=(), mapper_kind=FLAT)

    groups = tuple(replace(group, pool_views=tuple(changed(view) for view in group.pool_views)) for group in of.layer_groups)
    return replace(of, layer_groups=groups)


def test_flat_views() -> None:
    """A peer that lists no buffers: its layers lie one after the other. Matched by layer, with views of equal roles."""
    one, two = table(Split(HALVES, 1, TOKENS_FIRST), 1), table(Split(WHOLE, 1, TOKENS_FIRST))
    expected = moved_bytes(match_page_tables(one, two))
    for source, destination in ((flattened(one), two), (one, flattened(two)), (flattened(one), flattened(two))):
        plan = match_page_tables(source, destination)
        assert moved_bytes(plan) == expected
        assert KVCachePageTable.from_dict(source.to_dict()) == source
    assert missing_buffers(flattened(one), [match_page_tables(flattened(two), flattened(one))]) == []
    with pytest.raises(ConfigError, match="cannot be split"):
        match_page_tables(flattened(two), table(Split(WHOLE, 2, TOKENS_FIRST)))
    scaleless = flattened(table(Split(WHOLE, 1, TOKENS_FIRST, scales=False)))
    (keys, values) = moved_bytes(match_page_tables(two, scaleless))
    assert keys[2] == values[2] == two.pool_groups[0].pools[0].slot_bytes


def moved_bytes(plan: TransferPlan) -> list[tuple[int, int, int]]:
    """(source, destination, length) of a block in slots 0, relative to the first pools."""
    source, destination = plan.source.pool_groups[0].pools[0], plan.destination.pool_groups[0].pools[0]
    return sorted(
        (segment.source_base - source.base_address, segment.destination_base - destination.base_address, segment.nbytes)
        for pairing in plan.pairings
        for segment in pairing.segments
    )
