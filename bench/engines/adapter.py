"""What vLLM 0.33's scheduler calls of its `kv_cache_manager`, over ours. It imports nothing of vLLM.

A block id is a base page index + 1, so that BAD_PAGE_INDEX is vLLM's null block 0. Blocks are committed ahead, since vLLM publishes
what a step computes when it schedules the step. The scheduler's process has no device: its workers own the pages and the streams.

Not mapped: connectors, recurrent layers, encoders, events, and drafts other than look-ahead tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

import kv_cache_manager_v2 as kvcm
from bench.free_driver import FreeDriver

_NEVER: Final = 1 << 62


class Lora(Protocol):
    lora_int_id: int


class Request(Protocol):
    """What is read of vLLM's requests. Lengths are in tokens."""

    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int  # before the step being scheduled
    num_in_flight_tokens: int  # of them, those of steps whose output has not come back
    num_preemptions: int
    skip_reading_prefix_cache: bool
    cache_salt: str | None
    lora_request: Lora | None
    _all_token_ids: list[int]  # prompt and output; `all_token_ids` is a slower view of it

    @property
    def num_tokens(self) -> int: ...


class PrefixStats(Protocol):
    """vLLM's counts of look-ups."""

    reset: bool

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None: ...


class Blocks:
    """Block ids by layer group. The answer of a look-up has the match instead."""

    __slots__ = ("blocks", "match")

    def __init__(self, blocks: tuple[Sequence[int], ...], match: kvcm.ReuseMatch | None = None) -> None:
        self.blocks = blocks
        self.match = match

    def get_block_ids(self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None) -> tuple[list[int], ...] | None:
        """New lists: a worker extends those that it gets."""
        return tuple([list(ids) for ids in self.blocks])


class NoBlocks(Blocks):
    """No blocks: the answer of most calls."""

    __slots__ = ()

    def get_block_ids(self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None) -> tuple[list[int], ...] | None:
        return None if allow_none else tuple([[] for _ in self.blocks])


class Record:
    """A request that has pages."""

    __slots__ = ("blocks", "cache", "committed", "due", "history", "tokens")

    def __init__(self, cache: kvcm.KVCache, tokens: array[int]) -> None:
        self.cache = cache
        self.tokens = tokens  # those known at admission
        self.blocks = cache.num_blocks
        self.committed = self.history = cache.num_committed_tokens
        self.due = 0  # a step up to fewer tokens needs nothing of the manager


