"""A fork continues from the state of its source: each field of a request is declared as copied, derived or fresh."""

from __future__ import annotations

from types import GetSetDescriptorType

from kv_cache_manager_v2 import KVCache, ReuseScope
from kv_cache_manager_v2.build import COMPILED
from kv_cache_manager_v2.ids import PRIORITY_DEFAULT
from kv_cache_manager_v2.request.block_table import BlockTable
from kv_cache_manager_v2.request.recurrent_state import RecurrentState
from kv_cache_manager_v2.request.request import Request
from tests.support.engine import Token
from tests.support.models import hybrid
from tests.support.rig import Rig, toks

# the fork's is the source's; `tail` by its bytes
COPIED = {"shared", "scope", "priority", "tokens_per_block", "committed", "history", "path", "tail", "tip"}
COPIED |= {"adopts", "commit_allowed", "text_only", "has_digests", "scratch", "next_stale"}
# of the fork's own lengths and pages
DERIVED = {
    "capacity": "cut to the history",
    "num_blocks": "of the capacity",
    "block_start": "of the capacity",
    "block_end": "of the capacity",
    "scratch_from": "of the history",
    "tables": "hold the same pages up to the history",
    "main_tables": "the tables: there is one beam",
    "recurrent": "has a copy of the state",
    "loads": "waits for the same transfers",
    "counts_on": "counts on the same blocks",
    "borrowed_tail": "whether the history ends in a block",
    "pending": "counts from here on, if the source counts",
}
FRESH = {
    "serial": "another request",
    "request_id": "another request",
    "status": "SUSPENDED",
    "width": "one beam",
    "tail_beam": "the one beam has what it needs",
    "last_beam": "the one beam goes on",
    "more_recurrent": "one beam",
    "batch_rows": "none",
    "batch_row": "none",
    "sampled": "it has looked for no prompt",
    "lost": "a request that is lost cannot be forked",
    "loss_reported": "of its own calls",
    "published": "what is committed ahead must be settled first",
    "divergence": "nothing was matched",
    "last_cached_level": "nothing was matched",
    "before_hybrid": "nothing was matched",
    "cached_tokens_by_level": "nothing was matched",
    "stream": "given when it is resumed",
    "stream_set": "given when it is resumed",
    "last_shortage": "of its own calls",
    "capacity_sum": "of its own resizes",
    "history_sum": "of its own resizes",
    "num_samples": "of its own resizes",
    "started": "its first resume copies the last block",
    "seen_by": "in no batch yet",
}
TABLE_COPIED = {"life_cycle", "index", "pool_group", "hierarchy", "stale_start", "stale_end"}
TABLE_DERIVED = {
    "pages": "the same, up to the history",
    "row": "BAD",
    "pending_from": "behind what there is",
    "generated_from": "NEVER",
}
TABLE_FRESH = {"scratch": "SUSPENDED", "scratch_span": "SUSPENDED"}
RECURRENT_COPIED = {"life_cycle", "index", "pool_group"}
RECURRENT_DERIVED = {"page": "a copy"}
RECURRENT_FRESH = {"borrowed": "the copy is its own", "skipped": "of its own commits"}


def fields(thing: object) -> set[str]:
    """The attributes of an object of the package, on both builds."""
    if not COMPILED:
        return set(vars(thing))
    kind = type(thing)
    return {name for name in dir(kind) if not name.startswith("__") and isinstance(getattr(kind, name), GetSetDescriptorType)}


def state_of(rig: Rig, cache: KVCache) -> Request:
    (state,) = [state for state in rig.manager.shared.open.values() if state.request_id == cache.id]
    return state


def value(thing: object, name: str) -> object:
    found = getattr(thing, name)
    return found.getvalue() if name == "tail" else found


def changed(rig: Rig) -> KVCache:
    """A request of which every field that a fork copies differs from that of a new one."""

    def priority(ordinal: int, life_cycle: object) -> int:
        return PRIORITY_DEFAULT

    cache = rig.open(None, ReuseScope(7, 8), priority)
    assert cache.resize(9)
    tokens: list[Token] = [*toks(0, 5), b"d" * 32]
    cache.commit(tokens)
    cache.stop_committing()
    assert cache.resize(14, 9)
    state = state_of(rig, cache)
    state.text_only = True
    state.adopts = False
    state.scratch = not state.scratch
    return cache


def test_every_field_says_what_a_fork_has_of_it() -> None:
    """A new field of a request, a table or a recurrent state is named here, or this fails: decide what a fork does with it."""
    with Rig(hybrid(4, 16, kinds=["full", (6, 0)]), engine=False) as rig:
        state = state_of(rig, changed(rig))
        recurrent = state.recurrent
        assert recurrent is not None
        assert fields(state) == COPIED | set(DERIVED) | set(FRESH)
        assert fields(state.tables[0]) == TABLE_COPIED | set(TABLE_DERIVED) | set(TABLE_FRESH)
        assert fields(recurrent) == RECURRENT_COPIED | set(RECURRENT_DERIVED) | set(RECURRENT_FRESH)
        assert isinstance(state.tables[0], BlockTable)
        assert isinstance(recurrent, RecurrentState)


def test_a_fork_has_what_is_copied() -> None:
    """Each such field differs from a new request's in the source, and is the source's in the fork."""
    with Rig(hybrid(4, 16, kinds=["full", (6, 0)]), engine=False) as rig:
        cache = changed(rig)
        source = state_of(rig, cache)
        new = state_of(rig, rig.create())
        twin = state_of(rig, rig.own(cache.fork(99)))
        for name in sorted(COPIED - {"shared", "tokens_per_block"}):
            assert value(source, name) != value(new, name), f"{name} is that of a new request"
        for name in sorted(COPIED):
            assert value(twin, name) == value(source, name), name
        for name in sorted(FRESH.keys() - {"serial", "request_id"}):
            assert value(twin, name) == value(new, name), name
        assert (twin.capacity, twin.num_blocks, twin.block_end, twin.borrowed_tail) == (9, 3, 12, True)
        for ours, theirs in zip(twin.tables, source.tables, strict=True):
            assert {name: value(ours, name) for name in TABLE_COPIED} == {name: value(theirs, name) for name in TABLE_COPIED}
            assert ours.pages == theirs.pages[: twin.num_blocks]
        assert twin.recurrent is not None
        assert source.recurrent is not None
        assert twin.recurrent.page is not source.recurrent.page
        assert twin.recurrent.page is not None
