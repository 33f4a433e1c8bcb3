"""The hunting engine: random operations over the public interface, every byte that a step may read compared.

Rule: it knows the README and the public interface alone. A byte that is wrong, an answer that contradicts the engine's own counts
or an error that nothing explains ends the hunt with `Found`, which names the seed and the operation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from kv_cache_manager_v2 import EventMirror, KVCache, KVCacheError
from tests.hunt.base import SCOPES, Found
from tests.hunt.batches import Batches
from tests.hunt.memory import Text
from tests.hunt.requests import Request
from tests.hunt.setups import Setup
from tests.support.drivers import RefusingDevice

WEIGHTS: Final = {
    "create": 16,
    "write": 46,
    "decode": 20,
    "commit": 26,
    "resume": 20,
    "suspend": 10,
    "close": 6,
    "advance": 6,
    "rewind": 4,
    "prefetch": 5,
    "stop": 5,
    "plan": 2,
    "withdraw": 2,
    "fork": 4,
    "widen": 3,
    "converge": 4,
    "move_stream": 3,
    "drop_handle": 2,
    "disagg": 2,
    "ask": 6,
    "statistics": 3,
    "own_rows": 3,
    "hold_view": 4,
    "batch": 6,
    "whole_step": 6,
    "ahead": 6,
    "table": 4,
    "ask_for_room": 4,
    "find": 2,
    "create_from_match": 2,
    "resize_level": 2,
    "adjust": 1,
    "clear": 1,
    "flush": 3,
    "disturb": 3,
    "check": 1,
    "settle": 2,
}


class Hunter(Batches):
    """One run: a manager from its construction to its end."""

    def __init__(self, setup: Setup, folder: str, refusing: RefusingDevice | None = None) -> None:
        super().__init__(setup, folder, refusing)
        names = [name for name in WEIGHTS if self._usable(name)]
        self.choices = names
        self.weights = list(itertools.accumulate(WEIGHTS[name] for name in names))
        self.actions: dict[str, Callable[[], None]] = {name: getattr(self, name) for name in names}

    def _usable(self, name: str) -> bool:
        setup = self.setup
        return not (
            (name == "disturb" and not setup.faults)
            or (name == "hold_view" and not setup.views)
            or (name == "flush" and not setup.events)
            or (name in ("prefetch",) and setup.tiers == 1)
        )

    # --- running

    def run(self, operations: int) -> None:
        """So many operations, then the end. Raises Found."""
        self.follow(self._choose(operations))

    def _choose(self, operations: int) -> Iterator[str]:
        while self.operations < operations:
            yield from self.rng.choices(self.choices, cum_weights=self.weights, k=64)

    def follow(self, script: Iterable[str]) -> None:
        """The operations of these names, then the end. Raises Found."""
        name = "start"
        try:
            for name in script:
                if self.armed and self.refusing is None and self.operations >= self.heal_at:
                    self.heal()
                if self.held:
                    self.let_go(self.operations)
                self.actions[name]()
                if self.doomed:
                    self.destroy_doomed()
            name = "end"
            self.end()
        except Found as found:
            raise Found(f"{self.setup.describe()}, operation {self.operations} ({name}): {found}") from found
        except (KVCacheError, AssertionError, ArithmeticError, LookupError, TypeError, BufferError, OSError) as error:
            text = f"{self.setup.describe()}, operation {self.operations} ({name}): {type(error).__name__}: {error}"
            raise Found(text) from error
        finally:
            self.logger.handlers, self.logger.propagate = self.logger_before

    # --- the end

    def end(self) -> None:
        """Close, judge, account for every slot, serve again, give everything back."""
        self.heal()
        self.let_go()
        self.holding = False
        for request in list(self.open):
            if self.rng.random() < 0.5:
                self._close(request)
        self.own.synchronize()
        for request in list(self.open):  # those that slept through it all still have their bytes
            if not request.active and not request.named:
                self._resume(request)
            self._close(request)
        self.plans = []
        self.collect()
        self.settled()
        self.destroy_doomed()
        self.judge_ended(True)
        self.manager.check_invariants()
        self.device.check_invariants()
        self.serve_again()
        self.settled()
        self.destroy_doomed()
        self.judge_ended(True)
        if self.listener is not None:
            self.flush()
            if self.mirror_of_now() != {name: block.levels for name, block in self.mirror.blocks.items()}:
                raise Found("the mirror of the events differs from a snapshot")
        self.manager.clear_reusable_blocks()
        self.settled()
        self.manager.check_invariants()
        self.expect_all_free()
        if self.listener is not None:
            self.flush()
            if self.mirror.blocks:
                raise Found(f"the mirror keeps {len(self.mirror.blocks)} blocks of an empty cache")
        self.count_movement()
        self.shut_down()
        for stream in self.streams:
            self.own.destroy_stream(stream)
        self.own.synchronize()
        self.close_device()

    def close_device(self) -> None:
        """Nothing is left on the device."""
        self.device.close()

    def shut_down(self) -> None:
        """Once; where that is refused, again after the fault is healed."""
        if self.refusing is not None:
            self.refusing.begin_end()
            self.armed = True
        for _i in range(3):
            try:
                self.manager.shutdown()
            except self.tolerated as error:
                if not self.armed:
                    raise Found(f"shutdown() fails without a fault: {type(error).__name__}: {error}") from error
                self.outcomes["shutdown refused"] += 1
                self.heal()
            else:
                return
        raise Found("shutdown() never succeeds")

    def count_movement(self) -> None:
        movement = self.manager.movement
        for source in range(self.setup.tiers):
            self.outcomes[f"pages dropped from level {source}"] += movement.pages_dropped(source)
            for destination in range(self.setup.tiers):
                self.outcomes[f"pages moved {source}->{destination}"] += movement.pages_moved(source, destination)
        self.outcomes["pages adopted"] += sum(movement.adopted)
        self.outcomes["pages taken over"] += sum(movement.taken_over)
        self.outcomes["pages returned to clean copies"] += sum(map(sum, movement.returned))
        self.outcomes["pages lost"] += sum(movement.lost)

    def mirror_of_now(self) -> dict[object, dict[int, int]]:
        assert self.listener is not None
        return {name: block.levels for name, block in EventMirror(self.listener.snapshot_events()).blocks.items()}

    def settled(self) -> None:
        """Nothing is on its way any more, and the manager has noticed."""
        for _i in range(3):
            self.own.synchronize()
            self.manager.probe_reuse(None, [1])

    def expect_all_free(self) -> None:
        for level in range(self.setup.tiers):
            for group, row in enumerate(self.manager.get_storage_statistics(level)):
                if row.free != row.total:
                    raise Found(f"of level {level}, pool group {group} only {row.free} of {row.total} slots are free at the end")

    def serve_again(self) -> None:
        """Requests one after the other, on every tier, each read back."""
        rng = self.rng
        length = 5 * self.tpb + 1
        prompts: list[list[int]] = []
        for turn in range(24):
            fresh = turn < 12
            prompt = self._tokens(length) if fresh else prompts[turn - 12]
            if fresh:
                prompts.append(prompt)
            number = next(self.numbers)
            cache = self.manager.create_kv_cache(SCOPES[0], prompt, number)
            text = Text(len(self.memory), 1000)
            text.extend(prompt[: cache.num_committed_tokens])
            request = Request(cache, number, 0, text)
            request.prompt = prompt[cache.num_committed_tokens :]
            self.open.append(request)
            stream = self.give_stream(request)
            self._expect_room(cache, cache.resume, stream)
            request.active = True
            self.step(request, 0)
            if request.prompt:
                history = request.written if self.setup.scratch_rewind is not None else None
                self._expect_room(cache, cache.resize, length, history)
                request.capacity = length
                count = len(request.prompt)
                self.step(request, count)
                cache.commit(request.texts[0].tokens[request.committed :])
                request.committed = request.history = length
                self.step(request, 0)
            if rng.random() < 0.5:
                cache.suspend()
                request.active = False
                self._expect_room(cache, cache.resume, stream)
                request.active = True
                self.step(request, 0)
            self._close(request)

    def _expect_room(self, cache: KVCache, call: Callable[..., bool], *arguments: object) -> None:
        """A request that is alone gets what it asks for, once files that are still written are done."""
        for _i in range(4):
            if call(*arguments):
                return
            self.settled()
        raise Found(f"a lone request is refused after all is healed: {cache.last_shortage}")


def hunt(setup: Setup, operations: int, folder: str) -> Hunter:
    hunter = Hunter(setup, folder)
    hunter.run(operations)
    return hunter
