"""Matches the bytes of one rank's pages with those of another, for ranks that divide the model differently.

Buffers are matched by role and by their layer in the whole model, bytes by the heads that both ranks have. This is done once for
two ranks; a request only adds its slot ids. Blocks outside a window have no page on either side and are skipped.

    source rank, heads 0..3 of layers 0..3          destination rank, heads 2..3 of layers 2..3
    slot: | 0k | 0v | 1k | 1v | 2k | 2v | 3k | 3v |   slot: | 2k | 2v | 3k | 3v |
                              `--: two of four heads of each token (NHD), or the second half of the buffer (HND)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kv_cache_manager_v2.arguments import Integers, instance, instances, items_of, whole
from kv_cache_manager_v2.disagg.page_table import (
    FLAT,
    TOKENS_FIRST,
    KVCachePageTable,
    LayerGroup,
    LocalLayer,
    PhysicalPool,
    PoolView,
)
from kv_cache_manager_v2.errors import ConfigError


class Segment(NamedTuple):
    """Bytes that are contiguous on both sides. Those of a block are at base + stride * slot."""

    source_base: int
    source_stride: int
    destination_base: int
    destination_stride: int
    nbytes: int


class ByteMove(NamedTuple):
    """One copy of contiguous bytes."""

    source: int  # address
    destination: int
    nbytes: int


class GroupPairing(NamedTuple):
    """The bytes that two layer groups have in common."""

    source_group: int
    destination_group: int
    segments: tuple[Segment, ...]  # by source pool and offset


class TransferPlan:
    """The bytes that one rank can copy to another."""

    def __init__(self, source: KVCachePageTable, destination: KVCachePageTable, pairings: list[GroupPairing]) -> None:
        self.source = source
        self.destination = destination
        self.pairings = pairings
        self.filled: dict[tuple[int, str], int] = {}  # (global layer, role) -> bytes of a block that the plan copies

    def __reduce__(self) -> tuple[object, ...]:
        return _transfer_plan, (self.source, self.destination, list(self.pairings), dict(self.filled))

    def moves(self, source_slots: Sequence[Integers], destination_slots: Sequence[Integers]) -> list[ByteMove]:
        """The copies for one request, given its slots on both sides by layer group and block ordinal (see `request_slots`).

        A block is copied if the destination has a page for it. O(blocks x segments). Raises ConfigError (a ValueError) if the
        source has no page for such a block, or for a slot beyond the end of a pool.
        """
        sources = _by_group(source_slots, "source_slots", self.source)
        destinations = _by_group(destination_slots, "destination_slots", self.destination)
        moves: list[ByteMove] = []
        for pairing in self.pairings:
            given = sources[pairing.source_group]
            taken = destinations[pairing.destination_group]
            self.source.check_slots(pairing.source_group, given)
            self.destination.check_slots(pairing.destination_group, taken)
            for ordinal, slot in enumerate(taken):
                if slot < 0:
                    continue
                if ordinal >= len(given) or given[ordinal] < 0:
                    raise ConfigError(
                        f"the source has no page for block {ordinal} of its layer group {pairing.source_group}, which layer group "
                        f"{pairing.destination_group} of the destination expects: histories and windows of both sides must agree"
                    )
                for segment in pairing.segments:
                    moves.append(
                        ByteMove(
                            segment.source_base + segment.source_stride * given[ordinal],
                            segment.destination_base + segment.destination_stride * slot,
                            segment.nbytes,
                        )
                    )
        return moves


def _by_group(values: object, name: str, table: KVCachePageTable) -> list[list[int]]:
    """Validate the slot ids of each layer group; negative ids are blocks without a slot. Raises ConfigError."""
    groups = items_of(values, name, "sequences of slot ids, one for each layer group")
    if len(groups) != len(table.layer_groups):
        raise ConfigError(f"{name} has slots of {len(groups)} layer groups: the table has {len(table.layer_groups)}")
    found: list[list[int]] = []
    for index, group in enumerate(groups):
        owner = f"{name}[{index}]"
        found.append([whole(item, owner) for item in items_of(group, owner, "slot ids")])
    return found


def match_page_tables(source: KVCachePageTable, destination: KVCachePageTable) -> TransferPlan:
    """Find the bytes that the source rank can copy to the destination rank. The plan is empty if they have none in common.

    Raises ConfigError (a ValueError) if both ranks have a buffer whose bytes cannot be matched. Reasons are different block lengths
    or sizes per head, heads that do not divide evenly, and a buffer that cannot be split.
    """
    source_table, destination_table = (
        instance(source, KVCachePageTable, "source"),
        instance(destination, KVCachePageTable, "destination"),
    )
    if source_table.tokens_per_block != destination_table.tokens_per_block:
        raise ConfigError(
            f"blocks of {source_table.tokens_per_block} and of {destination_table.tokens_per_block} tokens cannot be matched: "
            "tokens_per_block must be equal on both ranks"
        )
    plan = TransferPlan(source_table, destination_table, [])
    for source_group in range(len(source_table.layer_groups)):
        for destination_group in range(len(destination_table.layer_groups)):
            segments = _match_groups(plan, source_group, destination_group)
            if segments:
                plan.pairings.append(GroupPairing(source_group, destination_group, tuple(_merge(segments))))
    return plan


def missing_buffers(destination: KVCachePageTable, plans: Sequence[TransferPlan]) -> list[tuple[int, str]]:
    """(global layer, role) of each buffer that the plans of all source ranks together do not fill completely."""
    table = instance(destination, KVCachePageTable, "destination")
    given = instances(plans, TransferPlan, "plans")
    missing: list[tuple[int, str]] = []
    for index, group in enumerate(table.layer_groups):
        for view in group.pool_views:
            for span in _spans(group, view, table.pool(index, view), view.mapper_kind == FLAT):
                copied = sum([plan.filled.get((span.layer.global_id, span.role), 0) for plan in given])
                if copied != span.size:
                    missing.append((span.layer.global_id, span.role))
    return missing


def _transfer_plan(
    source: KVCachePageTable, destination: KVCachePageTable, pairings: list[GroupPairing], filled: dict[tuple[int, str], int]
) -> TransferPlan:
    """Rebuild a plan for `TransferPlan.__reduce__`."""
    plan = TransferPlan(source, destination, pairings)
    plan.filled = filled
    return plan


class _Span(NamedTuple):
    """The bytes of a buffer (or, in a FLAT view, of a whole layer) in the slots of a pool."""

    layer: LocalLayer
    role: str
    offset: int
    size: int
    repetitions: int
    splittable: bool


def _spans(group: LayerGroup, view: PoolView, pool: PhysicalPool, flat: bool) -> list[_Span]:
    """The spans of a view's buffers, or of its whole layers if `flat`. Raises ConfigError if such a layer is not contiguous."""
    by_id = {layer.local_id: layer for layer in group.local_layers}
    label = "+".join(sorted(view.pool_role))
    if view.mapper_kind == FLAT:
        size = pool.slot_bytes // len(group.local_layers)
        return [_Span(layer, label, number * size, size, 1, False) for number, layer in enumerate(group.local_layers)]
    if not flat:
        return [
            _Span(by_id[entry.local_layer_id], entry.role, entry.offset, entry.size, entry.repetitions, True)
            for entry in view.entries
        ]
    spans: list[_Span] = []
    for local in view.layer_order:
        entries = sorted([(entry.offset, entry.size) for entry in view.entries if entry.local_layer_id == local])
        size = sum([nbytes for _offset, nbytes in entries])
        if entries[-1][0] + entries[-1][1] - entries[0][0] != size:
            raise ConfigError(
                f"the buffers of layer {by_id[local].global_id} are not contiguous, which the FLAT view of the other rank needs; "
                "give both ranks INDEXED views"
            )
        spans.append(_Span(by_id[local], label, entries[0][0], size, 1, False))
    return spans


