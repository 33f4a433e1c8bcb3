"""The table at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence

from kv_cache_manager_v2 import KVCacheManager
from tiny_llm.engine import ConversationStats


def conversation_table(stats: dict[int, ConversationStats], tiers: Sequence[str]) -> str:
    """One row a conversation and a row of totals; all columns but the first count tokens, turns or suspensions."""
    header = ["conversation", "turns", "prompt", *[f"reused {tier}" for tier in tiers], "computed", "generated", "suspended"]
    rows = [[str(number), *_cells(entry)] for number, entry in stats.items()]
    total = ConversationStats(reused_by_level=[0] * len(tiers))
    for entry in stats.values():
        total.turns += entry.turns
        total.prompt += entry.prompt
        total.computed += entry.computed
        total.generated += entry.generated
        total.suspensions += entry.suspensions
        total.reused_by_level = [a + b for a, b in zip(total.reused_by_level, entry.reused_by_level, strict=True)]
    rows.append(["all", *_cells(total)])
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def movement_lines(manager: KVCacheManager, tiers: Sequence[str]) -> str:
    """Pages moved between each two tiers, copied on the GPU, and dropped."""
    movement = manager.movement
    moved = [
        f"{source} to {target} {movement.pages_moved(a, b):,}"
        for a, source in enumerate(tiers)
        for b, target in enumerate(tiers)
        if a != b and movement.pages_moved(a, b)
    ]
    dropped = sum(movement.pages_dropped(level) for level in range(len(tiers)))
    return (
        f"pages moved: {', '.join(moved) or 'none'}; copied on the {tiers[0]} {movement.pages_moved(0, 0):,}; dropped {dropped:,}"
    )


def _cells(entry: ConversationStats) -> list[str]:
    counts = [entry.turns, entry.prompt, *entry.reused_by_level, entry.computed, entry.generated, entry.suspensions]
    return [f"{count:,}" for count in counts]
