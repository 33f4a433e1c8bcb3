"""Tables that explain how a configuration's memory is divided. They show results and reasons of `sizing` and `pools`."""

from __future__ import annotations

from typing import Final, NamedTuple

from kv_cache_manager_v2.arguments import instance
from kv_cache_manager_v2.config import KVCacheManagerConfig
from kv_cache_manager_v2.ids import CacheTier, LayerGroupId, PoolGroupId
from kv_cache_manager_v2.layout.pools import StorageLayout, build_layout
from kv_cache_manager_v2.layout.sizing import LevelSizing, plan_levels, structural_slots

FLOOR_OF_ONE_REQUEST: Final = "floor: one request"
FLOOR_OF_CONSTRAINTS: Final = "floor: constraints"
IN_GRAINS: Final = ", and what its grains and the remainder hold"
UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
COLUMNS: Final = ("pool group", "layer groups", "bytes/slot", "floor", "share asked", "slots", "bytes", "share", "decided by")


class SizingRow(NamedTuple):
    """One pool group on one level."""

    level: int
    pool_group: PoolGroupId
    layer_groups: tuple[LayerGroupId, ...]  # those that share its slots
    slot_bytes: int  # of all its pools together
    floor: int  # the fewest slots that it may have
    share_asked: float  # of the level's bytes, 0 to 1
    slots: int
    slots_bytes: int  # bytes of the slots, before rounding to grains
    share: float  # of the bytes of all slots of the level
    decided_by: str  # the floor, or the part of the configuration that gave the shares


class SizingLevel(NamedTuple):
    """One level: its quota and the bytes that its slots use."""

    level: int
    tier: CacheTier
    asked: int  # configured bytes
    quota: int  # bytes, rounded up to whole grains and raised to the minimum
    minimum: int  # bytes of the floors, in whole grains
    granularity: int  # bytes of a grain
    used: int  # bytes of the grains that the slots occupy; the rest is too small for one more slot
    rows: tuple[SizingRow, ...]  # by pool group

    @property
    def raised(self) -> bool:
        """Whether the configured quota was below the minimum."""
        return self.asked < self.minimum and self.quota == self.minimum


class SizingTable:
    """How the quota of each level is divided into slots. `str()` returns a readable table."""

    def __init__(self, levels: list[SizingLevel], group_names: list[str]) -> None:
        self.levels = levels  # warm to cold
        self.group_names = group_names  # of the layer groups: "full, 2 layers"

    def __reduce__(self) -> tuple[object, ...]:
        return SizingTable, (list(self.levels), list(self.group_names))

    @property
    def rows(self) -> list[SizingRow]:
        """The rows of all levels, level by level."""
        return [row for level in self.levels for row in level.rows]

    def __str__(self) -> str:
        lines: list[str] = []
        for level in self.levels:
            lines.append(_describe_level(level))
            lines.extend(_align([COLUMNS, *[self._cells(row) for row in level.rows]]))
            lines.append("")
        return "\n".join(lines[:-1])

    def _cells(self, row: SizingRow) -> tuple[str, ...]:
        return (
            str(row.pool_group),
            "; ".join([f"{group}: {self.group_names[group]}" for group in row.layer_groups]),
            f"{row.slot_bytes:,}",
            f"{row.floor:,}",
            f"{100 * row.share_asked:.1f} %",
            f"{row.slots:,}",
            human_bytes(row.slots_bytes),
            f"{100 * row.share:.1f} %",
            row.decided_by,
        )


def explain_sizing(config: KVCacheManagerConfig) -> SizingTable:
    """How the quota of each level is divided into slots of pool groups, and why. Allocates no cache memory.

    A quota below its minimum is raised, as a manager would raise it. Raises ConfigError for an invalid configuration.
    """
    given = instance(config, KVCacheManagerConfig, "config")
    layout = build_layout(given)
    sizings, _raised = plan_levels(layout, given)
    one_request = structural_slots(layout)
    levels = [_explain_level(layout, index, sizing, one_request) for index, sizing in enumerate(sizings)]
    return SizingTable(levels, [name_group(layout, index) for index in range(layout.num_life_cycles)])


