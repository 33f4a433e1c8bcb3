"""The hunt on several threads: each has requests and streams of its own, all share one manager and its device.

Rule: a request is used by one thread; what the threads do to each other through the manager leaves every byte right.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
import threading
from collections import Counter
from typing import Final

from tests.hunt.base import Found
from tests.hunt.hunter import WEIGHTS, Hunter
from tests.hunt.setups import Setup

ALONE: Final = ("resize_level", "adjust", "clear", "flush", "disturb", "settle", "check", "drop_handle")


class Member(Hunter):
    """One thread's engine. Calls that need all requests suspended, or no other thread at work, are not its own."""

    captain: Hunter

    @classmethod
    def of(cls, captain: Hunter, index: int) -> Member:
        member = cls.__new__(cls)
        member.__dict__.update(copy.copy(captain.__dict__))
        member.captain = captain
        member.alone = False
        member.rng = random.Random(f"member {index} of {captain.setup.seed}")
        member.open, member.ended, member.plans, member.doomed, member.held = [], [], [], [], []
        member.streams = [captain.own.create_stream() for _ in range(2)]
        member.numbers = itertools.count(1_000_000 * (index + 2))
        member.outcomes = Counter()
        member.holding = False
        member.wary = False
        member.choices = [name for name in captain.choices if name not in ALONE]
        member.weights = list(itertools.accumulate(WEIGHTS[name] for name in member.choices))
        member.actions = {name: getattr(member, name) for name in member.choices}
        return member

    def work(self, operations: int) -> None:
        for name in self._choose(operations):
            self.actions[name]()

    def judge_ended(self, last: bool) -> None:
        """At the end, by the captain."""


def crew(setup: Setup, folder: str, threads: int, operations: int) -> Hunter:
    """So many threads with so many operations each, then the captain's end. Raises Found."""
    captain = Hunter(setup, folder)
    members = [Member.of(captain, index) for index in range(threads)]
    errors: list[BaseException] = []

    def work(member: Member) -> None:
        try:
            member.work(operations)
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        workers = [threading.Thread(target=work, args=(member,), daemon=True) for member in members]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(120)
        if any(worker.is_alive() for worker in workers):
            raise Found(f"{setup.describe()}: a thread does not come back")
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise Found(f"{setup.describe()}, {threads} threads: {type(errors[0]).__name__}: {errors[0]}") from errors[0]
    for member in members:
        captain.open += member.open
        captain.ended += member.ended
        captain.streams += member.streams
        captain.operations += member.operations
        captain.outcomes.update(member.outcomes)
    captain.follow([])
    return captain
