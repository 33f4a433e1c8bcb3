"""The manager as a state machine: short, shrinking sequences of operations on the scene of the simulation.

Where the seeded simulation goes far, this one goes small: what it finds is cut down to the few operations that matter. Every rule
checks its own outcome against the model; after every step all structures are checked, and at the end every byte.
"""

from __future__ import annotations

import os
import tempfile
import warnings

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from tests.simulation import conduct
from tests.simulation.ahead import can_commit_ahead
from tests.simulation.model import Token
from tests.simulation.scene import Live
from tests.simulation.setups import SHAPES, draw
from tests.simulation.steps import POLICIES, StepWorld

NIGHTLY = os.environ.get("KVCM_HYPOTHESIS") == "nightly"
few = st.integers(0, 3)
small = st.integers(0, 9)
yes = st.booleans()
letters = st.lists(st.integers(0, 2), max_size=12)


class Manager(RuleBasedStateMachine):
    """Requests are picked by a number modulo how many there are, so that no rule ever has to be given up for want of one."""

    world: StepWorld

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="kvcm-stateful-")

    @initialize(shape=st.sampled_from(SHAPES), seed=st.integers(0, 63))
    def start(self, shape: str, seed: int) -> None:
        self.world = StepWorld(draw(seed, self.folder.name, shape, faults=False))

    # --- picking

    def tokens(self, numbers: list[int], count: int | None = None) -> list[Token]:
        """Tokens of the alphabet, as many as asked for."""
        alphabet = self.world.setup.alphabet
        if count is not None:
            numbers = [*numbers[:count], *[0] * (count - len(numbers))]
        return [alphabet[number % len(alphabet)] for number in numbers]

    def pick(self, number: int, active: bool | None = None) -> Live | None:
        found = [live for live in self.world.live if active is None or live.active == active]
        return found[number % len(found)] if found else None

    def stream(self, number: int) -> int:
        return number % self.world.setup.num_streams

    def active(self) -> bool:
        return any(live.active for live in self.world.live)

    def suspended(self) -> bool:
        return any(not live.active for live in self.world.live)

    # --- requests

    @rule(scope=few, numbers=letters)
    def create(self, scope: int, numbers: list[int]) -> None:
        if len(self.world.live) < 6:
            self.world.create(scope % self.world.setup.num_scopes, self.tokens(numbers))

    @rule(which=few, cut=small, numbers=letters)
    def create_like(self, which: int, cut: int, numbers: list[int]) -> None:
        """A prompt that begins like another request's tokens."""
        other = self.pick(which)
        if other is not None and len(self.world.live) < 6:
            tokens = other.model.beams[0].tokens
            self.world.create(other.model.scope, [*tokens[: len(tokens) - cut], *self.tokens(numbers[:4])])

    @rule(scope=few, numbers=letters)
    def probe(self, scope: int, numbers: list[int]) -> None:
        self.world.probe(scope % self.world.setup.num_scopes, self.tokens(numbers))

    @precondition(suspended)
    @rule(which=few, stream=few)
    def resume(self, which: int, stream: int) -> None:
        live = self.pick(which, active=False)
        assert live is not None
        self.world.resume(live, self.stream(stream), check=True)

    @precondition(active)
    @rule(which=few, grow=small, numbers=letters, end=yes)
    def step(self, which: int, grow: int, numbers: list[int], end: bool) -> None:
        """Settle, grow, compute, commit."""
        live = self.pick(which, active=True)
        assert live is not None
        model, setup = live.model, self.world.setup
        wanted = conduct.step(setup, model, 1 + grow, model.computed)
        if wanted is None or wanted[0] > setup.longest or self.world.resize(live, *wanted, check=True) != "true":
            return
        self.compute(live, numbers)
        count = conduct.committable(setup, model, 0, model.computed)
        if count:
            at_end = not model.recurrent or model.committed + count == model.computed
            self.world.commit(live, 0, count, end and at_end and numbers[:1] == [2])

    @precondition(active)
    @rule(which=few, capacity=small, history=small, numbers=letters, compute=yes)
    def resize(self, which: int, capacity: int, history: int, numbers: list[int], compute: bool) -> None:
        """Draft tokens come and go; history moves by itself."""
        live = self.pick(which, active=True)
        assert live is not None
        model = live.model
        wanted = conduct.lengths(self.world.setup, model, model.history + history + capacity, model.history + history)
        if wanted is not None and self.world.resize(live, *wanted, check=True) == "true" and compute:
            self.compute(live, numbers)

    @precondition(active)
    @rule(which=few, grow=small, numbers=letters)
    def step_ahead(self, which: int, grow: int, numbers: list[int]) -> None:
        """Settle, grow, commit ahead, compute."""
        live = self.pick(which, active=True)
        assert live is not None
        model, setup = live.model, self.world.setup
        wanted = conduct.step(setup, model, 1 + grow, model.computed)
        if wanted is None or wanted[0] > setup.longest or self.world.resize(live, *wanted, check=True) != "true":
            return
        if can_commit_ahead(setup, model):
            self.world.commit_ahead(live, self.tokens(numbers, model.capacity - conduct.first_written(model)))

    @precondition(active)
    @rule(
        counts=letters,
        numbers=letters,
        end=st.sampled_from(("commit", "ahead", "advance", "fail")),
        policy=st.sampled_from(POLICIES),
    )
    def whole_step(self, counts: list[int], numbers: list[int], end: str, policy: str) -> None:
        """A step of all requests as one object."""
        world = self.world
        lives = [live for live in world.live if world.can_step(live)]
        if lives and not world.setup.scratch:
            counts = [*counts, *[1] * len(lives)][: len(lives)]
            tokens = [self.tokens(numbers, count) for count in counts]
            world.step(lives, counts, tokens, end, world.policy(policy, lambda below: len(numbers) % below))

    @precondition(active)
    @rule(which=few)
    def table(self, which: int) -> None:
        live = self.pick(which, active=True)
        assert live is not None
        self.world.table(live)

    def compute(self, live: Live, numbers: list[int]) -> None:
        count = live.model.capacity - conduct.first_written(live.model)
        turned = numbers[1:] + numbers[:1]
        fresh = [self.tokens(numbers if beam % 2 == 0 else turned, count) for beam in range(live.model.width)]
        self.world.compute(live, fresh)

    @precondition(active)
    @rule(which=few, beam=few, count=small)
    def commit(self, which: int, beam: int, count: int) -> None:
        live = self.pick(which, active=True)
        assert live is not None
        beam %= live.model.width
        count = conduct.committable(self.world.setup, live.model, beam, 1 + count)
        if count:
            self.world.commit(live, beam, count, is_end=False)

    @rule(which=few, plan=yes)
    def stop_committing(self, which: int, plan: bool) -> None:
        live = self.pick(which)
        if live is not None:
            self.world.stop(live)
            if plan:
                self.world.plan(live)

    @precondition(active)
    @rule(which=few)
    def suspend(self, which: int) -> None:
        live = self.pick(which, active=True)
        assert live is not None
        self.world.suspend(live)

    @precondition(suspended)
    @rule(which=few, level=few)
    def prefetch(self, which: int, level: int) -> None:
        live = self.pick(which, active=False)
        assert live is not None
        self.world.prefetch(live, level % len(self.world.quotas), check=True)

    @precondition(active)
    @rule(which=few, width=st.integers(1, 3))
    def beam_width(self, which: int, width: int) -> None:
        live = self.pick(which, active=True)
        assert live is not None
        ready = conduct.settled(live.model) and not live.model.ended and not live.cache.has_scratch_slots
        if width != live.model.width and ready:
            self.world.set_width(live, width, check=True)

    @rule(which=few)
    def fork(self, which: int) -> None:
        live = self.pick(which)
        if live is not None and conduct.settled(live.model) and len(self.world.live) < 6:
            self.world.fork(live, check=True)

    @rule(which=few, stream=few)
    def change_stream(self, which: int, stream: int) -> None:
        live = self.pick(which)
        if live is not None:
            self.world.change_stream(live, self.stream(stream))

    @rule(which=few)
    def close(self, which: int) -> None:
        live = self.pick(which)
        if live is not None:
            self.world.close(live)

    @rule(which=few)
    def drop_handle(self, which: int) -> None:
        live = self.pick(which)
        if live is not None:
            self.world.drop_handle(live)

    # --- the manager

    @precondition(lambda self: self.world.plans)
    @rule(number=few, forget=yes)
    def drop_plan(self, number: int, forget: bool) -> None:
        self.world.drop_plan(number % len(self.world.plans), forget)

    @precondition(lambda self: not self.active())
    @rule(level=few, tenths=st.integers(2, 16), best_efforts=yes)
    def quota(self, level: int, tenths: int, best_efforts: bool) -> None:
        level %= len(self.world.quotas)
        self.world.quota(level, self.world.quotas[level] * tenths // 10, best_efforts, check=True)

    @precondition(lambda self: not self.active())
    @rule()
    def adjust(self) -> None:
        self.world.adjust(check=True)

    @precondition(lambda self: not self.world.live)
    @rule()
    def clear(self) -> None:
        self.world.clear()

    @rule()
    def rest(self) -> None:
        self.world.check_bytes()

    # --- always

    @invariant()
    def sound(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()
        self.folder.cleanup()


def test_any_sequence_of_operations() -> None:
    """Whatever is called in whatever order, the manager does what the model says, and nothing leaks."""
    settings = hypothesis.settings(
        max_examples=1500 if NIGHTLY else 250,
        stateful_step_count=120 if NIGHTLY else 30,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # handles are dropped on purpose
        run_state_machine_as_test(Manager, settings=settings)
