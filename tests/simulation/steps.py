"""The operations of a simulation with steps as one object, batch tables, and make-room policies.

Rule: a step is taken by requests that settle all that they computed. What a policy suspends, suspends in the model too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kv_cache_manager_v2 import KVCache, MakeRoom, PlainBatchTables, Shortage, SuspendCheapest, SuspendYoungest, slots_to_write
from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.ids import BAD_PAGE_INDEX, LayerGroupId
from tests.simulation import conduct
from tests.simulation.ahead import AheadWorld
from tests.simulation.calls import Calls
from tests.simulation.model import Token
from tests.simulation.scene import Live
from tests.simulation.setups import Setup

POLICIES = ("none", "youngest", "cheapest", "own")
ROWS = 4


class StepFailed(Exception):
    """What a block raises on purpose."""


class Own(MakeRoom):
    """An engine's policy, which suspends or closes what it likes, and resumes it at times."""

    def __init__(self, world: StepWorld, choose: Callable[[int], int]) -> None:
        self.world = world
        self.choose = choose  # a number below its argument

    def make_room(self, asking: KVCache, shortage: Shortage, candidates: Sequence[KVCache]) -> bool:
        world = self.world
        world.see_sizes()
        others = [live for live in world.live if live.active and live.cache is not asking and not live.cache.state.lost]
        if not others:
            return False
        idle = [live for live in world.live if not live.active and live.cache is not asking and live.number in world.started]
        ready = [live for live in idle if not live.cache.state.lost and not live.cache.state.counts_on]
        if ready and self.choose(2) == 0 and world.resume(ready[self.choose(len(ready))], 0, False) == "true":
            world.count("policy", "resumes")
        victim = others[self.choose(len(others))]
        if self.choose(4) == 0:
            world.close(victim)
        else:
            world.suspend(victim)
        return True


