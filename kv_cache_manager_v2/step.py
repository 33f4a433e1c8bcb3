"""One step of an engine as one object: pages before it, token slots and rows in it, commits after it."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, SupportsIndex

from kv_cache_manager_v2.arguments import IntBuffer, Integers, at_least, instance, instance_or_none, items_of
from kv_cache_manager_v2.batch_calls import distinct_requests_of
from kv_cache_manager_v2.errors import ConfigError, LogicError, OutOfPagesError
from kv_cache_manager_v2.ids import PageIndexMode
from kv_cache_manager_v2.kv_cache import KVCache
from kv_cache_manager_v2.layout.page_index import PageIndexConverter
from kv_cache_manager_v2.make_room import MakeRoom, made_room
from kv_cache_manager_v2.manager_statistics import ManagerStatistics
from kv_cache_manager_v2.request import batch
from kv_cache_manager_v2.request.request import ACTIVE, Request
from kv_cache_manager_v2.reuse.tokens import Tokens
from kv_cache_manager_v2.storage.planner import Shortage
from kv_cache_manager_v2.token_slots import TokenSlots, slots_to_read, slots_to_write

if TYPE_CHECKING:
    from kv_cache_manager_v2.batch_tables import PlainBatchTables

_NEW: Final = 0
_OPEN: Final = 1
_ENDED: Final = 2


class Step:
    """The step of a batch of caches. `KVCacheManager.step` makes it; a `with` block begins and ends it.

    At its beginning each cache gets pages for its new tokens, which follow its history. At its end, tokens are committed or
    histories advanced, as the block asked, unless it raised. A step equals the loops over `resize` and `commit` in lengths, pages,
    statistics and events. `commit_ahead` commits before the step is queued, so that others can match the tokens.
    """

    def __init__(
        self,
        caches: list[KVCache],
        requests: list[Request],
        counts: list[object],
        tokens: list[object] | None,
        policy: MakeRoom | None,
    ) -> None:
        """Internal. `KVCacheManager.step` makes steps."""
        self._given = caches
        self._requests = requests
        self._counts = counts
        self._tokens = tokens
        self._policy = policy
        self._phase = _NEW
        self._advance: list[int] | None = None  # tokens by which histories advance at the end
        self._ahead = False  # whether tokens were committed ahead
        self._short: list[int] = []  # positions of the caches that got no pages
        self._suspended: dict[int, None] = {}  # positions of those that the policy suspended or closed, in order
        self._positions: list[int] | None = None  # of the others, if these are not all

    def __reduce__(self) -> str:
        raise LogicError("a step cannot be copied or pickled: it belongs to the caches that it was made for")

    def __enter__(self) -> Step:
        if self._phase != _NEW:
            raise LogicError("a step can be begun once; make another one with manager.step()")
        self._phase = _ENDED  # unless everything below succeeds
        requests = self._requests
        count = len(requests)
        position = batch.resize_step(requests, self._counts, 0, [])
        if position < count:
            self._begin_short(position)
        self._phase = _OPEN
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Commit, or advance histories. After an exception in the block neither: lengths stay as the step began.

        Tokens that were committed ahead, and that no history covers because of an exception here or in the block, are taken back.
        """
        if self._phase != _OPEN:
            return
        self._phase = _ENDED
        requests = self._taking_part()
        complete = False
        try:
            if kind is None:
                self._settle(requests)
                complete = True
        finally:
            if self._ahead and not complete:
                batch.take_back_all(requests)

    def _settle(self, requests: list[Request]) -> None:
        """Commit, or advance histories, as the block asked."""
        if self._tokens is not None:
            batch.commit_all(requests, self._tokens)
        elif self._ahead or self._advance is not None:
            capacities: list[object] = [request.capacity for request in requests]
            histories: list[object] = [self._new_history(number, request) for number, request in enumerate(requests)]
            done = batch.resize_all(requests, capacities, histories)
            if done < len(requests):
                raise OutOfPagesError(f"caches[{done}] cannot advance its history: {requests[done].last_shortage}")

    # --- who takes part

    @property
    def caches(self) -> list[KVCache]:
        """The caches that have pages for the step, in the order given. All results of the step are in this order."""
        positions = self._positions
        return list(self._given) if positions is None else [self._given[position] for position in positions]

    @property
    def positions(self) -> list[int]:
        """The position of each of `caches` in the list that was passed to `KVCacheManager.step`."""
        return list(range(len(self._given))) if self._positions is None else list(self._positions)

    @property
    def short(self) -> list[KVCache]:
        """The caches that got no pages. Nothing in them has changed except `last_shortage`, which says what is missing."""
        return [self._given[position] for position in self._short]

    @property
    def suspended(self) -> list[KVCache]:
        """The caches of the step that the make-room policy suspended or closed. Some may have got their new capacity before."""
        return [self._given[position] for position in self._suspended]

    # --- what a kernel takes

    def slots_to_write(
        self,
        layer_group_id: SupportsIndex,
        converter: PageIndexConverter | None = None,
        index_mode: PageIndexMode | SupportsIndex | None = None,
        out: IntBuffer | None = None,
        offsets: IntBuffer | None = None,
    ) -> TokenSlots:
        """Where the new tokens of each cache are written: see `kv_cache_manager_v2.slots_to_write`."""
        self._require_open("slots_to_write()")
        return slots_to_write(self.caches, layer_group_id, None, None, converter, index_mode, out, offsets)

    def slots_to_read(
        self,
        layer_group_id: SupportsIndex,
        converter: PageIndexConverter | None = None,
        index_mode: PageIndexMode | SupportsIndex | None = None,
        out: IntBuffer | None = None,
        offsets: IntBuffer | None = None,
    ) -> TokenSlots:
        """Where the tokens lie that the new tokens of each cache read: see `kv_cache_manager_v2.slots_to_read`."""
        self._require_open("slots_to_read()")
        return slots_to_read(self.caches, layer_group_id, None, None, converter, index_mode, out, offsets)

    def rows(self, tables: PlainBatchTables, out: IntBuffer | None = None) -> IntBuffer:
        """The row of each cache in batch tables: see `PlainBatchTables.rows`."""
        from kv_cache_manager_v2.batch_tables import PlainBatchTables  # not above: it needs the manager, which needs this module

        self._require_open("rows()")
        return instance(tables, PlainBatchTables, "tables").rows(self.caches, out)

    # --- what the end does

    def commit(self, tokens: Sequence[SupportsIndex | Tokens] | IntBuffer) -> None:
        """Commit these tokens when the block ends: an id, or a sequence of tokens, for each of `caches`. The last call counts.

        Raises ConfigError for another number of items. Invalid tokens raise the errors of `KVCache.commit` at the end.
        """
        self._require_open("commit()")
        self._tokens = self._one_for_each(tokens, "tokens", "ids, or sequences of tokens")
        self._advance = None

    def commit_ahead(self, tokens: Sequence[SupportsIndex | Tokens] | IntBuffer) -> None:
        """Commit these tokens now, ahead of their computation: an id, or a sequence of tokens, for each of `caches`.

        Queue the step afterwards. At its end histories advance over all committed tokens, unless `advance` or `commit` was called
        for other lengths. After an exception in the block the tokens are taken back. Raises the errors of `KVCache.commit_ahead`,
        after earlier caches are committed.
        """
        self._require_open("commit_ahead()")
        given = self._one_for_each(tokens, "tokens", "ids, or sequences of tokens")
        self._ahead = True
        batch.commit_ahead_all(self._taking_part(), given)

    def advance(self, num_tokens: Integers | None = None) -> None:
        """Advance the history of each of `caches` by this many tokens when the block ends, without a commit. None: all new tokens.

        For requests whose tokens are not to be reused. Raises ConfigError for another number of items, and for more tokens than are
        new.
        """
        self._require_open("advance()")
        requests = self._taking_part()
        counts: list[int] = []
        given = None if num_tokens is None else self._one_for_each(num_tokens, "num_tokens", "integers")
        for position, request in enumerate(requests):
            most = request.capacity - request.history
            count = most if given is None else at_least(given[position], f"num_tokens[{position}]", 0)
            if count > most:
                raise ConfigError(f"num_tokens[{position}] is {count}; it must be at most the number of new tokens, {most}")
            counts.append(count)
        self._advance = counts
        self._tokens = None

    # --- internal

    def _require_open(self, call: str) -> None:
        if self._phase != _OPEN:
            raise LogicError(f"{call} needs a step that has begun and not ended: call it inside the with block")

    def _one_for_each(self, values: object, name: str, what: str) -> list[object]:
        items = items_of(values, name, what)
        count = len(self._given) if self._positions is None else len(self._positions)
        if len(items) != count:
            raise ConfigError(f"{name} has {len(items)} items; pass one for each of the {count} caches of the step")
        return items

    def _taking_part(self) -> list[Request]:
        positions = self._positions
        return self._requests if positions is None else [self._requests[position] for position in positions]

    def _new_history(self, number: int, request: Request) -> int:
        """The history of a cache at the end of a step that commits nothing then."""
        if self._advance is not None:
            return request.history + self._advance[number]
        return max(request.history, request.committed)

    def _begin_short(self, position: int) -> None:
        """Go on from the first cache with a shortage: ask the policy, and leave out those for which it has no answer."""
        requests = self._requests
        count = len(requests)
        sized = [number < position for number in range(count)]
        out = [False] * count
        lacked: list[Shortage | None] = [None] * count  # what each lacked when the policy was asked for it last
        while position < count:
            shortage = requests[position].last_shortage
            if not self._find_room(position, shortage, lacked[position], out):
                self._short.append(position)
                out[position] = True
            lacked[position] = shortage
            first = position
            for number in range(position):
                sized[number] = sized[number] and self._has_pages(number)
                if not (sized[number] or out[number]):
                    first = min(first, number)  # the policy has resized it, or it was suspended and is ACTIVE again
            skipped = [sized[number] or out[number] for number in range(count)]
            position = batch.resize_step(requests, self._counts, first, skipped)
            for number in range(first, position):
                sized[number] = sized[number] or not out[number]
        self._positions = [number for number in range(count) if not out[number]]
        if self._tokens is not None:
            self._tokens = [self._tokens[number] for number in self._positions]

    def _has_pages(self, number: int) -> bool:
        """Whether a cache that was resized for the step still has its capacity, whatever the policy did to it since."""
        request = self._requests[number]
        return request.capacity == request.history + at_least(self._counts[number], f"num_new_tokens[{number}]", 0)

    def _find_room(self, position: int, shortage: Shortage | None, last: Shortage | None, out: list[bool]) -> bool:
        """Ask the policy. False if the cache must do without the step. Marks the caches that are not ACTIVE in `out`.

        `last` is the shortage of the cache before the policy was last asked for it; None if it was not.
        """
        policy = self._policy
        if policy is None:
            return False
        requests = self._requests
        others = [number for number in range(len(requests)) if requests[number].status == ACTIVE and number != position]
        answer = made_room(policy, self._given[position], shortage, last, [self._given[number] for number in others])
        for number in range(len(requests)):
            if requests[number].status != ACTIVE:
                self._suspended[number] = None
                out[number] = True
            elif number in self._suspended:  # an earlier answer suspended it, and this one resumed it
                del self._suspended[number]
                out[number] = number in self._short
        return answer or out[position]


