"""Resize and commit as whole calls: of one request, or of a step's whole batch.

Rule: a batch call is the loop over its requests, in order: equal in lengths, pages, statistics and events. It saves the loop's
own cost in the caller's interpreter, and takes the lock once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex

from kv_cache_manager_v2.doors import as_list, whole
from kv_cache_manager_v2.errors import ConfigError, LogicError
from kv_cache_manager_v2.ids import NULL_POINT
from kv_cache_manager_v2.reuse.tokens import TokenSequence, pack
from kv_cache_manager_v2.sequence import committing, growth
from kv_cache_manager_v2.sequence.beams import choose_beams
from kv_cache_manager_v2.sequence.state import ACTIVE, CLOSED, SequenceState
from kv_cache_manager_v2.sequence.upkeep import conclude, tidy


def resize(state: SequenceState, capacity: int | None, history: int | None) -> bool:
    """`KVCache.resize` where it leaves the request's own state."""
    shared = state.shared
    with shared.lock:
        tidy(shared)
        state.require(ACTIVE, "resize()")
        done = growth.resize(state, state.capacity if capacity is None else capacity, state.history if history is None else history)
        if done:
            state.sample()
        conclude(shared)
    return done


def commit(state: SequenceState, tokens: TokenSequence, beam_indices: Sequence[SupportsIndex] | None, is_end: bool) -> None:
    """`KVCache.commit` where it leaves the request's own state."""
    shared = state.shared
    with shared.lock:
        tidy(shared)
        if tokens.num_tokens > 0:
            state.require(ACTIVE, "commit()")
            committing.check_commit(state, tokens.num_tokens)
            beams: list[int] = []
            if state.width > 1 or beam_indices is not None:
                beams = choose_beams(state, tokens.num_tokens, _beam_list(beam_indices))
            committing.commit(state, tokens, beams, is_end)
        elif state.status == CLOSED:
            raise LogicError("commit(): this cache is closed")
        if is_end:
            committing.stop_committing(state, True, NULL_POINT)
        conclude(shared)


def _beam_list(indices: Sequence[SupportsIndex] | None) -> list[int] | None:
    return None if indices is None else [whole(item, "beam_search_indices") for item in as_list(indices)]


def resize_all(states: list[SequenceState], capacities: Sequence[object], histories: Sequence[object] | None) -> int:
    """Resize from the front until one is short of pages; how many were done."""
    count = len(states)
    if len(capacities) != count or (histories is not None and len(histories) != count):
        raise ConfigError(f"{count} caches need {count} capacities, and as many histories if any are given")
    if count == 0:
        return 0
    wanted = as_list(capacities)
    settled = as_list(histories) if histories is not None else None
    with states[0].shared.lock:
        for index in range(count):
            state = states[index]
            capacity = whole(wanted[index], "capacity")
            if settled is None:
                if growth.stay_inside_block(state, capacity):
                    continue
                if not resize(state, capacity, None):
                    return index
            elif not resize(state, capacity, whole(settled[index], "history_length")):
                return index
    return count


def commit_all(states: list[SequenceState], tokens: Sequence[object]) -> None:
    """Commit to each request in order; an int stands for a list of that one token."""
    count = len(states)
    if len(tokens) != count:
        raise ConfigError(f"{count} caches need {count} token lists, got {len(tokens)}")
    if count == 0:
        return
    items = as_list(tokens)
    with states[0].shared.lock:
        for index in range(count):
            item = items[index]
            if type(item) is int:
                if committing.append_inside_block(states[index], item):
                    continue
                commit(states[index], pack([item], states[index].text_only), None, False)
            else:
                commit(states[index], pack(item, states[index].text_only), None, False)
