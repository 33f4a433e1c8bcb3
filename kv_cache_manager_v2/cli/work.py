"""The work that hits save: what a model computes for the tokens of a prompt, by kind of layers and in FLOPs.

A token costs 2 FLOPs for each parameter that it uses, a multiplication and an addition. In attention it costs 4 more for each key
that its query reads and each element of the attention's width: 2 for the product with the key, and 2 for the weighted sum of the
values (Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B: 12 with the backward pass). So the
later tokens of a prompt cost more than the first ones, which are those that a hit saves. A recurrent layer costs the same for
every token, which is in its parameters.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kv_cache_manager_v2.cli.layers import LayerKind, Layers


@dataclass(frozen=True)
class ModelShape:
    """What the FLOPs of a model depend on."""

    parameters: float  # that a token uses
    width: int  # heads times the elements of a head
    layers: tuple[int, ...]  # layers of each kind, in the order of the preset


def model_shape(text: str) -> ModelShape:
    """Parse PARAMETERS,WIDTH,LAYERS, such as 8e9,4096,32 or 8e9,4096,8+24, for argparse."""
    try:
        parameters, width, layers = text.split(",")
        shape = ModelShape(float(parameters), int(width), tuple(int(count) for count in layers.split("+")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not PARAMETERS,WIDTH,LAYERS, such as 8e9,4096,32") from None
    if not 0 < shape.parameters < 1e18 or not 0 < shape.width < 1 << 32 or not all(0 <= count < 1 << 32 for count in shape.layers):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} has a number that is out of range")
    return shape


def keys_read(kind: LayerKind, num_tokens: int) -> int:
    """The keys that the queries of a prompt's first tokens read in one layer, or the tokens of a recurrent layer. O(1)."""
    if kind.recurrent:
        return num_tokens
    if kind.window is None:
        return num_tokens * (num_tokens + 1) // 2
    return _ramp(num_tokens, kind.window) + _ramp(max(0, num_tokens - kind.window), kind.sinks)


def _ramp(count: int, most: int) -> int:
    """The sum of min(i, most) for i from 1 to `count`."""
    rising = min(count, most)
    return rising * (rising + 1) // 2 + (count - rising) * most


def flops(shape: ModelShape, layers: Layers, num_tokens: int) -> float:
    """FLOPs of a prompt's first tokens: 2 * parameters * tokens + 4 * width * layers * keys read, for each kind of attention."""
    total = 2 * shape.parameters * num_tokens
    for kind, count in zip(layers.kinds, shape.layers, strict=True):
        if not kind.recurrent:
            total += 4.0 * shape.width * count * keys_read(kind, num_tokens)
    return total


def work_saved(layers: Layers, shape: ModelShape | None, hits: Sequence[int], lengths: Sequence[int]) -> dict[str, Any]:
    """The work for the hit tokens and for all tokens of some prompts, as keys of a report: by kind of layers, and in FLOPs."""
    kinds: dict[str, Any] = {}
    for kind in layers.kinds:
        saved, total = sum(keys_read(kind, count) for count in hits), sum(keys_read(kind, count) for count in lengths)
        unit = "tokens" if kind.recurrent else "keys read"
        kinds[kind.name] = {"unit": unit, "saved": saved, "total": total, "ratio": saved / total if total else 0.0}
    if shape is None:
        return {"by_layers": kinds, "flops": None}
    saved_flops, all_flops = (sum(flops(shape, layers, count) for count in counts) for counts in (hits, lengths))
    ratio = saved_flops / all_flops if all_flops else 0.0
    return {"by_layers": kinds, "flops": {"saved": saved_flops, "total": all_flops, "ratio": ratio}}


def work_rows(name: str, work: dict[str, Any]) -> list[tuple[str, str]]:
    """Labels and values for a table. `name` says of which requests."""
    rows = [
        (f"  {row['unit']} in {kind} layers", f"{row['saved']:,} of {row['total']:,} ({100 * row['ratio']:.2f} %)")
        for kind, row in work["by_layers"].items()
    ]
    counts = work["flops"]
    if counts is not None:
        rows.append(("  FLOPs", f"{counts['saved']:.4g} of {counts['total']:.4g} ({100 * counts['ratio']:.2f} %)"))
    return [(f"work saved, {name}", ""), *rows]
