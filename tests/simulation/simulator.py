"""A seeded run: which operation comes next, and with which arguments.

Rule: one seed decides everything, the configuration, the device's schedule and every choice; so it reproduces any run. On a failure
the seed, the number of the operation and the last operations are part of the message.
"""

from __future__ import annotations

import re
import tempfile
import warnings
import zlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from kv_cache_manager_v2 import MakeRoom
from tests.simulation import conduct
from tests.simulation.ahead import can_commit_ahead
from tests.simulation.calls import Calls
from tests.simulation.mistakes import active_mistakes, manager_mistakes, suspended_mistakes
from tests.simulation.model import Token
from tests.simulation.scene import Live
from tests.simulation.setups import Setup, draw
from tests.simulation.steps import POLICIES, StepWorld

MOST_FORKS: Final = 64  # more than any setup has slots for states
_DIGEST: Final = re.compile(r"b'[^']*'")


@dataclass
class Report:
    """What a run did."""

    seed: int
    operations: int
    counts: Counter[tuple[str, str]]
    trace: int  # checksum of all operations, their outcomes and what they left, in order

    def checksum(self) -> int:
        """The trace, and how often everything came up, in one number."""
        return zlib.crc32(repr(sorted(self.counts.items())).encode(), self.trace)


class SimulationError(AssertionError):
    """A run went wrong; says how to see it again."""