def _match_groups(plan: TransferPlan, source_group: int, destination_group: int) -> list[Segment]:
    """The segments that two layer groups have in common, ordered by source pool and offset, independent of addresses."""
    found: list[tuple[int, int, Segment]] = []
    for source_view in plan.source.layer_groups[source_group].pool_views:
        for destination_view in plan.destination.layer_groups[destination_group].pool_views:
            _match_views(plan, source_group, destination_group, source_view, destination_view, found)
    found.sort()
    return [segment for _pool, _offset, segment in found]


def _match_views(
    plan: TransferPlan,
    source_group: int,
    destination_group: int,
    source_view: PoolView,
    destination_view: PoolView,
    found: list[tuple[int, int, Segment]],
) -> None:
    """Append (source pool, source offset, segment) of the bytes that two views have in common, and add them to `plan.filled`."""
    flat = FLAT in (source_view.mapper_kind, destination_view.mapper_kind)
    if flat and source_view.pool_role != destination_view.pool_role:
        return
    source = plan.source.pool(source_group, source_view)
    destination = plan.destination.pool(destination_group, destination_view)
    wanted: dict[tuple[int, str], _Span] = {}
    for span in _spans(plan.destination.layer_groups[destination_group], destination_view, destination, flat):
        wanted[(span.layer.global_id, span.role)] = span
    for span in _spans(plan.source.layer_groups[source_group], source_view, source, flat):
        key = (span.layer.global_id, span.role)
        other = wanted.get(key)
        if other is None:
            continue
        for source_offset, destination_offset, nbytes in _match_spans(plan, source_group, destination_group, span, other):
            segment = Segment(
                source.base_address + source_offset,
                source.slot_bytes,
                destination.base_address + destination_offset,
                destination.slot_bytes,
                nbytes,
            )
            found.append((source_view.pool_idx, source_offset, segment))
            plan.filled[key] = plan.filled.get(key, 0) + nbytes


