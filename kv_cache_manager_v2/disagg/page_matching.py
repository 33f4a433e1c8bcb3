"""Which bytes of one rank's pages are which bytes of another's, for ranks that divide the model differently.

Rule: buffers are matched by the layer of the whole model and by role, bytes by the heads that both ranks have. All is decided when
two ranks meet; for a request only slot ids are filled in. Blocks that are out of a window have no page on either side and are
skipped.

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
    """Bytes that lie together on both sides, for every block: at base + stride * slot."""

    source_base: int
    source_stride: int
    destination_base: int
    destination_stride: int
    nbytes: int


class ByteMove(NamedTuple):
    """One copy."""

    source: int  # address
    destination: int
    nbytes: int


class GroupPairing(NamedTuple):
    """What two layer groups have in common."""

    source_group: int
    destination_group: int
    segments: tuple[Segment, ...]  # by source pool and offset


class TransferPlan:
    """All that one rank has for another."""

    def __init__(self, source: KVCachePageTable, destination: KVCachePageTable, pairings: list[GroupPairing]) -> None:
        self.source = source
        self.destination = destination
        self.pairings = pairings
        self.filled: dict[tuple[int, str], int] = {}  # (global layer, role) -> bytes of a block that the plan brings

    def __reduce__(self) -> tuple[object, ...]:
        return _transfer_plan, (self.source, self.destination, list(self.pairings), dict(self.filled))

    def moves(self, source_slots: Sequence[Integers], destination_slots: Sequence[Integers]) -> list[ByteMove]:
        """The copies for one request, given its slots on both sides, by layer group and block ordinal (`request_slots`).

        A block is moved where the destination has a page. Raises ConfigError (a ValueError), before anything is moved, if the
        source has none there, or for a slot beyond a pool's end. O(blocks x segments).
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
    """Slot ids, negative where a block has none, of each layer group."""
    groups = items_of(values, name, "sequences of slot ids, one for each layer group")
    if len(groups) != len(table.layer_groups):
        raise ConfigError(f"{name} has slots of {len(groups)} layer groups: the table has {len(table.layer_groups)}")
    found: list[list[int]] = []
    for index, group in enumerate(groups):
        owner = f"{name}[{index}]"
        found.append([whole(item, owner) for item in items_of(group, owner, "slot ids")])
    return found


def match_page_tables(source: KVCachePageTable, destination: KVCachePageTable) -> TransferPlan:
    """Find what the source rank has for the destination rank; nothing in common gives an empty plan.

    Raises ConfigError (a ValueError) where both have a buffer and its bytes cannot be matched: other block lengths, sizes a
    head, heads that do not divide evenly, or a split of what cannot be split.
    """
    ours, theirs = instance(source, KVCachePageTable, "source"), instance(destination, KVCachePageTable, "destination")
    if ours.tokens_per_block != theirs.tokens_per_block:
        raise ConfigError(
            f"blocks of {ours.tokens_per_block} and of {theirs.tokens_per_block} tokens cannot be matched page by page"
        )
    plan = TransferPlan(ours, theirs, [])
    for given in range(len(ours.layer_groups)):
        for taken in range(len(theirs.layer_groups)):
            segments = _match_groups(plan, given, taken)
            if segments:
                plan.pairings.append(GroupPairing(given, taken, tuple(_merge(segments))))
    return plan


def missing_buffers(destination: KVCachePageTable, plans: Sequence[TransferPlan]) -> list[tuple[int, str]]:
    """(global layer, role) of the buffers that the plans of all source ranks together do not fill wholly."""
    table = instance(destination, KVCachePageTable, "destination")
    given = instances(plans, TransferPlan, "plans")
    missing: list[tuple[int, str]] = []
    for index, group in enumerate(table.layer_groups):
        for view in group.pool_views:
            for piece in _pieces(group, view, table.pool(index, view), view.mapper_kind == FLAT):
                brought = sum([plan.filled.get((piece.layer.global_id, piece.role), 0) for plan in given])
                if brought != piece.size:
                    missing.append((piece.layer.global_id, piece.role))
    return missing


def _transfer_plan(
    source: KVCachePageTable, destination: KVCachePageTable, pairings: list[GroupPairing], filled: dict[tuple[int, str], int]
) -> TransferPlan:
    """The plan with these attributes."""
    plan = TransferPlan(source, destination, pairings)
    plan.filled = filled
    return plan


class _Piece(NamedTuple):
    """A buffer (or, in a FLAT view, all of a layer) in the slots of a pool."""

    layer: LocalLayer
    role: str
    offset: int
    size: int
    repetitions: int
    splittable: bool


def _pieces(group: LayerGroup, view: PoolView, pool: PhysicalPool, flat: bool) -> list[_Piece]:
    """The buffers of a view; its layers as wholes if `flat`. Raises ConfigError if a layer does not lie in one piece then."""
    by_id = {layer.local_id: layer for layer in group.local_layers}
    label = "+".join(sorted(view.pool_role))
    if view.mapper_kind == FLAT:
        size = pool.slot_bytes // len(group.local_layers)
        return [_Piece(layer, label, number * size, size, 1, False) for number, layer in enumerate(group.local_layers)]
    if not flat:
        return [
            _Piece(by_id[entry.local_layer_id], entry.role, entry.offset, entry.size, entry.repetitions, True)
            for entry in view.entries
        ]
    wholes: list[_Piece] = []
    for local in view.layer_order:
        entries = sorted([(entry.offset, entry.size) for entry in view.entries if entry.local_layer_id == local])
        size = sum([nbytes for _offset, nbytes in entries])
        if entries[-1][0] + entries[-1][1] - entries[0][0] != size:
            raise ConfigError(f"layer {by_id[local].global_id} does not lie in one piece, as the flat view of the other side needs")
        wholes.append(_Piece(by_id[local], label, entries[0][0], size, 1, False))
    return wholes