class Simulation:
    """One run."""

    def __init__(self, setup: Setup, calls: Calls | None = None) -> None:
        self.setup = setup
        self.random = Random(setup.seed ^ 0x5EED)
        self.world = StepWorld(setup, calls)
        self.number = 0  # of the operation
        self.last: deque[str] = deque(maxlen=24)
        self.prompts: list[tuple[int, list[Token]]] = [(0, [setup.alphabet[0]])]
        self.most_open = 1 + self.random.randrange(2, 7)

    # --- the loop

    def run(self, operations: int) -> Report:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)  # handles are dropped on purpose
                for number in range(operations):
                    self.number = number
                    self.one()
                    if self.world.engine.errors:
                        self.world.after()
                    if number % 64 == 63:
                        self.world.check()
                    if number % 256 == 255:
                        self.world.check_bytes()
                        if self.random.random() < 0.5:
                            self.drain()
                self.world.finish()
        except Exception as error:
            lines = "\n  ".join(self.last)
            text = (
                f"seed {self.setup.seed}, operation {self.number}: {type(error).__name__}: {error}\n"
                f"setup: {self.setup.describe()}\nlast operations:\n  {lines}"
            )
            raise SimulationError(text) from error
        self.outcomes()
        return Report(self.setup.seed, operations, self.world.counts, self.world.trace)

    def one(self) -> None:
        world, random = self.world, self.random
        if not world.live or (len(world.live) < self.most_open and random.random() < 0.15):
            self.create()
            return
        pick = random.random()
        if pick < (0.1 if world.inside.shared.layout.num_pool_groups > 1 else 0.06):
            self.around()
            return
        live = random.choice(world.live)
        if live.lost:
            self.on_lost(live)
        elif live.active:
            self.on_active(live)
        else:
            self.on_suspended(live)

    def note(self, text: str, outcome: str) -> None:
        self.last.append(f"{self.number}: {_DIGEST.sub('D', text)} -> {outcome}")

    def check(self) -> bool:
        """Whether to compare the whole state when a call says that it changed nothing."""
        return self.random.random() < 0.25

    # --- choices

    def tokens(self, count: int) -> list[Token]:
        alphabet = self.setup.alphabet
        return [alphabet[0] if self.random.random() < 0.6 else self.random.choice(alphabet) for _position in range(count)]

    def prompt(self) -> tuple[int, list[Token]]:
        """Often one that shares a prefix with an earlier one."""
        random = self.random
        if random.random() < 0.75:
            scope, tokens = random.choice(self.prompts)
            kind = random.random()
            if kind < 0.15:
                tokens = tokens[: random.randrange(len(tokens) + 1)]
            elif kind < 0.35:
                tokens = tokens[: random.randrange(len(tokens) + 1)] + self.tokens(random.randrange(1, 2 * self.setup.size + 2))
            else:
                tokens = tokens + self.tokens(random.randrange(0, self.setup.size + 2))
        else:
            scope = random.randrange(self.setup.num_scopes)
            tokens = self.tokens(random.randrange(0, self.setup.longest))
        return scope, tokens[: self.setup.longest]

    def remember(self, live: Live) -> None:
        tokens = live.model.beams[0].tokens[: live.model.committed]
        if tokens and self.random.random() < 0.8:
            self.prompts.append((live.model.scope, tokens))
            if len(self.prompts) > 8:
                del self.prompts[self.random.randrange(len(self.prompts))]

    # --- operations

    def create(self) -> None:
        scope, prompt = self.prompt()
        priority = self.random.randrange(101) if self.random.random() < 0.15 else -1
        outcome = self.world.create(scope, prompt, priority, self.random.random() < 0.3)
        self.note(f"create {self.world.live[-1].number} scope {scope} prompt {prompt} priority {priority}", outcome)

    def around(self) -> None:
        """Operations on the manager."""
        world, random = self.world, self.random
        pick = random.random()
        if pick < 0.3:
            scope, prompt = self.prompt()
            self.note(f"probe scope {scope} {prompt}", world.probe(scope, prompt))
        elif pick < 0.45 and world.plans:
            number, forget = random.randrange(len(world.plans)), random.random() < 0.3
            self.note(f"drop plan {number}", world.drop_plan(number, forget))
        elif pick < 0.65 and self.setup.faults:
            self.fault()
        elif pick < 0.7:
            self.note("illegal call", self.random.choice(manager_mistakes(world))())
        elif pick < 0.74 and len(world.live) < 4:
            for live in list(world.live):
                self.close(live)
            self.note("clear", world.clear())
        else:
            self.resize_levels()

    def resize_levels(self) -> None:
        """Quotas and shares may change while all are suspended."""
        world, random = self.world, self.random
        for live in list(world.live):
            if live.active and not live.lost:
                self.note(f"suspend {live.number}", world.suspend(live))
            if live.lost:
                self.close(live)
        if random.random() < (0.8 if world.inside.shared.layout.num_pool_groups > 1 else 0.1):
            self.note("adjust", world.adjust(True))
            return
        level = random.randrange(len(world.quotas))
        quota = max(1, int(world.quotas[level] * random.choice((0.3, 0.6, 0.8, 1.0, 1.0, 1.5))))
        best = random.random() < 0.3
        self.note(f"quota of level {level}: {quota} best efforts {best}", world.quota(level, quota, best, True))

    def fault(self) -> None:
        world, random = self.world, self.random
        if world.armed and random.random() < 0.5:
            self.note("heal", world.heal())
            return
        call, effect = random.choice(
            (
                ("read_file", "error"),
                ("read_file", "short"),
                ("read_file", "hang"),
                ("write_file", "error"),
                ("write_file", "short"),
                ("write_file", "hang"),
                ("copy", "error"),
                ("copy_batch", "error"),
                ("create_chunk", "error"),
            )
        )
        nth = random.randrange(1, 4)
        times = random.randrange(1, 7) if call.endswith("_file") else 1
        self.note(f"fault {call} {effect} {nth} {times}", world.fault(call, nth, times, effect))

    def close(self, live: Live) -> None:
        self.remember(live)
        self.note(f"close {live.number}", self.world.close(live))

    def drain(self) -> None:
        for live in list(self.world.live):
            if self.random.random() < 0.7:
                self.close(live)

    def on_lost(self, live: Live) -> None:
        """Every call but close says so."""
        if self.random.random() < 0.5:
            self.close(live)
        elif live.active:
            self.note(f"resize lost {live.number}", self.world.resize(live, live.model.capacity, live.model.history, False))
        else:
            self.note(f"prefetch lost {live.number}", self.world.prefetch(live, 0, False))

    def on_suspended(self, live: Live) -> None:
        world, random = self.world, self.random
        pick = random.random()
        if pick < 0.62:
            stream = random.randrange(self.setup.num_streams)
            if random.random() < 0.15 and not self.setup.faults:
                self.asking(live, lambda policy: world.resume_asking(live, stream, policy))
            else:
                self.note(f"resume {live.number} on {stream}", world.resume(live, stream, self.check()))
        elif pick < 0.72:
            level = random.randrange(len(world.quotas))
            self.note(f"prefetch {live.number} to {level}", world.prefetch(live, level, self.check()))
        elif pick < 0.78 and len(world.live) < self.most_open + 2 and conduct.settled(live.model):
            self.fork(live)
        elif pick < 0.81:
            self.note(f"stop {live.number}", world.stop(live))
        elif pick < 0.84:
            self.plan(live)
        elif pick < 0.88:
            self.note(f"mistake {live.number}", self.random.choice(suspended_mistakes(world, live))())
        elif pick < 0.9:
            self.note(f"stream {live.number}", world.change_stream(live, random.randrange(self.setup.num_streams)))
        elif pick < 0.98:
            self.close(live)
        else:
            self.remember(live)
            self.note(f"drop handle {live.number}", world.drop_handle(live))

    def on_active(self, live: Live) -> None:
        world, random, model = self.world, self.random, live.model
        pick = random.random()
        if pick < 0.02:
            self.batch_step()
        elif pick < 0.1:
            self.whole_step()
        elif pick < 0.5:
            self.step(live)
        elif pick < 0.66:
            self.commit(live)
        elif pick < 0.72:
            self.resize(live)
        elif pick < 0.80:
            self.note(f"suspend {live.number}", world.suspend(live))
        elif pick < 0.83:
            self.widen(live)
        elif pick < 0.86:
            group = random.randrange(len(self.setup.kinds))
            beam = random.randrange(model.width)
            if live.buffers and random.random() < 0.5:
                self.note(f"index buffer {live.number}", world.attach(live, *random.choice(list(live.buffers))))
            elif random.random() < 0.4:
                self.note(f"batch table {live.number}", world.table(live))
            elif not self.setup.kinds[group].recurrent:
                self.note(f"index buffer {live.number}", world.attach(live, group, beam))
        elif pick < 0.88 and len(world.live) < self.most_open + 2 and conduct.settled(live.model):
            self.fork(live)
        elif pick < 0.90:
            self.note(f"stop {live.number}", world.stop(live))
        elif pick < 0.92:
            self.plan(live)
        elif pick < 0.95:
            self.note(f"mistake {live.number}", self.random.choice(active_mistakes(world, live))())
        elif pick < 0.97:
            self.note(f"stream {live.number}", world.change_stream(live, random.randrange(self.setup.num_streams)))
        elif pick < 0.98:
            self.next_turn(live)
        elif pick < 0.995:
            self.close(live)
        else:
            self.remember(live)
            self.note(f"drop handle {live.number}", world.drop_handle(live))

    def plan(self, live: Live) -> None:
        if live.model.committing:
            self.note(f"stop {live.number}", self.world.stop(live))
        if not live.lost:
            self.note(f"plan {live.number}", self.world.plan(live))

    def next_turn(self, live: Live) -> None:
        """The end of a turn: what only the next one needs is planned to be dropped, and is as soon as that one has come."""
        world = self.world
        self.plan(live)
        if live.lost or not world.plans:
            return
        self.close(live)
        scope, tokens = live.model.scope, live.model.beams[0].tokens[: live.model.committed]
        if self.random.random() < 0.5:
            self.note(f"next turn {world.created}", world.create(scope, tokens + self.tokens(2)))
        self.note("drop plan -1", world.drop_plan(len(world.plans) - 1, self.random.random() < 0.3))

    # --- lengths and tokens

    def step(self, live: Live) -> None:
        """Settle what was computed, grow, compute, and often commit."""
        random, model = self.random, live.model
        if model.ended:
            self.close(live)
            return
        grow = random.randrange(1, 2 * self.setup.size + 2) if random.random() < 0.6 else 1
        if self.setup.scratch and random.random() < 0.5:
            grow = random.randrange(1, 6 * self.setup.size + 12)  # further than the windows reach
        history = model.computed if random.random() < 0.8 else self.history(live)
        wanted = conduct.step(self.setup, model, grow, history)
        if wanted is None:
            return
        capacity, history = wanted
        if capacity > self.setup.longest + random.randrange(3):
            self.close(live)
            return
        outcome = self.world.resize(live, capacity, history, self.check())
        self.note(f"step: resize {live.number} to {capacity}, {history}", outcome)
        if outcome != "true":
            pick = random.random()
            if pick < 0.4:
                self.relieve(live)
            elif pick < 0.55 and not (self.setup.faults or self.setup.scratch or live.lost):
                self.asking(live, lambda policy: self.world.resize_asking(live, capacity, history, policy))
            return
        if can_commit_ahead(self.setup, model) and random.random() < 0.2:
            fresh = self.tokens(model.capacity - conduct.first_written(model))
            self.note(f"commit ahead {live.number} {fresh}", self.world.commit_ahead(live, fresh))
            return
        self.compute(live)
        if random.random() < 0.7:
            self.commit(live)

    def fork(self, live: Live) -> None:
        """Now and then so many forks that no slot is left for another state."""
        world = self.world
        if not live.model.recurrent or self.random.random() > 0.2:
            self.note(f"fork {live.number}", world.fork(live, self.check()))
            return
        before = len(world.live)
        for _fork in range(MOST_FORKS):
            outcome = world.fork(live, self.check())
            self.note(f"fork {live.number}", outcome)
            if outcome not in ("active", "suspended"):
                break
        for twin in world.live[before:]:
            self.close(twin)

    def asking(self, live: Live, call: Callable[[MakeRoom], str]) -> None:
        """A call with a make-room policy."""
        name = self.random.choice(POLICIES[1:])
        policy = self.world.policy(name, self.random.randrange)
        assert policy is not None
        self.note(f"asking {live.number}, {name}", call(policy))

    def whole_step(self) -> None:
        """A step as one object; a failing device would leave it half done."""
        world, random = self.world, self.random
        lives = [live for live in world.live if world.can_step(live)]
        if self.setup.faults or self.setup.scratch or not lives:
            return
        random.shuffle(lives)
        counts = [random.choice((0, 1, 1, 2, self.setup.size + 1)) for _live in lives]
        tokens = [self.tokens(count) for count in counts]
        end, name = random.choice(("commit", "commit", "ahead", "advance", "fail")), random.choice(POLICIES)
        outcome = world.step(lives, counts, tokens, end, world.policy(name, random.randrange))
        self.note(f"step of {[live.number for live in lives]} by {counts}, {name}, {tokens}", outcome)

    def relieve(self, live: Live) -> None:
        """As a scheduler does when pages are short: suspend the newest other request, or end this one."""
        others = [other for other in self.world.live if other.active and other is not live and not other.lost]
        if others:
            self.note(f"suspend {others[-1].number}", self.world.suspend(others[-1]))
        elif not live.lost:
            self.close(live)

    def batch_step(self) -> None:
        """Only of requests of one beam that commit as they go; a failing device would leave a batch half done."""
        world, random = self.world, self.random
        lives = [
            live
            for live in world.live
            if live.active and live.model.width == 1 and live.model.committing and not live.lost and not live.buffers
        ]
        if self.setup.faults or self.setup.config.commit_min_snapshot or self.setup.scratch or not lives:
            return
        grow = [random.randrange(1, 3) for _live in lives]
        outcome = world.batch_step(lives, grow, [self.tokens(2) for _live in lives])
        self.note(f"batch step of {[live.number for live in lives]} by {grow}", outcome)

    def history(self, live: Live) -> int:
        """A history length that the engine may declare: up to what it has computed."""
        return self.random.randrange(live.model.history, live.model.computed + 1)

    def compute(self, live: Live) -> None:
        model = live.model
        count = model.capacity - conduct.first_written(model)
        fresh = [self.tokens(count)]
        for _beam in range(model.width - 1):
            fresh.append(list(fresh[0]) if self.random.random() < 0.4 else self.tokens(count))
        self.note(f"compute {live.number} {fresh}", self.world.compute(live, fresh))

    def resize(self, live: Live) -> None:
        random, model = self.random, live.model
        history = self.history(live)
        capacity = random.choice((model.capacity, history, history + random.randrange(2 * self.setup.size + 1)))
        if random.random() < 0.05:
            capacity = history + self.setup.size * (self.setup.gpu_slots + random.randrange(30))  # far too much
        wanted = conduct.lengths(self.setup, model, capacity, history)
        if wanted is not None:
            capacity, history = wanted
            if random.random() < 0.2 and not self.setup.faults and not self.setup.scratch:
                self.asking(live, lambda policy: self.world.resize_asking(live, capacity, history, policy))
                return
            outcome = self.world.resize(live, capacity, history, self.check())
            self.note(f"resize {live.number} to {capacity}, {history}", outcome)

    def commit(self, live: Live) -> None:
        random, model = self.random, live.model
        beam = random.randrange(model.width)
        whole = model.computed - model.committed
        want = whole if random.random() < 0.6 else random.randrange(whole + 1)
        count = conduct.committable(self.setup, model, beam, want)
        if count == 0:
            return
        is_end = random.random() < 0.06 and (not model.recurrent or model.committed + count == model.computed)
        outcome = self.world.commit(live, beam, count, is_end)
        self.note(f"commit {live.number} {count} of beam {beam} end {is_end}", outcome)

    def widen(self, live: Live) -> None:
        random, model = self.random, live.model
        if model.ended or live.cache.has_scratch_slots or not conduct.settled(model):
            return
        width = random.randrange(1, 4)
        if width != model.width:
            self.note(f"width {live.number} to {width}", self.world.set_width(live, width, self.check()))

    # --- what came of it

    def outcomes(self) -> None:
        """Counts that only the manager's own counters know."""
        counts, movement = self.world.counts, self.world.manager.movement
        tiers = self.setup.tiers
        names = {"g": "GPU", "h": "host", "d": "disk"}
        for source, from_tier in enumerate(tiers):
            counts["drop", names[from_tier]] += movement.pages_dropped(source)
            for target, to_tier in enumerate(tiers):
                if source != target:
                    way = "offload" if source < target else "onload"
                    counts[way, f"{names[from_tier]} to {names[to_tier]}"] += movement.pages_moved(source, target)
        counts["fault", "page lost"] += sum(movement.lost)
        counts["commit", "adoption"] += sum(movement.adopted)
        counts["commit", "slot take-over"] += sum(movement.taken_over)
        counts["evict", "returned to a clean copy"] += sum(map(sum, movement.returned))
        counts["commit", "partial sibling superseded"] += self.world.inside.tree.num_superseded


def simulate(
    seed: int, operations: int, shape: str | None = None, faults: bool | None = None, calls: Calls | None = None
) -> Report:
    """Run one seed; raises SimulationError if anything is not as it should be."""
    with tempfile.TemporaryDirectory(prefix="kvcm-simulation-") as path:
        return Simulation(draw(seed, path, shape, faults), calls).run(operations)
