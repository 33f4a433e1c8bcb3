"""The curves: which operations are measured against what, and at which points."""

from __future__ import annotations

from typing import Final, NamedTuple

from bench import places, prompts, steps
from bench.catalogue import Operation
from bench.work import Work


class Curve(NamedTuple):
    """One operation against one axis."""

    work: type[Work]
    fields: dict[str, object]
    expected: float  # exponent that the plan promises: 0 for what must not grow


class Axis(NamedTuple):
    """One field of the setting, varied."""

    field: str
    label: str
    values: list[int]
    curves: dict[str, Curve]

    def typed(self, value: int) -> object:
        """The value as the field has it: the number of life cycles is text."""
        return str(value) if self.field == "layers" else value


_PER_PROMPT: Final = {
    "probe": Curve(prompts.Probe, {}, 1.0),
    "create, resume, close": Curve(prompts.Admit, {}, 1.0),
    "resize cold": Curve(prompts.ResizeCold, {}, 1.0),
    "commit cold": Curve(prompts.CommitCold, {}, 1.0),
    "close committed": Curve(prompts.CloseCommitted, {}, 1.0),
    "suspend, resume": Curve(prompts.SuspendResume, {}, 1.0),
    "commit cold, events pending": Curve(prompts.CommitWithEvents, {"events": True}, 1.0),
    "commit cold, flush, drain": Curve(prompts.CommitFlushDrain, {"events": True}, 1.0),
}
_PER_PROMPT_AND_INPUT: Final = {
    **_PER_PROMPT,
    "create, resume, close, list": Curve(prompts.Admit, {"tokens_as": "list"}, 1.0),
    "create, resume, close, numpy": Curve(prompts.Admit, {"tokens_as": "numpy"}, 1.0),
}


def _per_step(requests: dict[str, object], expected: float) -> dict[str, Curve]:
    return {
        "decode step, calls": Curve(steps.DecodeCalls, requests, expected),
        "decode step, batch": Curve(steps.DecodeBatch, requests, expected),
        "decode step, batch, index matrix": Curve(steps.DecodeMatrix, requests, expected),
        "decode step, calls, statistics committed": Curve(steps.DecodeStatistics, requests, expected),
    }


def _flat(curves: dict[str, Curve], fields: dict[str, object]) -> dict[str, Curve]:
    """The same operations on an axis that must not matter to them."""
    return {title: Curve(curve.work, {**curve.fields, **fields}, 0.0) for title, curve in curves.items()}


AXES: Final = {
    "tokens": Axis(
        "prompt",
        "tokens of the sequence",
        [1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20],
        {
            **_PER_PROMPT_AND_INPUT,
            "resume from host": Curve(prompts.ResumeFromHost, {"tiers": 2}, 1.0),
            **_per_step({"requests": 8}, 0.0),
        },
    ),
    "cached": Axis(
        "cached",
        "cached blocks",
        [10_000, 100_000, 1_000_000, 5_000_000],
        {
            **_flat(_PER_PROMPT_AND_INPUT, {}),
            **_per_step({"requests": 100}, 0.0),
            "evict a page": Curve(places.Evict, {}, 0.0),
            "full collection": Curve(steps.Collection, {}, 0.0),
        },
    ),
    "held": Axis(
        "held",
        "pages that suspended requests hold, in front of those to evict",
        [1_000, 10_000, 100_000, 1_000_000],
        {"evict a page": Curve(places.Evict, {"tiers": 2, "cached": 1_000}, 0.0)},
    ),
    "requests": Axis(
        "requests",
        "open requests",
        [10, 100, 1_000, 10_000],
        _per_step({}, 1.0),
    ),
    "tiers": Axis(
        "tiers",
        "cache tiers",
        [1, 2, 3, 4],
        {
            **_flat(_PER_PROMPT, {}),
            **_per_step({"requests": 100}, 0.0),
        },
    ),
    "life cycles": Axis(
        "layers",
        "life cycles",
        [1, 2, 4, 8],
        {
            **_PER_PROMPT,
            **_per_step({"requests": 100}, 0.0),
        },
    ),
    "siblings": Axis(
        "siblings",
        "siblings below one block",
        [10, 100, 1_000, 10_000, 100_000],
        {
            "partial match": Curve(places.PartialMatch, {}, 0.0),
            "insert a block": Curve(places.InsertSibling, {}, 0.0),
        },
    ),
}


def growth_operation(title: str, point: str) -> Operation:
    """The operation of a curve at a point "AXIS=VALUE"."""
    name, equals, value = point.partition("=")
    assert equals, f"a point is AXIS=VALUE, got {point!r}"
    axis = AXES[name]
    curve = axis.curves[title]
    return Operation(title, curve.work, {**curve.fields, axis.field: axis.typed(int(value))}, {})
