"""The scene of a simulation: a manager, its device, its engine and the model, and the comparisons between them.

Rule: a comparison never disturbs what it looks at. What a kernel finds is noted when the device runs it, and judged when a call
has returned: wrong bytes are forgiven only to a request that turns out to be lost.
"""

from __future__ import annotations

import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from kv_cache_manager_v2 import EmulatedDriver, KVCache, KVCacheManager, PlannedDropHandle, ReuseScope
from kv_cache_manager_v2.emulated.transfers import EmulatedGate
from kv_cache_manager_v2.errors import CuError, OutOfMemoryError, OutOfPagesError, PageDataLostError
from kv_cache_manager_v2.ids import BAD_PAGE_INDEX, BeamIndex, CacheLevel, LayerGroupId, PageIndexMode
from kv_cache_manager_v2.introspection import live_pages, request_pages, state_page
from kv_cache_manager_v2.storage.page import Page
from tests.simulation.inside import Inside
from tests.simulation.model import Library, Request, Token, chain_all
from tests.simulation.setups import Setup
from tests.simulation.stream import StreamWatch
from tests.support.engine import Engine, Plane, fingerprint
from tests.support.inside import page_bytes
from tests.support.recount import Recount


def words_of(stamps: Sequence[int]) -> list[int]:
    """What the engine writes for chain values."""
    return [stamp & 0xFFFFFFFF for stamp in stamps]


class Live:
    """An open request: the public handle, and what the model knows."""

    def __init__(self, number: int, cache: KVCache, model: Request) -> None:
        self.number = number
        self.cache = cache
        self.model = model
        self.lost = False  # a call has raised PageDataLostError
        self.forked = False  # made by a fork
        self.doubt = ""  # a kernel of it found wrong bytes: then it must turn out to be lost
        self.announced: dict[int, list[int]] = {}  # by life cycle: page indices that may not change while it runs
        self.buffers: dict[tuple[int, int], array[int]] = {}  # page-index buffers attached, by (life cycle, beam)
        self.row = -1  # of the batch tables; -1: it has none

    @property
    def active(self) -> bool:
        return self.model.status == "ACTIVE"


