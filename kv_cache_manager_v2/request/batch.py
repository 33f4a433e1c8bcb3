"""Resize and commit as complete calls, for one request or for a batch of requests.

A batch call has the same effect as a loop over its requests: the same lengths, pages, statistics and events. It saves the cost of
the loop in the caller's interpreter, and takes the lock once.
"""

from __future__ import annotations

from operator import index
from typing import Final, SupportsIndex

from kv_cache_manager_v2.arguments import at_least, is_bool, whole, wholes
from kv_cache_manager_v2.errors import ConfigError, KVCacheError, LogicError
from kv_cache_manager_v2.ids import NULL_POINT, Point
from kv_cache_manager_v2.request import commit as committing
from kv_cache_manager_v2.request import growth, publication
from kv_cache_manager_v2.request.beams import choose_beams
from kv_cache_manager_v2.request.call import Call, CallsInOne
from kv_cache_manager_v2.request.publication import check_settled
from kv_cache_manager_v2.request.request import ACTIVE, CLOSED, Request
from kv_cache_manager_v2.reuse.tokens import TokenSequence, pack

_PLAUSIBLE: Final = 1 << 40  # a larger number of tokens is checked in full; comparing with a machine word is cheap


def resize(request: Request, capacity: int | None, history: int | None) -> bool:
    """`KVCache.resize`, if it changes more than the request's own state."""
    with request.shared.lock:
        return _resize(request, capacity, history)


def _resize(request: Request, capacity: int | None, history: int | None) -> bool:
    """Resize one request. The lock is held."""
    with Call(request.shared, "resize()"):
        request.require(ACTIVE, "resize()")
        done = capacity is not None and history is None and growth.add_blocks(request, capacity)
        if not done:
            longest = request.capacity if capacity is None else capacity
            done = growth.resize(request, longest, request.history if history is None else history)
        if done:
            request.sample()
    return done


def commit(request: Request, tokens: TokenSequence, beam_indices: object, is_end: bool) -> None:
    """`KVCache.commit`, if it changes more than the request's own state."""
    with request.shared.lock, Call(request.shared, "commit()"):
        _commit(request, tokens, beam_indices, is_end)


def commit_ahead(request: Request, tokens: TokenSequence) -> None:
    """`KVCache.commit_ahead`."""
    with request.shared.lock, Call(request.shared, "commit_ahead()"):
        request.require(ACTIVE, "commit_ahead()")
        if tokens.num_tokens > 0:
            committing.check_ahead(request, tokens.num_tokens)
            committing.commit_ahead(request, tokens)


def commit_token(request: Request, token: int) -> None:
    """`KVCache.commit([token])`."""
    if not request.append_inside_block(token):
        with request.shared.lock:
            _commit_token(request, token, NULL_POINT)


def _commit_token(request: Request, token: int, point: Point) -> Point:
    """Commit one token. The lock is held.

    `point` is the end of the work on the request's stream, or NULL_POINT if it is not recorded yet. Returns the point, if recorded.
    """
    with Call(request.shared, "commit()"):
        if not request.takes_one(token):
            _commit(request, pack([token], request.text_only), None, False)
            return point
        if point == NULL_POINT:
            point = request.shared.timeline.record(request.stream)
        committing.commit_one(request, token, point)
        return point


def _commit(request: Request, tokens: TokenSequence, beam_indices: object, is_end: bool) -> None:
    """Commit tokens. The lock is held, inside a `Call`."""
    if tokens.num_tokens > 0:
        request.require(ACTIVE, "commit()")
        committing.check_commit(request, tokens.num_tokens)
        beams: list[int] = []
        if request.width > 1 or beam_indices is not None:
            beams = choose_beams(request, tokens.num_tokens, _beam_list(beam_indices))
        committing.commit(request, tokens, beams, is_end)
    elif request.status == CLOSED:
        raise LogicError("commit(): this cache is closed; create another one")
    if is_end:
        check_settled(request, "commit(is_end=True)")
        committing.stop_committing(request, True, NULL_POINT)


def _beam_list(indices: object) -> list[int] | None:
    return None if indices is None else wholes(indices, "beam_search_indices", 0)