class StepWorld(AheadWorld):
    """An `AheadWorld` with steps."""

    def __init__(self, setup: Setup, calls: Calls | None = None) -> None:
        super().__init__(setup, calls)
        self.pad, self.offset, wide = ((-1, 0, False), (0, 1, False), (-5, 1 << 33, True))[setup.seed % 3]
        blocks = setup.longest // setup.size + 48
        self.tables = PlainBatchTables(self.manager, ROWS, blocks, None, self.pad, self.offset, wide)
        self.sizes: list[tuple[Live, int]] = []  # capacities that the step in progress gives

    # --- batch tables

    def table(self, live: Live) -> str:
        """Give the cache a row of the tables, or take it back."""
        if live.row >= 0:
            self.tables.remove(live.cache)
            live.row = -1
            return self.count("batch table", "remove")
        if self.tables.num_unused_rows == 0:
            return self.mistake(live, "no row", lambda: self.tables.add(live.cache), ConfigError)
        live.row = self.tables.add(live.cache)
        live.buffers = {key: buffer for key, buffer in live.buffers.items() if key[1] > 0}
        self.rows(live)
        return self.count("batch table", "add")

    def attach(self, live: Live, group: int, beam: int) -> str:
        if live.row >= 0 and beam == 0:
            buffer = np.zeros(live.model.blocks + 40, np.int32)
            return self.mistake(
                live, "two rows", lambda: live.cache.set_base_page_index_buf(0, LayerGroupId(group), buffer), ConfigError
            )
        return super().attach(live, group, beam)

    def rows(self, live: Live) -> None:
        super().rows(live)
        if live.row < 0:
            return
        assert self.tables.row(live.cache) == live.row
        for number, kind in enumerate(self.setup.kinds):
            group = LayerGroupId(number)
            cache = live.cache
            pages = [cache.get_ssm_block_base_index(group)] if kind.recurrent else cache.get_aggregated_page_indices(group)
            shown = [self.pad if page == BAD_PAGE_INDEX else page + self.offset for page in pages]
            entries = np.asarray(self.tables.table(group))[live.row].tolist()
            assert entries == shown + [self.pad] * (len(entries) - len(shown)), (
                f"life cycle {number}: the batch table shows {entries}"
            )

    # --- policies

    def policy(self, name: str, choose: Callable[[int], int]) -> MakeRoom | None:
        also = [live.cache for live in self.live if live.active and not live.cache.state.lost]
        if name == "youngest":
            return SuspendYoungest(also)
        if name == "cheapest":
            return SuspendCheapest(also)
        return Own(self, choose) if name == "own" else None

    def see_sizes(self) -> None:
        """Change the model of requests that have their pages for the step in progress."""
        for live, capacity in self.sizes:
            if live in self.live and live.cache.capacity == capacity != live.model.capacity:
                self.resized(live, capacity, live.model.history)

    def _note_suspended(self) -> None:
        """Change the model as a policy of the package has changed the requests."""
        self.see_sizes()
        for live in self.live:
            if live.active and not live.cache.is_active:
                self._may_take_back(live)
                live.model.committed = min(live.model.committed, live.model.history)
                live.model.status = "SUSPENDED"
                self.recount.suspended += 1
                live.buffers.clear()
                self.rows(live)
                self.count("policy", "suspends")

    def resume_asking(self, live: Live, stream: int, policy: MakeRoom) -> str:
        """`resume` with a policy."""
        if self._out_of_order(live, stream):
            return "out of order"
        first = live.number not in self.started
        tails = self.recount.tails(live.cache, live.model) if first else []
        failure, done = self.attempt(live, "resume asking", lambda: live.cache.resume(self.streams[stream], policy))
        self._note_suspended()
        if failure or not done:
            return failure or self.count("resume asking", "false")
        self.resumed(live, first, tails)
        return self.count("resume asking", "true", *self.positions(live))

    def resize_asking(self, live: Live, capacity: int, history: int, policy: MakeRoom) -> str:
        """`resize` with a policy."""
        if any(len(buffer) * self.setup.size < capacity for buffer in live.buffers.values()):
            return "short buffer"
        self._may_take_back(live)
        failure, done = self.attempt(live, "resize asking", lambda: live.cache.resize(capacity, history, policy))
        self._note_suspended()
        if failure or not done:
            return failure or self.count("resize asking", "false")
        self.resized(live, capacity, history)
        self.rows(live)
        return self.count("resize asking", "true", *self.positions(live))

    # --- steps

    def can_step(self, live: Live) -> bool:
        """Whether a step may take the request as it is: what others may take back would lose it in the middle."""
        model, state = live.model, live.cache.state
        plain = live.active and model.width == 1 and model.committing and not live.buffers
        return plain and not state.lost and not state.counts_on and model.committed <= model.history and conduct.settled(model)

    def step(
        self, lives: Sequence[Live], counts: Sequence[int], tokens: Sequence[list[Token]], end: str, policy: MakeRoom | None
    ) -> str:
        """A step of several requests. `end`: what it ends with: "commit", "ahead", "advance", or "fail"."""
        faces = [self.face(live) for live in lives]
        self.sizes = [(live, live.model.history + count) for live, count in zip(lives, counts, strict=True)]
        try:
            with self.manager.step([live.cache for live in lives], counts, make_room=policy) as step:
                self._note_suspended()
                taking = [lives[position] for position in step.positions]
                for number, live in enumerate(lives):
                    if live in taking:
                        assert live.model.capacity == self.sizes[number][1]
                        self.rows(live)
                    elif live.cache in step.short and live in self.live and live.active:
                        assert self.face(live) == faces[number], "a request that was short of pages has changed"
                self.sizes = []
                self._check_slots(taking)
                fresh = [tokens[position][: counts[position]] for position in step.positions]
                ahead = [
                    self._ahead(live, new) if end in ("ahead", "fail") else [] for live, new in zip(taking, fresh, strict=True)
                ]
                if end in ("ahead", "fail"):
                    step.commit_ahead(ahead)
                for live, new, promised in zip(taking, fresh, ahead, strict=True):
                    self.compute(live, [new])
                    self.promise(live, len(promised))
                if end == "commit":
                    step.commit(self._committed(taking))
                elif end == "advance":
                    step.advance()
                elif end == "fail":
                    raise StepFailed
        except StepFailed:
            for live in taking:
                self._may_take_back(live)
                live.model.committed = min(live.model.committed, live.model.history)
        for live in [live for live in taking if live in self.live]:
            if end == "advance" or (end == "ahead" and live.model.committed > live.model.history):
                self.resized(live, live.model.capacity, live.model.capacity if end == "advance" else live.model.committed)
            self.rows(live)
        for outcome, caches in (("short", step.short), ("suspended", step.suspended)):
            if caches:
                self.count("step", outcome)
        return self.count("step", end, len(taking), *[value for live in taking for value in self.positions(live)])

    def _check_slots(self, taking: Sequence[Live]) -> None:
        """Token slots are the pages that the rows show."""
        size = self.setup.size
        for number, kind in enumerate(self.setup.kinds):
            if kind.recurrent:
                continue
            expected = []
            for live in taking:
                row = list(live.cache.get_aggregated_page_indices(LayerGroupId(number)))
                for position in range(live.model.history, live.model.capacity):
                    page = row[position // size]
                    expected.append(BAD_PAGE_INDEX if page == BAD_PAGE_INDEX else page * size + position % size)
            assert list(slots_to_write([live.cache for live in taking], number).slots) == expected  # type: ignore[call-overload]

    def _ahead(self, live: Live, fresh: list[Token]) -> list[Token]:
        """What is committed ahead of a step that computes these tokens; nothing if what precedes them cannot be committed."""
        model = live.model
        if model.clean_run(0) < model.history - model.committed:
            return []
        return [*model.beams[0].tokens[model.committed : model.history], *fresh]

    def _committed(self, taking: Sequence[Live]) -> list[list[Token]]:
        """What the step commits; the model has it at once."""
        given: list[list[Token]] = []
        for live in taking:
            model = live.model
            count = conduct.committable(self.setup, model, 0, model.computed - model.committed)
            given.append(list(model.beams[0].tokens[model.committed : model.committed + count]))
            if count:
                self.library.commit(model.commit(0, count))
        return given