def _match_spans(
    plan: TransferPlan, source_group: int, destination_group: int, span: _Span, other: _Span
) -> list[tuple[int, int, int]]:
    """(source offset, destination offset, bytes) of the parts of one buffer that two ranks have in common."""
    source, destination = plan.source, plan.destination
    name = f"layer {span.layer.global_id}, {span.role}"
    if source.layer_groups[source_group].recurrent != destination.layer_groups[destination_group].recurrent:
        raise ConfigError(f"{name}: attention on one rank, recurrent on the other; both must have the same kind of layer")
    head_order = source.layer_groups[source_group].head_order
    if head_order != destination.layer_groups[destination_group].head_order and not source.layer_groups[source_group].recurrent:
        raise ConfigError(
            f"{name}: head_order is {head_order!r} on the source only; build both page tables with the same head_order"
        )
    if source.tensor_size == destination.tensor_size:
        if source.tensor_rank != destination.tensor_rank:
            return []
        if span.size != other.size or span.repetitions != other.repetitions:
            raise ConfigError(
                f"{name}: {span.size} bytes in {span.repetitions} blocks of its own per block on the source, {other.size} bytes in "
                f"{other.repetitions} on the destination; both must be equal"
            )
        return [(span.offset, other.offset, span.size)]
    if not (span.splittable and other.splittable) or span.layer.kv_heads == 0 or other.layer.kv_heads == 0:
        raise ConfigError(
            f"{name}: cannot be split between {source.tensor_size} and {destination.tensor_size} ranks; "
            "that needs INDEXED views and kv_heads in both page tables"
        )
    return _split(name, plan, span, other, head_order)


def _split(name: str, plan: TransferPlan, span: _Span, other: _Span, head_order: str) -> list[tuple[int, int, int]]:
    """The parts with the heads that both ranks have, one per row. A row is a repetition (HND) or a token (NHD)."""
    source, destination = plan.source, plan.destination
    source_heads, destination_heads = span.layer.kv_heads, other.layer.kv_heads
    if source_heads * source.tensor_size != destination_heads * destination.tensor_size:
        raise ConfigError(
            f"{name}: {source.tensor_size} ranks of {source_heads} heads are not {destination.tensor_size} ranks of "
            f"{destination_heads}: the heads must divide evenly"
        )
    rows = plan.source.tokens_per_block if head_order == TOKENS_FIRST else span.repetitions
    if span.size % (rows * source_heads) != 0 or span.size * destination_heads != other.size * source_heads:
        raise ConfigError(
            f"{name}: {span.size} bytes for {source_heads} heads on the source, {other.size} for {destination_heads} on the "
            "destination; the bytes per head must be equal"
        )
    if span.repetitions != other.repetitions:
        raise ConfigError(
            f"{name}: {span.repetitions} of its own blocks per block on the source, {other.repetitions} on the destination; "
            "they must be equal"
        )
    head_bytes = span.size // (rows * source_heads)
    beg = max(source.tensor_rank * source_heads, destination.tensor_rank * destination_heads)
    end = min((source.tensor_rank + 1) * source_heads, (destination.tensor_rank + 1) * destination_heads)
    if end <= beg:
        return []
    source_skip = (beg - source.tensor_rank * source_heads) * head_bytes
    destination_skip = (beg - destination.tensor_rank * destination_heads) * head_bytes
    return [
        (
            span.offset + row * source_heads * head_bytes + source_skip,
            other.offset + row * destination_heads * head_bytes + destination_skip,
            (end - beg) * head_bytes,
        )
        for row in range(rows)
    ]


def _merge(segments: list[Segment]) -> list[Segment]:
    """Merge segments that are adjacent on both sides."""
    merged: list[Segment] = []
    for segment in segments:
        if merged and _continues(merged[-1], segment):
            before = merged.pop()
            segment = before._replace(nbytes=before.nbytes + segment.nbytes)
        merged.append(segment)
    return merged


def _continues(before: Segment, segment: Segment) -> bool:
    return (
        before.source_base + before.nbytes == segment.source_base
        and before.destination_base + before.nbytes == segment.destination_base
        and (before.source_stride, before.destination_stride) == (segment.source_stride, segment.destination_stride)
    )