class Scene:
    """Everything that is simulated, and how it is compared; the operations on it are `World`'s."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.now = 0.0  # the manager's clock, seconds
        self.driver = EmulatedDriver(setup.schedule, setup.seed, setup.timeout_calls)
        self.stream_watch = StreamWatch(setup.alphabet)
        self.manager = KVCacheManager(setup.config, self.stream_watch.events, driver=self.driver, clock=self._clock)
        self.inside = Inside(self.manager, self.driver)
        self.engine = Engine(self.manager, self.driver, setup.config, PageIndexMode.PER_LAYER)
        self.parts = [plane.parts() for plane in self.engine.planes]
        self.streams = [self.driver.create_stream() for _stream in range(setup.num_streams)]
        self.library = Library(setup.num_scopes)
        self.recount = Recount(self.manager, setup.kinds, setup.size)
        self.scopes = [
            ReuseScope(None if number == 0 else number, 7 if number == 2 else None) for number in range(setup.num_scopes)
        ]
        self.live: list[Live] = []
        self.plans: list[PlannedDropHandle] = []
        self.gates: list[EmulatedGate] = []  # of file transfers that hang
        self.closed_in_doubt: list[Live] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        self.created = 0
        self.started: set[int] = set()  # requests that have been ACTIVE
        self.recent: list[Live] = []  # closed lately: their kernels may still be queued
        self.armed = False  # faults have been ordered: calls may fail
        self.faulted = False  # whether any ever was
        self.taken_back = False  # whether tokens that were committed ahead were ever taken back
        self.trace = 0  # checksum of all that happened
        movement = self.manager.movement
        self.quotas = [self.manager.get_quota(CacheLevel(level)) for level in range(len(movement.dropped[0]))]

    def _clock(self) -> float:
        return self.now

    # --- bookkeeping

    def count(self, operation: str, outcome: str, *details: int) -> str:
        self.counts[operation, outcome] += 1
        if outcome != "device failure":  # a call that raises concludes nothing
            self.recount.look()
        self.trace = zlib.crc32(f"{operation} {outcome} {details}".encode(), self.trace)
        return outcome

    def calm(self) -> bool:
        """Whether nothing can change behind a call's back."""
        shared = self.inside.shared
        waiting = shared.unclosed or shared.finalized_plans or shared.closed_loads
        return self.inside.hierarchy.transfers_in_flight == 0 and not waiting and not self.armed

    def fingerprint(self, live: Live | None) -> tuple[object, ...]:
        return (self.inside.fingerprint(), self.face(live) if live is not None else None, self.manager.num_open_caches)

    def face(self, live: Live) -> tuple[object, ...]:
        """All that the public face shows of a request."""
        cache = live.cache
        rows: list[tuple[int, ...]] = []
        for number, kind in enumerate(self.setup.kinds):
            for beam in range(cache.beam_width):
                if kind.recurrent:
                    rows.append((cache.get_ssm_block_base_index(LayerGroupId(number), BeamIndex(beam)),))
                else:
                    rows.append(tuple(cache.get_aggregated_page_indices(LayerGroupId(number), BeamIndex(beam))))
        lengths = (cache.capacity, cache.history_length, cache.num_committed_tokens, cache.num_blocks, cache.beam_width)
        return (int(cache.status), lengths, tuple(rows), tuple(cache.committed_tokens))

    def attempt(self, live: Live | None, operation: str, call: Callable[[], object]) -> tuple[str, object]:
        """Do a call that may meet injected faults: ("", result), or the name of the failure."""
        if not self.faulted and not self.inside.shared.unclosed:  # else the call first closes a cache whose handle was dropped
            self.recount.before(operation)
        try:
            result = call()
        except PageDataLostError:
            assert live is not None
            assert self.faulted or self.taken_back, "a request is lost though no transfer failed"
            live.lost = True
            return self.count(operation, "data lost"), None
        except OutOfPagesError:
            raise
        except (CuError, OutOfMemoryError):
            assert self.armed, "a device failure that was not ordered"
            return self.count(operation, "device failure"), None
        assert live is None or not live.lost or operation == "close", f"{operation} went through though the request is lost"
        return "", result

    def after(self) -> None:
        """Look at what kernels found meanwhile."""
        errors, self.engine.errors = self.engine.errors, []
        for number, text in errors:
            assert self.setup.faults, f"wrong bytes: {text}"
            found = [live for live in (*self.live, *self.closed_in_doubt, *self.recent) if live.number == number]
            assert found, f"wrong bytes: {text}"
            found[0].doubt = text
            if found[0] not in self.live and found[0] not in self.closed_in_doubt:
                self.closed_in_doubt.append(found[0])  # closed before its kernels ran

    def resized(self, live: Live, capacity: int, history: int) -> None:
        """Change the model as a resize changed the request."""
        blocks, old_history = live.model.blocks, live.model.history
        live.model.resized(capacity, history, self.setup.max_rewind)
        self.recount.resized(live.number, live.model, blocks, old_history)

    def check_pages(self, live: Live) -> None:
        """A kernel that reads everything that the request has computed, unless its history lies among scratch blocks of a step."""
        if live.model.reads_scratch():
            return
        for number, beam in enumerate(live.model.beams):
            self.engine.check(live.cache, words_of(beam.stamps), number, words_of(beam.state))

    # --- room, by counting pages

    def limited(self, live: Live) -> bool:
        """Whether other requests run, and use more of a GPU pool group than `max_util_for_resume` allows."""
        hierarchy = self.inside.hierarchy
        if not any(request.status == KVCache.Status.ACTIVE for request in self.inside.shared.open.values()):
            return False
        for group in range(self.inside.shared.layout.num_pool_groups):
            kept = [page for page in live_pages(live.cache) if page.pool_group == group and page.level == 0]
            own = sum(1 for page in kept if page.locks == 0 and not page.queued)
            allowed = int(hierarchy.total(0, group) * self.setup.config.max_util_for_resume)
            if hierarchy.unavailable(0, group) - own > allowed:
                return True
        return False

    def fits_to_resume(self, live: Live) -> tuple[bool, bool]:
        """By counting pages: whether there is room for all that the request holds and private copies of what it would write into,
        and whether there is without copies of a last block and a snapshot that it may take out of the tree instead."""
        pages = live_pages(live.cache)
        need = [0] * self.inside.hierarchy.num_groups
        borrowed = need.copy()
        if live.number not in self.started:
            for number, kind in enumerate(self.setup.kinds):
                group = self.inside.shared.pool_group_of[number]
                if kind.recurrent:
                    there = state_page(live.cache) is not None
                    need[group] += 0 if live.forked and there else 1
                    borrowed[group] += 1 if there and not live.forked else 0
                elif live.model.history % self.setup.size and request_pages(live.cache, number)[-1] is not None:
                    need[group] += 1
                    borrowed[group] += 1
        least = [slots - copies for slots, copies in zip(need, borrowed, strict=True)]
        return self.inside.fits(need, pages), self.inside.fits(least, pages)

    def fits_to_grow(self, live: Live, capacity: int, history: int) -> bool | None:
        """By counting pages; None where pages would go as others come."""
        model = live.model
        need = [0] * self.inside.hierarchy.num_groups
        blocks = range(model.blocks, -(-capacity // self.setup.size))
        for number, kind in enumerate(self.setup.kinds):
            if kind.recurrent:
                continue
            if len(kind.stale(self.setup.size, history)) != len(kind.stale(self.setup.size, model.history)):
                return None
            fresh = [block for block in blocks if block not in kind.stale(self.setup.size, history)]
            need[self.inside.shared.pool_group_of[number]] += len(fresh) * model.width
        return self.inside.fits(need, [])

    # --- checks

    def positions(self, live: Live) -> tuple[int, ...]:
        """For the trace: lengths and page indices."""
        cache = live.cache
        values = [live.number, cache.capacity, cache.history_length, cache.num_committed_tokens]
        for number, kind in enumerate(self.setup.kinds):
            if not kind.recurrent:
                values.extend(cache.get_aggregated_page_indices(LayerGroupId(number)))
        return tuple(values)

    def rows(self, live: Live) -> None:
        """Lengths and page indices are what the model says."""
        cache, model = live.cache, live.model
        assert (cache.capacity, cache.history_length) == (model.capacity, model.history)
        assert (cache.num_committed_tokens, cache.num_blocks, cache.beam_width) == (model.committed, model.blocks, model.width)
        for number, kind in enumerate(model.kinds):
            seen: set[int] = set()
            for beam in range(model.width):
                if kind.recurrent:
                    slot = cache.get_ssm_block_base_index(LayerGroupId(number), BeamIndex(beam))
                    assert (slot != BAD_PAGE_INDEX) == live.active
                    continue
                row = list(cache.get_aggregated_page_indices(LayerGroupId(number), BeamIndex(beam)))
                assert len(row) == model.blocks
                shared = model.beams[beam].shared
                for block, slot in enumerate(row):
                    expected = live.active and block >= shared and model.has_page(number, block)
                    assert (slot != BAD_PAGE_INDEX) == expected, f"life cycle {number}, beam {beam}, block {block}: {row}"
                    assert slot == BAD_PAGE_INDEX or slot not in seen, f"a slot twice in {row}"
                    seen.add(slot)
                self._check_announced(live, number, row)
                buffer = live.buffers.get((number, beam))
                if buffer is not None:
                    assert buffer.tolist() == row + [BAD_PAGE_INDEX] * (len(buffer) - len(row))

    def _check_announced(self, live: Live, number: int, row: list[int]) -> None:
        """Without adoption a page index does not change while the request runs: its block has it, or has left the window."""
        if not live.active or live.model.width > 1 or live.cache.allow_seq_rebasing:
            live.announced.clear()
            return
        for before, now in zip(live.announced.get(number, []), row, strict=False):
            assert before == now or BAD_PAGE_INDEX in (before, now), f"life cycle {number}: a page was exchanged: {row}"
        live.announced[number] = row

    def check(self) -> None:
        """Every structure, without disturbing anything."""
        self.manager.check_invariants()
        self.stream_watch.check(self.inside.tree)
        self.recount.check(not self.faulted and not self.inside.shared.unclosed)
        self.after()

    def check_bytes(self) -> None:
        """Let the device come to rest: then every page in the tree holds what its tokens say, on whatever tier it lies, and a
        request that computed on wrong bytes is lost."""
        for live in self.live:
            if live.active and not live.lost:
                self.check_pages(live)
        self.driver.synchronize()
        self.inside.hierarchy.settle()
        self.after()
        self._settle_doubts()
        scopes = {scope.data: self.library.roots[number] for number, scope in enumerate(self.scopes)}
        memo: dict[tuple[bytes, tuple[Token, ...]], list[int]] = {}
        for data, path, block in self.inside.blocks():
            values = self._values(memo, data, scopes[data], path)
            if block.num_pending_loads:
                continue
            assert values[-1] in self.library.committed, "a block that was never committed"
            for number, page in enumerate(block.pages):
                if page is None or page.transfers > 0:
                    continue
                for plane, (pool, offsets) in zip(self.engine.planes, self.parts, strict=True):
                    if plane.group == number:
                        self._check_page(page, plane, pool, offsets, words_of(values), len(path) - block.num_tokens)
        self.counts["check", "tree"] += 1

    def _values(
        self, memo: dict[tuple[bytes, tuple[Token, ...]], list[int]], data: bytes, root: int, path: tuple[Token, ...]
    ) -> list[int]:
        beg = (len(path) - 1) // self.setup.size * self.setup.size
        before = memo.get((data, path[:beg]), [])
        values = before + chain_all(before[-1] if before else root, path[beg:])
        memo[data, path] = values
        return values

    def _check_page(self, page: Page, plane: Plane, pool: int, offsets: list[int], words: list[int], beg: int) -> None:
        """What a page is good for, from position `beg` on, is there, on any level."""
        end = beg + page.coverage
        expected = fingerprint(np.array(words[:end], np.uint32)) if plane.recurrent else np.array(words[beg:end], np.uint32)
        data = b"".join(page_bytes(self.driver, page, pool, offset, plane.stride) for offset in offsets)
        found = plane.pages_in(data).reshape(-1, plane.words)[: len(expected), plane.columns]
        assert np.array_equal(found, plane.pattern(expected)), (
            f"a page of {plane.describe()} on level {page.level}, good for {page.coverage} tokens from {beg} on, holds other bytes"
        )

    def _settle_doubts(self) -> None:
        for live in self.live:
            if not live.doubt or live.lost:
                continue
            try:
                if live.active:
                    live.cache.resize(None)
                else:
                    live.cache.prefetch(CacheLevel(len(self.quotas) - 1))
            except PageDataLostError:
                live.lost = True
                self.count("doubt", "lost")
            assert live.lost, f"wrong bytes, and no page was lost: {live.doubt}"
        for live in self.closed_in_doubt:  # the loss of a private page that its request gave up before counts nowhere
            assert self.faulted, f"wrong bytes, and nothing failed: {live.doubt}"
        self.closed_in_doubt = []