class VllmCacheManager:
    """Stands for the scheduler's `kv_cache_manager`. `windows` has the window of each layer group; None: full attention."""

    def __init__(
        self,
        num_blocks: int,  # the null block included
        block_size: int,
        windows: Sequence[int | None],
        max_model_len: int,
        max_in_flight_tokens: int,
        watermark: float,
        make_stats: Callable[[], PrefixStats] | None,
    ) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.num_pages = num_blocks - 1
        self.watermark_blocks = int(watermark * num_blocks)
        self._windows = [window for window in windows if window is not None]
        self._most_blocks = [  # that a request holds of each layer group at a time
            _NEVER if window is None else -(-min(window - 1 + max_in_flight_tokens, max_model_len) // block_size) + 1
            for window in windows
        ]
        self._make_stats = make_stats
        self._stats = None if make_stats is None else make_stats()
        config = kvcm.KVCacheManagerConfig(
            block_size,
            [kvcm.ExternalGpuTierConfig(self.num_pages)],
            [
                kvcm.AttentionLayerConfig(number, [kvcm.BufferConfig("kv", 1)], sliding_window_size=window)
                for number, window in enumerate(windows)
            ],
            max_util_for_resume=1.0,
            enable_partial_reuse=False,
            enable_stats=False,
            text_only=True,
            allow_seq_rebasing=False,  # a worker reads each block id once
        )
        driver = FreeDriver()
        self._stream = driver.create_stream()
        self.manager = kvcm.KVCacheManager(config, driver=driver)
        self._groups = [self.manager.get_layer_group_id(layer) for layer in range(len(windows))]
        self._records: dict[str, Record] = {}
        self._waiting: dict[str, array[int]] = {}  # tokens of requests that have been looked up
        self.empty_kv_cache_blocks = NoBlocks(tuple([() for _ in windows]))

    # --- look-up and admission

    def prefix_cache_lookup_enabled(self, request: Request) -> bool:
        return not request.skip_reading_prefix_cache

    def get_computed_blocks(self, request: Request, max_cache_hit_length: int | None = None) -> tuple[Blocks, int, int]:
        """The match of a request without pages, its length, and 0. Takes nothing."""
        if request.skip_reading_prefix_cache:
            return self.empty_kv_cache_blocks, 0, 0
        limit = request.num_tokens - 1 if max_cache_hit_length is None else max_cache_hit_length
        tokens = memoryview(self._tokens(request))[:limit]
        match = self.manager.find_reuse(_scope(request), tokens)
        return Blocks((), match), match.num_tokens, 0

    def _tokens(self, request: Request) -> array[int]:
        """The tokens of a request without pages, as int32."""
        known = self._waiting.get(request.request_id)
        if known is None or len(known) != request.num_tokens:
            known = self._waiting[request.request_id] = array("i", request._all_token_ids)
        return known

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Blocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> Blocks | None:
        """Pages for a step of a request, and its full blocks published. The new blocks; None, with nothing changed: no room."""
        record = self._records.get(request.request_id)
        if record is not None:
            end = request.num_computed_tokens + num_new_tokens
            if end + num_lookahead_tokens < record.due:
                return self.empty_kv_cache_blocks
            return self._grow(record, request, end, num_lookahead_tokens)
        end = min(num_new_computed_tokens + num_new_tokens, self.max_model_len)
        need = min(end + num_lookahead_tokens, self.max_model_len)
        match = new_computed_blocks.match if new_computed_blocks is not None else None
        if match is None:
            cache = self.manager.create_kv_cache(_scope(request))
        else:
            cache = self.manager.create_kv_cache(reuse_match=match)  # the pages that it holds do not count as free
        watermark = self.watermark_blocks if has_scheduled_reqs else 0
        fits = watermark + self._missing(need, num_new_computed_tokens) <= self._num_free() - reserved_blocks
        if fits and full_sequence_must_fit:
            full = min(request.num_tokens, self.max_model_len)
            fits = watermark + self._missing(full, num_new_computed_tokens, capped=True) <= self._num_free()
        if not (fits and cache.resume(self._stream) and cache.resize(-(-need // self.block_size) * self.block_size)):
            cache.close()
            return None
        record = self._records[request.request_id] = Record(cache, self._tokens(request))
        del self._waiting[request.request_id]
        self._publish(record, request, min(end, request.num_tokens))
        self._set_due(record)
        return self._new_blocks(record, 0)

    def _missing(self, tokens: int, cached: int, capped: bool = False) -> int:
        """Blocks of all layer groups that a new request takes for so many tokens, of which some are cached."""
        blocks = -(-tokens // self.block_size)
        had = cached // self.block_size
        return sum([max((min(blocks, most) if capped else blocks) - had, 0) for most in self._most_blocks])

    # --- steps

    def new_step_starts(self) -> None: ...

    def _grow(self, record: Record, request: Request, end: int, lookahead: int) -> Blocks | None:
        """`allocate_slots` where a block begins, is full, or leaves a window."""
        cache = record.cache
        known = record.blocks
        need = max(-(-min(end + lookahead, self.max_model_len) // self.block_size), known)
        if need > known or self._windows:
            record.history = max(request.num_computed_tokens - request.num_in_flight_tokens, record.history)
            if not cache.resize(need * self.block_size, record.history):
                return None
            record.blocks = need
        self._publish(record, request, min(end, request.num_tokens))
        self._set_due(record)
        return self._new_blocks(record, known) if need > known else self.empty_kv_cache_blocks

    def _publish(self, record: Record, request: Request, end: int) -> None:
        """Commit the blocks that are full at `end`, before they are computed."""
        begin = record.committed
        if end >= begin + self.block_size:
            end -= end % self.block_size
            tokens = record.tokens
            record.cache.commit_ahead(memoryview(tokens)[begin:end] if end <= len(tokens) else request._all_token_ids[begin:end])
            record.committed = end

    def _set_due(self, record: Record) -> None:
        """Compute the end of the next step for which the manager has work."""
        size = self.block_size
        due = min(record.committed + size, record.blocks * size + 1)
        for window in self._windows:  # the next history at which a block leaves it, plus the one token of a decode step
            due = min(due, (max(record.history + 1 - window, 0) // size + 1) * size + window)
        record.due = due

    def _new_blocks(self, record: Record, first: int) -> Blocks:
        """The ids of a request's blocks from one on."""
        rows = [record.cache.get_base_page_indices(group) for group in self._groups]
        return Blocks(tuple([[index + 1 for index in row[first:]] for row in rows]))

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Publish what has been computed, once the tokens are known: a step ahead of its output, or with drafts."""
        record = self._records.get(request.request_id)
        if record is None or num_computed_tokens < record.committed + self.block_size:
            return
        self._publish(record, request, min(num_computed_tokens, request.num_tokens))
        self._set_due(record)

    # --- the end

    def free(self, request: Request) -> None:
        """All steps of the request are queued: what is committed is computed, in the order of the stream."""
        self._waiting.pop(request.request_id, None)
        record = self._records.pop(request.request_id, None)
        if record is None:
            return
        computed = min(request.num_computed_tokens, record.committed)
        if computed > record.history:
            record.cache.resize(None, computed)
        record.cache.close()

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Drop cached blocks, as after a load that failed."""
        indices = [number - 1 for number in block_ids]
        for group in self._groups:
            self.manager.drop_cached_pages(group, indices)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached blocks; False while a request has pages."""
        if self._records:
            return False
        self.manager.clear_reusable_blocks()
        if self._stats is not None:
            self._stats.reset = True
        return True

    def check_idle(self) -> None:
        """Assert that no request has pages, and every invariant of the manager."""
        assert not self._records
        assert not self._waiting
        self.manager.check_invariants()

    # --- questions

    def _num_free(self) -> int:
        free, evictable = self.manager.free_and_evictable()
        return free + evictable

    @property
    def usage(self) -> float:
        """The share of the pages that requests use, from 0 to 1."""
        return 1 - self._num_free() / self.num_pages

    def get_blocks(self, request_id: str) -> Blocks:
        record = self._records.get(request_id)
        return self.empty_kv_cache_blocks if record is None else self._new_blocks(record, 0)

    def estimate_cached_tokens(self, request: Request) -> int:
        record = self._records.get(request.request_id)
        return 0 if record is None else record.committed

    def make_prefix_cache_stats(self) -> PrefixStats | None:
        taken = self._stats
        if self._make_stats is not None:
            self._stats = self._make_stats()
        return taken

    def record_prefix_cache_stats(self, request: Request, num_hits: int) -> None:
        if self._stats is not None and not request.skip_reading_prefix_cache:
            self._stats.record(num_tokens=request.num_tokens, num_hits=num_hits, preempted=request.num_preemptions > 0)

    def take_events(self) -> list[object]:
        return []

    def take_new_block_ids(self) -> list[int]:
        return []

    def take_kv_cache_block_copies(self) -> tuple[list[object], list[object]]:
        return [], []

    def take_boundary_state_offloads(self) -> dict[str, list[tuple[int, int, int]]]:
        return {}


def _scope(request: Request) -> kvcm.ReuseScope | None:
    """Requests share blocks only with the same LoRA and salt."""
    lora, salt = request.lora_request, request.cache_salt
    if lora is None and salt is None:
        return None
    return kvcm.ReuseScope(None if lora is None else lora.lora_int_id, salt)
