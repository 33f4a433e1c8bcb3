"""What an engine may do: the part of the contract that the manager cannot check, since it never sees a token's bytes.

Rule: an engine settles only what it has computed, never writes behind the history, runs a recurrent state straight on, and commits
it where it stands.
"""

from __future__ import annotations

from tests.simulation.model import Request
from tests.simulation.setups import Setup


def lengths(setup: Setup, model: Request, capacity: int, history: int) -> tuple[int, int] | None:
    """The nearest (capacity, history) that may be asked for; None if there is none now."""
    if model.ended:
        return None
    history = min(max(history, model.history), model.computed)
    if model.recurrent and history != model.history:
        history = model.computed
    capacity = max(capacity, model.computed if model.recurrent else history)
    if setup.scratch and capacity != model.capacity:
        history = max(history, model.capacity - setup.max_rewind)
        if history > model.computed:
            return None
        capacity = max(capacity, history)
    return capacity, history


def step(setup: Setup, model: Request, grow: int, history: int) -> tuple[int, int] | None:
    """Lengths of a step that settles up to `history` and then has `grow` more positions to compute."""
    if model.recurrent:
        history = model.computed
    history = min(max(history, model.history), model.computed)
    if setup.scratch:
        history = max(history, model.capacity - setup.max_rewind)
    wanted = lengths(setup, model, max(history, model.computed if model.recurrent else 0) + grow, history)
    return None if wanted is not None and model.reads_scratch(wanted[1]) else wanted


def first_written(model: Request) -> int:
    """Where the next step begins to write."""
    return model.computed if model.recurrent else max(model.history, model.committed)


def committable(setup: Setup, model: Request, beam: int, count: int) -> int:
    """How many tokens of a beam may be committed, up to `count`; 0 if none."""
    if not model.committing:
        return 0
    run = model.clean_run(beam)
    count = min(count, run)
    if setup.config.commit_min_snapshot:
        least = model.computed if model.recurrent else model.history  # a snapshot is valid at one length only
        count = max(count, least - model.committed)
        if count > run or count == 0:
            return 0
    return count


def settled(model: Request) -> bool:
    """A recurrent state may be copied only where the history ends."""
    return not model.recurrent or model.computed == model.history