def resize_all(requests: list[Request], capacities: list[object], histories: list[object] | None) -> int:
    """Resize requests in order until one has a shortage. Returns how many were resized."""
    count = len(requests)
    if len(capacities) != count or (histories is not None and len(histories) != count):
        raise ConfigError(f"{count} caches need {count} capacities and, if histories are passed, {count} histories")
    if count == 0:
        return 0
    position = 0
    with requests[0].shared.lock, CallsInOne(requests[0].shared):
        try:
            for position in range(count):
                request = requests[position]
                item = capacities[position]
                capacity = item if type(item) is int else whole(item, f"capacities[{position}]")
                if histories is None:
                    if request.stay_inside_block(capacity):
                        continue
                    if not _resize(request, capacity, None):
                        return position
                elif not _resize(request, capacity, whole(histories[position], f"histories[{position}]")):
                    return position
        except KVCacheError as error:
            _name_request(error, requests[position], position)
            raise
    return count


def resize_step(requests: list[Request], counts: list[object], first: int, out: list[bool]) -> int:
    """Give requests pages for `counts` tokens after their histories, from the one at `first` on, until one has a shortage.

    Returns the position of that one, or the number of requests. Leaves out those that are marked in `out`, if it is not empty.
    """
    count = len(requests)
    position = first
    if count == 0:
        return 0
    with requests[0].shared.lock, CallsInOne(requests[0].shared):
        try:
            while position < count:
                request = requests[position]
                item = counts[position]
                wanted = item if type(item) is int and 0 <= item < _PLAUSIBLE else at_least(item, f"num_new_tokens[{position}]", 0)
                if not (out and out[position]):
                    capacity = request.history + wanted
                    if not request.stay_inside_block(capacity) and not _resize(request, capacity, None):
                        return position
                position += 1
        except KVCacheError as error:
            _name_request(error, requests[position], position)
            raise
    return count


def commit_all(requests: list[Request], tokens: list[object]) -> None:
    """Commit to each request in order; an int means a list of that one token."""
    count = len(requests)
    if len(tokens) != count:
        raise ConfigError(f"{count} caches need {count} token lists, got {len(tokens)}")
    if count == 0:
        return
    stream = requests[0].stream
    point = NULL_POINT  # end of the work on that stream: recorded once, since this call queues nothing there
    position = 0
    with requests[0].shared.lock, CallsInOne(requests[0].shared):
        try:
            for position in range(count):
                request = requests[position]
                item = tokens[position]
                if type(item) is int:
                    token = item
                else:
                    scalar = _scalar(item)
                    if scalar is None:
                        commit(request, pack(item, request.text_only), None, False)
                        continue
                    token = scalar
                if not request.append_inside_block(token):
                    if request.stream != stream:
                        stream = request.stream
                        point = NULL_POINT
                    point = _commit_token(request, token, point)
        except KVCacheError as error:
            _name_request(error, requests[position], position)
            raise


def commit_ahead_all(requests: list[Request], tokens: list[object]) -> None:
    """Commit to each request ahead, in order; an int means a list of that one token."""
    count = len(requests)
    if len(tokens) != count:
        raise ConfigError(f"{count} caches need {count} token lists, got {len(tokens)}")
    if count == 0:
        return
    position = 0
    with requests[0].shared.lock, CallsInOne(requests[0].shared):
        try:
            for position in range(count):
                request = requests[position]
                scalar = _scalar(tokens[position])
                commit_ahead(request, pack(tokens[position] if scalar is None else [scalar], request.text_only))
        except KVCacheError as error:
            _name_request(error, requests[position], position)
            raise


def take_back_all(requests: list[Request]) -> None:
    """Take back what is committed ahead of the history of each request. A listener's interrupt stops none of them."""
    if not requests:
        return
    shared = requests[0].shared
    with shared.lock, CallsInOne(shared), Call(shared, "the end of a step"):
        for request in requests:
            publication.take_back(request)


def _name_request(error: KVCacheError, request: Request, position: int) -> None:
    """Add the request and its position to the text of an error. Earlier requests of the batch are done."""
    named = f" (id {request.request_id})" if request.request_id is not None else ""
    error.args = (f"caches[{position}]{named}: {error.args[0] if error.args else error}", *error.args[1:])


def _scalar(item: object) -> int | None:
    """The value of a numpy or torch scalar; None for a sequence of tokens."""
    if isinstance(item, (list, tuple)) or is_bool(item) or not isinstance(item, SupportsIndex) or getattr(item, "ndim", 0) != 0:
        return None
    return index(item)
