"""What the counted engine does: chapters that together pass every public call of the manager and of its requests.

Rule: a chapter is as short as the states that it must reach. It refuses nothing itself; `counting` does.
"""

from __future__ import annotations

import ast
import contextlib
from array import array
from collections.abc import Callable
from typing import Final, NamedTuple

from kv_cache_manager_v2 import (
    ConfigError,
    MatchLimits,
    SuspendCheapest,
    SuspendYoungest,
    commit_ahead_batch,
    commit_batch,
    resize_batch,
    slots_to_read,
    slots_to_write,
)
from kv_cache_manager_v2.disagg import page_table
from tests.arguments.stubs import CLASSES, bases
from tests.hunt.base import SCOPES
from tests.hunt.counted import CountedEngine, Worker
from tests.hunt.requests import Request
from tests.hunt.setups import Setup
from tests.support.drivers import RefusingDevice

# Calls without arguments that change something, and are made elsewhere in a chapter.
ACTS: Final = frozenset(
    ("create_kv_cache", "fork", "resume", "prefetch", "plan_committed_block_drop", "drop", "search", "finish_event")
)


class Workload(NamedTuple):
    """A chapter over a model."""

    chapter: str
    model: str
    schedule: str = "eager"

    def describe(self) -> str:
        return f"{self.chapter} {self.model} {self.schedule}"


def members(owner: str) -> list[ast.FunctionDef]:
    """The public functions and properties of a class, as its stub has them."""
    found: dict[tuple[str, bool], ast.FunctionDef] = {}
    for each in bases(owner):
        for node in CLASSES[each].node.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                setter = any(ast.unparse(mark).endswith(".setter") for mark in node.decorator_list)
                found.setdefault((node.name, setter), node)
    return list(found.values())


def questions(owner: str) -> list[tuple[str, bool]]:
    """What can be asked without arguments and answers something; whether it is a property."""
    found: list[tuple[str, bool]] = []
    for node in members(owner):
        marks = [ast.unparse(mark) for mark in node.decorator_list]
        required = len(node.args.args) - 1 - len(node.args.defaults)
        answers = node.returns is not None and ast.unparse(node.returns) != "None"
        if required <= 0 and answers and node.name not in ACTS and not any(mark.endswith(".setter") for mark in marks):
            found.append((node.name, "property" in marks))
    return found


