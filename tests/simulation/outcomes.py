"""Which outcomes a simulation must have had, for its silence to mean anything.

Rule: (operation, outcome) pairs are counted as they happen, or read off the manager's own counters at the end of a run.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

Outcome = tuple[str, str]
Counts = Counter[Outcome]

OFTEN: Final[tuple[Outcome, ...]] = (  # at least 100 times, whatever the volume
    ("resize", "false"),
    ("resume", "false"),
    ("offload", "GPU to host"),
    ("offload", "host to disk"),
    ("offload", "GPU to disk"),
    ("drop", "GPU"),
    ("drop", "host"),
    ("drop", "disk"),
    ("onload", "host to GPU"),
    ("onload", "disk to GPU"),
    ("commit", "adoption"),
    ("commit", "slot take-over"),
    ("evict", "returned to a clean copy"),
    ("commit", "partial sibling superseded"),
    ("resume", "partial copy"),
    ("fault", "page lost"),
)
EACH: Final[tuple[Outcome, ...]] = (  # the other operations: at least once in CI, 100 times in a soak
    ("create", "miss"),
    ("create", "hit"),
    ("create", "partial hit"),
    ("probe", "hit"),
    ("probe", "miss"),
    ("resume", "gate"),
    ("resume", "plain"),
    ("resize", "grow"),
    ("resize", "shrink"),
    ("resize", "history"),
    ("resize", "scratch"),
    ("commit", "one"),
    ("commit", "short"),
    ("commit", "long"),
    ("commit", "end"),
    ("commit", "beam"),
    ("commit", "batch"),
    ("commit ahead", "done"),
    ("commit ahead", "taken back"),
    ("step", "commit"),
    ("step", "ahead"),
    ("step", "advance"),
    ("step", "fail"),
    ("step", "short"),
    ("step", "suspended"),
    ("policy", "suspends"),
    ("policy", "resumes"),
    ("resume asking", "true"),
    ("resume asking", "false"),
    ("resize asking", "true"),
    ("resize asking", "false"),
    ("batch table", "add"),
    ("batch table", "remove"),
    ("batch", "whole"),
    ("batch", "part"),
    ("stop_committing", "done"),
    ("stop_committing", "again"),
    ("suspend", "done"),
    ("prefetch", "true"),
    ("prefetch", "false"),
    ("prefetch", "loaded"),
    ("onload", "disk to host"),
    ("close", "active"),
    ("close", "suspended"),
    ("close", "lost"),
    ("drop handle", "done"),
    ("fork", "active"),
    ("fork", "suspended"),
    ("fork", "no room"),
    ("beam width", "widen"),
    ("beam width", "narrow"),
    ("beam width", "no room"),
    ("stream", "active"),
    ("stream", "suspended"),
    ("index buffer", "attach"),
    ("index buffer", "detach"),
    ("plan drop", "planned"),
    ("plan drop", "none"),
    ("planned drop", "pages"),
    ("planned drop", "nothing"),
    ("planned drop", "discarded"),
    ("quota", "grown"),
    ("quota", "shrunk"),
    ("quota", "refused"),
    ("adjust", "changed"),
    ("adjust", "nothing to do"),
    ("clear", "done"),
    ("illegal call", "refused"),
    ("check", "statistics of requests"),
    ("check", "page moved or dropped"),
    ("resize", "statistics discarded"),
    ("resume", "data lost"),
    ("resize", "data lost"),
    ("resume", "device failure"),
)
SELDOM: Final[tuple[Outcome, ...]] = (("adjust", "refused"),)  # a few times in 100,000 operations: at least once in a soak


def too_rare(counts: Counts, each: int) -> dict[Outcome, int]:
    """The outcomes that came up too seldom, with their counts: OFTEN below 100, EACH below `each`; SELDOM in a soak."""
    rare = {outcome: counts[outcome] for outcome in OFTEN if counts[outcome] < 100}
    rare.update({outcome: counts[outcome] for outcome in EACH if counts[outcome] < each})
    rare.update({outcome: 0 for outcome in SELDOM if each > 1 and not counts[outcome]})
    return rare


def table(counts: Counts) -> str:
    """One (operation, outcome) a line, and how often it came up."""
    return "\n".join(f"{operation:<18} {outcome:<28} {count:>11,}" for (operation, outcome), count in sorted(counts.items()))