def _explain_level(layout: StorageLayout, index: int, sizing: LevelSizing, one_request: list[int]) -> SizingLevel:
    got = sizing.pool_bytes(layout)
    shares = sizing.ratio(layout)
    rows: list[SizingRow] = []
    for group in range(layout.num_pool_groups):
        floor, slots = sizing.floors[group], sizing.slots[group]
        decided_by = sizing.weights_from
        if sizing.pinned[group] or slots == floor:
            decided_by = FLOOR_OF_CONSTRAINTS if floor > one_request[group] else FLOOR_OF_ONE_REQUEST
            if slots > floor:
                decided_by += IN_GRAINS
        rows.append(
            SizingRow(
                index,
                PoolGroupId(group),
                tuple([LayerGroupId(member) for member in layout.members[group]]),
                layout.slot_bytes(group),
                floor,
                sizing.weights[group],
                slots,
                got[group],
                shares[group],
                decided_by,
            )
        )
    return SizingLevel(
        index,
        sizing.tier,
        sizing.asked,
        sizing.quota,
        sizing.minimum_quota,
        sizing.granularity,
        sizing.used_quota(layout),
        tuple(rows),
    )


def name_group(layout: StorageLayout, index: int) -> str:
    """A layer group in a few words: "window 1024, 2 layers"."""
    cycle = layout.life_cycles[index]
    kind = "full attention"
    if not cycle.is_attention:
        kind = "recurrent"
    elif cycle.window_size is not None:
        kind = f"window {cycle.window_size}"
        if cycle.num_sink_blocks > 0:
            kind += f" + {cycle.num_sink_blocks} sink blocks"
    count = len(layout.layers_of[index])
    return f"{kind}, {count} layer{'s' if count != 1 else ''}"


def _describe_level(level: SizingLevel) -> str:
    quota = f"{human_bytes(level.quota)} of {human_bytes(level.asked)} asked"
    if level.raised:
        quota = f"{human_bytes(level.quota)}, raised to the minimum from {human_bytes(level.asked)} asked"
    return (
        f"level {level.level}, {level.tier.name}: quota {quota}; minimum {human_bytes(level.minimum)}; "
        f"grains of {human_bytes(level.granularity)}; {human_bytes(level.used)} used"
    )


def _align(table: list[tuple[str, ...]]) -> list[str]:
    """The rows as lines with aligned columns: the second and the last to the left, the others to the right."""
    widths = [max([len(row[column]) for row in table]) for column in range(len(table[0]))]
    lines: list[str] = []
    for row in table:
        cells: list[str] = []
        for column, cell in enumerate(row):
            left = column == 1 or column == len(row) - 1
            cells.append(cell.ljust(widths[column]) if left else cell.rjust(widths[column]))
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def human_bytes(count: int) -> str:
    """A size as text, in the largest unit in which it is at least 1."""
    scaled = float(count)
    unit = 0
    while scaled >= 1024.0 and unit < len(UNITS) - 1:
        scaled /= 1024.0
        unit += 1
    return f"{count} B" if unit == 0 else f"{scaled:.1f} {UNITS[unit]}"


# --- the layout of a slot


def draw_layout(layout: StorageLayout) -> str:
    """The position of each buffer in a slot, as text: by pool group and pool, one line for each layer group."""
    lines: list[str] = []
    for group, desc in enumerate(layout.slot_descs):
        lines.append(f"pool group {group}")
        for pool, slot_bytes in enumerate(layout.slot_sizes[group]):
            lines.append(f"  pool {pool}, {slot_bytes} bytes a slot")
            for variant in desc.variants:
                coalesced = variant.coalesced_buffers[pool]
                parts: list[str] = []
                for position, buffer in enumerate(coalesced.buffer_ids):
                    parts.append(f"{position * coalesced.single_buffer_size}: {buffer.layer_id} {buffer.role}")
                lines.append(f"    layer group {variant.layer_group_id}  | {' | '.join(parts)} |")
    return "\n".join(lines)