def _num_new_of(counts: object, count: int) -> list[object]:
    """The numbers of new tokens of a step: one for all caches, or one for each. Raises ConfigError."""
    if isinstance(counts, SupportsIndex) and getattr(counts, "ndim", 0) == 0:
        return [counts] * count
    items = items_of(counts, "num_new_tokens", "integers")
    if len(items) != count:
        raise ConfigError(f"num_new_tokens has {len(items)} items; pass one for each of the {count} caches, or one integer for all")
    return items


class ManagerSteps(ManagerStatistics):
    """The part of `KVCacheManager` that makes steps."""

    def step(
        self,
        caches: Sequence[KVCache],
        num_new_tokens: SupportsIndex | Integers,
        tokens: Sequence[SupportsIndex | Tokens] | IntBuffer | None = None,
        make_room: MakeRoom | None = None,
    ) -> Step:
        """One step of a batch, as a `with` block. It begins with `resize(history + num_new_tokens)` for each cache, in this order.

        `num_new_tokens` is one number for all caches, or a sequence with one for each. A cache with a shortage is left out, after
        `make_room` was asked: see `Step.short`. `tokens` are committed at the end, an id or a sequence of tokens for each cache;
        or call `commit` of the step inside the block. After an exception in the block nothing is committed. All caches must be
        ACTIVE: a suspended one needs `resume` before the step.

        Entering raises the errors of `resize`, after earlier caches are resized; leaving raises those of `commit`.
        """
        requests = distinct_requests_of(caches)
        handles = list(caches)
        if requests and requests[0].shared is not self._shared:
            raise ConfigError("caches belong to another manager; call step() of that one")
        committed = None if tokens is None else items_of(tokens, "tokens", "ids, or sequences of tokens")
        if committed is not None and len(committed) != len(requests):
            raise ConfigError(f"tokens has {len(committed)} items; pass one for each of the {len(requests)} caches")
        policy = instance_or_none(make_room, MakeRoom, "make_room")  # type: ignore[type-abstract]
        return Step(handles, requests, _num_new_of(num_new_tokens, len(requests)), committed, policy)