class Chapters(CountedEngine):
    """The workloads."""

    def __init__(self, setup: Setup, folder: str, device: RefusingDevice, worker: Worker | None) -> None:
        super().__init__(setup, folder, device, worker)
        self.actions = {chapter: getattr(self, chapter) for chapter, _model, _schedule in WORKLOADS}

    def ask_all(self, request: Request | None, thing: object, owner: str) -> None:
        """Every question of an object."""
        for name, is_property in questions(owner):
            self.attempt(request, self._question(thing, name, is_property))
            if request is not None and request.named:
                return

    def _question(self, thing: object, name: str, is_property: bool) -> Callable[[], object]:
        return lambda: getattr(thing, name) if is_property else getattr(thing, name)()

    # --- one request after the other

    def life(self) -> None:
        """Computed, shared, suspended, moved down and back, moved to another stream, ended in every way."""
        a = self.begin(self.text(1, 10))
        self.grow(a)
        self.on(a, self.own_rows)
        self.on(a, self.hold_view)
        for _token in range(3):
            self.grow(a, 1)
        self.suspend_now(a)
        b = self.begin(self.text(1, 7))
        self.grow(b)
        self.cached(self.text(2, 17))
        self.on(a, self.prefetch)
        self.resume_now(a)
        self.on(a, self.move_stream)
        self.grow(a, 3, commit=False)
        self.on(a, self.rewind)
        self.on(b, self.disagg)
        self.on(b, self.stop)
        self.on(b, self.plan)
        self.close_now(b)
        self.withdraw()
        if self.usable(a) and a is not None:
            self.attempt(None, lambda: self.manager.drop_cached_pages(0, [0, 1]))
        self.on(a, self.drop_handle)
        del a, b
        self.cached(self.text(1, 9))

    def pressure(self) -> None:
        """Every tier full of cached pages, held pages among them; what came first is used again."""
        first = self.begin(self.text(1, 13))
        self.grow(first)
        self.suspend_now(first)
        self.cached(self.text(2, 25), self.text(3, 25), self.text(4, 17))
        self.cached(self.text(2, 26))
        held = self.begin(self.text(3, 14), resume=False)
        if held is not None:
            self.attempt(held, held.cache.prefetch, 1)
            self.attempt(held, held.cache.prefetch, 0)
        self.resume_now(first)
        self.grow(first, 4)
        self.resume_now(held)
        self.close_now(held)
        self.close_now(first)

    def late(self) -> None:
        """A stream that runs late: others take its slots and its pages in its order."""
        a, b = self.begin(self.text(1, 14), stream=0), self.begin(self.text(2, 6), stream=1)
        self.grow(a)
        self.grow(b)
        self.hold(self.streams[0])
        self.grow(a, 2)
        self.suspend_now(a)
        c = self.begin(self.text(1, 12), stream=1)
        self.grow(c, 5)
        self.close_now(a)
        self.grow(b, 14)
        self.let_go()
        self.on(c, self.fork)
        self.close_now(b)
        self.cached(self.text(3, 20))
        self.close_now(c)
        if self._suspend_all():
            self._resize_level(0, self.setup.gpu + (2 << 20))
        d = self.begin(self.text(4, 33), stream=0)
        self.grow(d)
        self.close_now(d)
        if self._suspend_all():
            self._resize_level(0, self.setup.gpu)  # waits for the kernels of the one that has just ended

    def losses(self) -> None:
        """A file cannot be read: a request and a cached block lose their pages, by name."""
        first = self.begin(self.text(1, 13))
        self.grow(first)
        self.suspend_now(first)
        self.cached(self.text(2, 25), self.text(3, 25), self.text(4, 17))
        self.disturbed = True
        self.device.fail("read_file", 1, 2)
        self.resume_now(first)
        self.on(first, self.ask_loaded)
        self.close_now(first)
        self.device.fail("read_file", 1, 1)
        self.cached(self.text(2, 26), self.text(3, 26))

    def ask_loaded(self) -> None:
        request = self.pick(lambda r: not r.named)
        if request is not None:
            self.own.synchronize()
            self.attempt(request, lambda: request.cache.is_loaded)

    def branches(self) -> None:
        """Forks and beams, inside blocks too."""
        a = self.begin(self.text(1, 7))
        self.grow(a)
        self.on(a, self.fork)
        twin = self.open[-1] if self.open and self.open[-1] is not a else None
        if twin is not None and not twin.active:
            self.resume_now(twin)
        self.grow(twin, 3)
        self.on(a, self.widen)
        if self.usable(a) and a is not None and a.width > 1:
            self.suspend_now(a)
            self.resume_now(a)
            self.grow(a, 3, commit=False)
            self.on(a, self.converge)
        self.suspend_now(twin)
        self.on(twin, self.fork)
        self.close_now(a)
        self.close_now(twin)

    # --- several at once

    def batches(self) -> None:
        """Batch calls, rows of batch tables and steps, with a policy where pages are short."""
        a, b, c = self.begin(self.text(1, 7)), self.begin(self.text(2, 6)), self.begin(self.text(3, 5))
        for request in (a, b, c):
            self.grow(request)
            self.on(request, self.table)
            if request is not None and request.row >= 0:
                self.attempt(request, self.tables.row, request.cache)
        chosen = [r for r in (a, b) if r is not None and self.usable(r)]
        self._batch(chosen, 1)
        self.whole((a, b, c), 2, "commit")
        self.whole((a, b, c), 2, "ahead")
        self.ahead_of(a, 4, follow=True)
        self.ahead_of(b, 5, follow=False, confirm=False)
        self.suspend_now(c)
        self.on(b, self.resume)
        room = [r.cache for r in (a, b) if r is not None and self.usable(r)]
        if c is not None and c in self.open and not c.active and not c.named:
            stream = self.give_stream(c)
            if self.attempt(c, c.cache.resume, stream, SuspendCheapest(room)):
                c.active = True
            self._note_suspended()
        self.whole((a, b, c), 9, "commit", SuspendYoungest())
        self.whole((a, c), 1, "advance")
        self.commit_all(a)
        self.on(a, self.table)
        for request in (a, b, c):
            self.close_now(request)

    def _batch(self, chosen: list[Request], count: int) -> None:
        """Pages by one call, tokens by another, ahead and not."""
        chosen = [r for r in chosen if r.written == r.committed == r.history]
        if not chosen:
            return
        was = [r.committed for r in chosen]
        caches = [r.cache for r in chosen]
        self.of_several(lambda: self.attempt(None, resize_batch, caches, [r.written + count for r in chosen]))
        for r, before in zip(chosen, was, strict=True):
            self.take_over(r, before, 0)
        done = [r for r in chosen if r.capacity == r.written + count]
        for r in done:
            r.prompt = [*self.text(850 + r.number % 50, count), *r.prompt]
        self.attempt(None, slots_to_write, [r.cache for r in done], 0)
        self.attempt(None, slots_to_read, [r.cache for r in done], 0)
        self.attempt(None, self.tables.rows, [r.cache for r in done if r.row >= 0])
        tokens = [r.prompt[0] for r in done]
        self.of_several(lambda: self.attempt(None, commit_ahead_batch, [r.cache for r in done], tokens))
        ahead = [r.cache.num_committed_tokens for r in done]
        for r in done:
            self.step(r, count)
        for r, length in zip(done, ahead, strict=True):
            if length > r.committed:
                r.committed = length
                if not self._resize(r, None, r.written):
                    self.close_now(r)
        rest = [r for r in done if r in self.open and r.committed < r.written]
        had = [r.committed for r in rest]
        last = [r.texts[0].tokens[-1] for r in rest]
        self.of_several(lambda: self.attempt(None, commit_batch, [r.cache for r in rest], last))
        for r, length in zip(rest, had, strict=True):
            self.take_over(r, length, count)

    # --- the manager as a whole

    def sizes(self) -> None:
        """Every level larger and smaller, with pages on it; shares adjusted; everything dropped."""
        a = self.begin(self.text(1, 10))
        self.grow(a)
        self.cached(self.text(2, 17), self.text(3, 17))
        self.grow_and_shrink()
        self.resume_now(a)
        self.adjust()
        self.resume_now(a)
        for stream in self.streams:
            self.attempt(None, self.manager.forget_stream, stream)
        self.cached(self.text(2, 17))
        self.clear()

    def looks(self) -> None:
        """Every question, a match that is kept, and what events and statistics say."""
        self.cached(self.text(1, 14))
        a = self.begin(self.text(2, 10))
        self.grow(a)
        manager = self.manager
        prompt = self.text(1, 14)
        self.ask_all(None, manager, "KVCacheManager")
        match = self.attempt(None, manager.find_reuse, None, prompt, MatchLimits(max_tokens=9))
        if match is not None:
            self.ask_all(None, match, "ReuseMatch")
            self.attempt(None, match.get_gpu_page_indices, 0)
            self.cached(self.text(3, 9))
            made = self.attempt(None, lambda: manager.create_kv_cache(reuse_match=match))
            if made is not None:
                self.attempt(None, made.close)
        if self.usable(a) and a is not None:
            self.ask_all(a, a.cache, "KVCache")
            self._ask_of(a)
        self._ask_more()
        self.flush()
        self.attempt(None, self.tables.table, 0)
        self.attempt(None, self.tables.version, 0)
        self.close_now(a)

    def _ask_of(self, a: Request) -> None:
        cache = a.cache
        attention = self.memory[0].index
        of_group: list[Callable[[int], object]] = [
            cache.get_base_page_indices,
            cache.get_base_page_indices_version,
            cache.get_aggregated_page_indices,
            cache.get_gpu_page_indices,
            cache.get_scratch_desc,
        ]
        for call in of_group:
            self.attempt(a, call, attention)
        self.attempt(a, cache.prefill_end, 20)
        self.attempt(a, cache.supports_index_mode, 0)
        if self.ssm is not None:
            self.attempt(a, cache.get_ssm_block_base_index, self.ssm)
        self.attempt(a, cache.set_base_page_index_buf, 0, attention, array("i", [0]) * 9)

        def assign() -> None:
            cache.text_only = True
            cache.allow_seq_rebasing = False
            cache.enable_swa_scratch_reuse = False
            cache.capacity = a.capacity
            cache.history_length = a.history

        self.attempt(a, assign)
        self.attempt(a, cache.discard_pending_stats)
        with contextlib.suppress(ConfigError):
            assert cache.finish_event is None  # a name of the reference, which has no event to show here

    def _ask_more(self) -> None:
        manager = self.manager
        prompt = self.text(1, 14)
        for level in range(self.setup.tiers):
            self.attempt(None, manager.get_storage_statistics, level)
            self.attempt(None, manager.get_life_cycle_pool_group_indices, level)
            self.attempt(None, manager.get_quota, level)
            self.attempt(None, manager.get_and_reset_iteration_peak_block_stats, level)
        self.attempt(None, manager.probe_reuse, SCOPES[1], prompt)
        self.attempt(None, manager.explain_miss, None, [*prompt, 1, 2])
        key = self.attempt(None, manager.probe_first_new_block_key, None, [*prompt, 1, 2, 3])
        self.attempt(None, manager.probe_reuse_by_keys, None, [key or bytes(32)])
        self.attempt(None, manager.clamp_max_seq_len_for_mem, 1, 100)
        self.attempt(None, manager.check_invariants)
        of_request: list[Callable[[int], object]] = [
            manager.mark_stats_dirty,
            manager.mark_stats_excluded,
            manager.is_stats_excluded,
            manager.clear_stats_excluded,
            manager.clear_stats_dirty,
        ]
        for call in of_request:
            self.attempt(None, call, 1)
        self.attempt(None, manager.record_request_suspended)
        self.attempt(None, manager.record_request_resumed)
        self.attempt(None, manager.restart_hit_curve)
        self.attempt(None, manager.supports_index_mode, 0)
        if self.worker is not None:
            return
        self.attempt(None, manager.get_layer_group_id, 0)
        of_buffer: list[Callable[[int, str], object]] = [
            manager.get_mem_pool_base_address,
            manager.get_page_stride,
            manager.get_page_index_upper_bound,
            manager.get_page_index_scale,
            manager.get_page_index_converter,
        ]
        for of in of_buffer:
            self.attempt(None, of, 0, "role 0")
        self.attempt(None, manager.get_aggregated_pages, manager.all_buffer_ids[:1])
        self.attempt(None, page_table.page_table_of, manager)


# The chapters, each over the models whose pages it treats in ways of their own.
WORKLOADS: Final = (
    Workload("life", "full"),
    Workload("life", "full+window"),
    Workload("life", "hybrid"),
    Workload("life", "scratch"),
    Workload("life", "external"),
    Workload("pressure", "full"),
    Workload("pressure", "two pools"),
    Workload("pressure", "hybrid"),
    Workload("pressure", "external"),
    Workload("branches", "full+window"),
    Workload("branches", "hybrid"),
    Workload("batches", "full+window"),
    Workload("batches", "hybrid"),
    Workload("late", "full", "random"),
    Workload("late", "hybrid", "random"),
    Workload("losses", "full"),
    Workload("losses", "full+window", "random"),
    Workload("sizes", "full", "random"),
    Workload("sizes", "two pools"),
    Workload("sizes", "hybrid"),
    Workload("looks", "hybrid"),
)