def _match_groups(plan: TransferPlan, given: int, taken: int) -> list[Segment]:
    """The segments of all buffers that two layer groups have in common, by source pool and offset: addresses decide no order."""
    found: list[tuple[int, int, Segment]] = []
    for source_view in plan.source.layer_groups[given].pool_views:
        for destination_view in plan.destination.layer_groups[taken].pool_views:
            _match_views(plan, given, taken, source_view, destination_view, found)
    found.sort()
    return [segment for _pool, _offset, segment in found]


def _match_views(
    plan: TransferPlan,
    given: int,
    taken: int,
    source_view: PoolView,
    destination_view: PoolView,
    found: list[tuple[int, int, Segment]],
) -> None:
    """Append (source pool, source offset, segment) of what two views have in common, and count it as brought."""
    flat = FLAT in (source_view.mapper_kind, destination_view.mapper_kind)
    if flat and source_view.pool_role != destination_view.pool_role:
        return
    source = plan.source.pool(given, source_view)
    destination = plan.destination.pool(taken, destination_view)
    wanted: dict[tuple[int, str], _Piece] = {}
    for piece in _pieces(plan.destination.layer_groups[taken], destination_view, destination, flat):
        wanted[(piece.layer.global_id, piece.role)] = piece
    for piece in _pieces(plan.source.layer_groups[given], source_view, source, flat):
        key = (piece.layer.global_id, piece.role)
        other = wanted.get(key)
        if other is None:
            continue
        for source_offset, destination_offset, nbytes in _match_pieces(plan, given, taken, piece, other):
            segment = Segment(
                source.base_address + source_offset,
                source.slot_bytes,
                destination.base_address + destination_offset,
                destination.slot_bytes,
                nbytes,
            )
            found.append((source_view.pool_idx, source_offset, segment))
            plan.filled[key] = plan.filled.get(key, 0) + nbytes


def _match_pieces(plan: TransferPlan, given: int, taken: int, piece: _Piece, other: _Piece) -> list[tuple[int, int, int]]:
    """(source offset, destination offset, bytes) of what two ranks have in common of one buffer."""
    source, destination = plan.source, plan.destination
    name = f"layer {piece.layer.global_id}, {piece.role}"
    if source.layer_groups[given].recurrent != destination.layer_groups[taken].recurrent:
        raise ConfigError(f"{name}: attention on one side, recurrent on the other")
    head_order = source.layer_groups[given].head_order
    if head_order != destination.layer_groups[taken].head_order and not source.layer_groups[given].recurrent:
        raise ConfigError(f"{name}: the axes of a page are {head_order} on one side and not on the other")
    if source.tensor_size == destination.tensor_size:
        if source.tensor_rank != destination.tensor_rank:
            return []
        if piece.size != other.size or piece.repetitions != other.repetitions:
            raise ConfigError(f"{name}: {piece.size} bytes in a block on one side, {other.size} on the other")
        return [(piece.offset, other.offset, piece.size)]
    if not (piece.splittable and other.splittable) or piece.layer.kv_heads == 0 or other.layer.kv_heads == 0:
        raise ConfigError(f"{name}: cannot be split between {source.tensor_size} and {destination.tensor_size} ranks without heads")
    return _split(name, plan, piece, other, head_order)


def _split(name: str, plan: TransferPlan, piece: _Piece, other: _Piece, head_order: str) -> list[tuple[int, int, int]]:
    """The heads that both ranks have, row by row: a row is a repetition (HND) or a token (NHD)."""
    source, destination = plan.source, plan.destination
    given_heads, taken_heads = piece.layer.kv_heads, other.layer.kv_heads
    if given_heads * source.tensor_size != taken_heads * destination.tensor_size:
        raise ConfigError(
            f"{name}: {source.tensor_size} ranks of {given_heads} heads are not {destination.tensor_size} ranks of {taken_heads}: "
            "the heads must divide evenly"
        )
    rows = plan.source.tokens_per_block if head_order == TOKENS_FIRST else piece.repetitions
    if piece.size % (rows * given_heads) != 0 or piece.size * taken_heads != other.size * given_heads:
        raise ConfigError(f"{name}: {piece.size} bytes of {given_heads} heads and {other.size} of {taken_heads} do not match")
    if piece.repetitions != other.repetitions:
        raise ConfigError(f"{name}: {piece.repetitions} and {other.repetitions} blocks of its own in a block")
    head_bytes = piece.size // (rows * given_heads)
    beg = max(source.tensor_rank * given_heads, destination.tensor_rank * taken_heads)
    end = min((source.tensor_rank + 1) * given_heads, (destination.tensor_rank + 1) * taken_heads)
    if end <= beg:
        return []
    source_skip = (beg - source.tensor_rank * given_heads) * head_bytes
    destination_skip = (beg - destination.tensor_rank * taken_heads) * head_bytes
    return [
        (
            piece.offset + row * given_heads * head_bytes + source_skip,
            other.offset + row * taken_heads * head_bytes + destination_skip,
            (end - beg) * head_bytes,
        )
        for row in range(rows)
    ]


def _merge(segments: list[Segment]) -> list[Segment]:
    """Segments that continue one another on both sides become one."""
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
