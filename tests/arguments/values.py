"""What is handed in: a valid argument for each parameter, and everything that it must not be.

Rule: what is wrong for a parameter follows from its type in the stubs. Where an integer's whole range is meant, or a value is
valid in one place only, that is said here, by parameter.
"""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from kv_cache_manager_v2 import (
    AttentionLayerConfig,
    BatchDesc,
    BufferConfig,
    CacheTier,
    EmulatedDriver,
    GpuCacheTierConfig,
    HalfOpenRange,
    KVCacheDesc,
    KVCacheEventDiff,
    KVCacheIterationStatsDelta,
    KVCacheStatsDelta,
    PageIndexMode,
    ReusedBlocksByLevel,
    ReuseScope,
    ScratchDesc,
    SsmSnapshotIterationStatsDelta,
    SwaScratchReuseConfig,
)
from kv_cache_manager_v2.disagg.page_table import LayerInfo
from tests.arguments.scene import Scene, setup
from tests.arguments.stubs import CLASSES, Operation, Parameter, atoms

Maker = Callable[[Scene], object]


def always(value: object) -> Maker:
    return lambda scene: value


# --- valid arguments: by "operation.parameter", else by the parameter's name

VALID: Final[Mapping[str, Maker]] = {
    # the manager
    "config": lambda scene: setup(),
    "event_manager": always(None),
    "cold_page_codec": always(None),
    "driver": lambda scene: scene.driver,
    "clock": always(lambda: 0.0),
    "reuse_scope": always(ReuseScope(1, 2)),
    "input_tokens": always([1, 2, 3]),
    "tokens": always([1, 2, 3]),
    "accepted_input_tokens": always([100]),
    "page_indices": always([0, 1]),
    "num_slots": always(4),
    "pool_group_id": always(0),
    "KVCache.commit_ahead.input_tokens": always([]),  # the scene has recurrent layers, whose snapshots need computed tokens
    "kv_cache_id": always(5),
    "target": always(1),
    "beam_id": always(0),
    "id": always(5),
    "custom_priority_callback": always(lambda ordinal, life_cycle: 35),
    "expected_prompt_length": always(12),
    "prompt_length": always(12),
    "text_only": always(False),
    "enable_request_stats": always(True),
    "block_keys": always([bytes(32)]),
    "cache_level": always(1),
    "level": always(1),
    "quota": lambda scene: scene.manager.get_quota(scene.levels()[1]),
    "best_efforts": always(False),
    "batch_size": always(2),
    "token_num_upper_bound": always(64),
    "layer_id": always(0),
    "data_role": always("key"),
    "index_mode": always(PageIndexMode.SHARED),
    "mode": always(PageIndexMode.SHARED),
    "buffer_ids": lambda scene: [scene.buffer_id()],
    # a cache
    "width": always(2),
    "KVCache.text_only.value": always(False),
    "KVCache.allow_seq_rebasing.value": always(False),
    "KVCache.capacity.value": always(11),
    "KVCache.history_length.value": always(7),
    "KVCache.enable_swa_scratch_reuse.value": always(False),
    "capacity": always(11),
    "history_length": always(7),
    "beam_search_indices": always([0, 0, 0]),
    "KVCache.commit.beam_search_indices": always([0]),
    "is_end": always(False),
    "stream": lambda scene: scene.stream,
    "cuda_stream": lambda scene: scene.stream,
    "layer_group_id": always(0),
    "KVCache.get_ssm_block_base_index.layer_group_id": lambda scene: scene.recurrent_group(),
    "beam_idx": always(0),
    "buf": lambda scene: scene.buffer,
    "valid_only": always(True),
    "caches": lambda scene: [scene.active],
    "capacities": always([11]),
    "histories": always([7]),
    "commit_batch.tokens": always([[100]]),
    "commit_ahead_batch.tokens": always([[100]]),
    # configuration
    "KVCacheManagerConfig.tokens_per_block": always(4),
    "tokens_per_block": always(4),
    "tier": always(CacheTier.HOST_MEM),
    "path": always("."),
    "role": always("key"),
    "size": always(64),
    "tokens_per_block_override": always(2),
    "buffers": always([BufferConfig("key", 64)]),
    "sliding_window_size": always(8),
    "num_sink_tokens": always(4),
    "kv_caches": always([KVCacheDesc(4, 2)]),
    "system_prompt_length": always(0),
    "max_rewind_len": always(0),
    "cache_tiers": always([GpuCacheTierConfig(1 << 21)]),
    "layers": always([AttentionLayerConfig(0, [BufferConfig("key", 64)])]),
    "max_util_for_resume": always(0.9),
    "enable_partial_reuse": always(True),
    "reuse_match_backoff": always(1),
    "constraints": always([BatchDesc([KVCacheDesc(4, 2)])]),
    "typical_step": always(BatchDesc([KVCacheDesc(4, 2)])),
    "initial_pool_ratio": always([1.0]),
    "swa_scratch_reuse": always(SwaScratchReuseConfig(0)),
    "commit_min_snapshot": always(True),
    "enable_stats": always(True),
    "rebalance_min_sampled_kv_caches": always(3),
    "rebalance_cooldown_secs": always(1.0),
    "rebalance_target_ratio_update_interval": always(2),
    "rebalance_ratio_threshold": always(1.5),
    "rebalance_moving_average_decay": always(0.5),
    "block_key_hash": always("sha256"),
    "strict_quota": always(False),
    "miss_history": always(4),
    "hit_curve_rate": always(0.5),
    "snapshot_at_branches": always(True),
    # devices
    "schedule": always("random"),
    "seed": always(3),
    "transfer_timeout": always(50.0),
    "stall_timeout_s": always(5.0),
    "io_threads": always(1),
    "call": always("read_file"),
    "nth": always(2),
    "times": always(1),
    "effect": always("error"),
    "address": lambda scene: scene.manager.get_mem_pool_base_address(0, "key"),
    "nbytes": always(4),
    "EmulatedDriver.write_bytes.data": always(b"abcd"),
    # layout
    "x": always(6),
    "y": always(3),
    "end": always(5),
    "beg": always(2),
    "HalfOpenRange.intersect.other": always(HalfOpenRange(3, 9)),
    "range": always(HalfOpenRange(0, 0)),
    "slot_ids": always([1, 2]),
    "base_indices": always([1, 2]),
    "out": always(None),
    "offsets": always(None),
    "num_new_tokens": always([4]),
    "make_room": always(None),
    "EvictionOrder.set_credits.credits": always([3]),
    "also": lambda scene: [scene.active],
    "Step.advance.num_tokens": always([3]),
    "Step.commit.tokens": always([[100]]),
    "Step.commit_ahead.tokens": always([[100]]),
    "Step.rows.tables": lambda scene: scene.step_tables,
    "KVCacheManager.step.tokens": always([[100]]),
    "max_requests": always(2),
    "max_blocks": always(4),
    "arrays": always(None),
    "pad_value": always(0),
    "offset": always(1),
    "int64": always(True),
    "PlainBatchTables.add.cache": lambda scene: scene.active,
    "PlainBatchTables.remove.cache": lambda scene: scene.suspended,
    "PlainBatchTables.row.cache": lambda scene: scene.suspended,
    "PlainBatchTables.rows.caches": lambda scene: [scene.suspended],
    "begins": always([2]),
    "ends": always([9]),
    "converter": lambda scene: scene.manager.get_page_index_converter(0, "key"),
    "scratch": always(ScratchDesc(HalfOpenRange(0, 0), [])),
    # page tables
    "layer_group": always(0),
    "KVCachePageTable.state_sections.layer_group": lambda scene: scene.recurrent_group(),
    "view": lambda scene: scene.table.layer_groups[0].pool_views[0],
    "cache": lambda scene: scene.active,
    "beam": always(0),
    "KVCachePageTable.from_dict.data": lambda scene: scene.table.to_dict(),
    "descs": lambda scene: scene.manager.pool_group_descs,
    "build_page_table.layers": always({number: LayerInfo(number) for number in range(3)}),
    "tensor_rank": always(0),
    "tensor_size": always(1),
    "head_order": always("HND"),
    "kv_heads": always(2),
    "global_ids": always({number: number + 10 for number in range(3)}),
    "manager": lambda scene: scene.manager,
    "model_layer": always(3),
    "attention_type": always(1),
    "num_attention_types": always(2),
    "source": lambda scene: scene.table,
    "destination": lambda scene: scene.table,
    "plans": lambda scene: [scene.plan],
    "source_slots": always([[0], [1], [0]]),
    "destination_slots": always([[0], [1], [0]]),
    "global_id": always(3),
    "window": always(8),
    "recurrent": always(False),
    "repetitions": always({"key": 1}),
    # tokens and keys
    "lora_id": always(1),
    "salt": always(2),
    "digest": always(bytes(32)),
    "multi_modal_data_digest": always(bytes(32)),
    "uuid": always("item"),
    "id_offset": always(1000),
    "num_tokens": always(3),
    "token_offset": always(0),
    "parent_hash": always(9),
    # statistics
    "KVCacheStatsDelta.other": always(KVCacheStatsDelta()),
    "ReusedBlocksByLevel.other": always(ReusedBlocksByLevel()),
    "KVCacheIterationStatsDelta.other": always(KVCacheIterationStatsDelta()),
    "SsmSnapshotIterationStatsDelta.other": always(SsmSnapshotIterationStatsDelta()),
    "MovementCounters.pages_moved.source": always(0),
    "MovementCounters.pages_moved.destination": always(1),
    "warmer": always(2),
    "hit_tokens": always(5),
    # events
    "max_kv_event_entries": always(5),
    "window_size": always(8),
    "attention_dp_rank": always(0),
    "attention_dp_gather": always(lambda events: [events]),
    "hash_algo": always("v2_blake3"),
    "window_size_by_layer_group": always({0: 8}),
    "windows": always({0: 8}),
    "mm_token_id_offset": always(1 << 20),
    "num_blocks_per_cache_level": always([4, 2]),
    "layer_group_ids": always([0, 1]),
    "KVCacheEventManager.add_updated_event.cache_level": always(KVCacheEventDiff(0, 1)),
    "KVCacheEventManager.add_updated_event.priority": always(KVCacheEventDiff(0, 1)),
    "priority": always(35),
    "blocks": lambda scene: [scene.stored_block()],
    "block": lambda scene: scene.manager.shared.tree.all_blocks()[0],
    "block_key": always(bytes(32)),
    "life_cycle": always(0),
    "block_hash": always(77),
    "block_hashes": always([77]),
    "timeout_ms": always(0.0),
    "snapshot": lambda scene: scene.events.snapshot_events(),
    "events": lambda scene: [scene.event()],
    "KVCacheStoredBlockData.tokens": always(b"\x01\x00\x00\x00"),
    "mm_keys": always([(bytes(32), 0)]),
    "cache_salt": always(None),
}

# --- integers and numbers whose extremes are meant; every other one refuses -1, -2**70, 2**63 and 2**70

NEGATIVE: Final = frozenset({-1, -(2**70)})
HUGE: Final = frozenset({2**63, 2**70})
EXTREMES_ALLOWED: Final[Mapping[str, frozenset[int]]] = {
    "lora_id": frozenset({2**63}),
    "salt": frozenset({2**63}),
    "EmulatedDriver.__init__.seed": NEGATIVE | HUGE,
    "slot_ids": NEGATIVE,  # a block without a page
    "source_slots": NEGATIVE,
    "destination_slots": NEGATIVE,
    "base_indices": frozenset({-1}),
    "ScratchDesc.slot_ids": frozenset(),
    "exact_div.x": NEGATIVE | HUGE,
    "exact_div.y": NEGATIVE,
    "HalfOpenRange.beg": NEGATIVE | HUGE,
    "HalfOpenRange.end": NEGATIVE | HUGE,
    "max_kv_event_entries": NEGATIVE | HUGE,
    "EventMirror.num_cached.layer_group_id": frozenset({-1}),
    "pad_value": frozenset({-1}),
    "v1_block_hash.parent_hash": frozenset({2**63}),
}


def lookup(table: Mapping[str, Any], operation: Operation, parameter: Parameter) -> Any:
    """The most specific entry for a parameter; None without one."""
    for key in (f"{operation}.{parameter.name}", f"{operation.owner or operation.name}.{parameter.name}", parameter.name):
        if key in table:
            return table[key]
    return None


def valid_arguments(scene: Scene, operation: Operation) -> dict[str, object]:
    """A valid value for each parameter; what has a default may be left out here."""
    found: dict[str, object] = {}
    for parameter in operation.parameters:
        maker: Maker | None = lookup(VALID, operation, parameter)
        assert maker or parameter.optional, f"tests/arguments/values.py has no valid {parameter.name!r} of {operation}"
        if maker is not None:
            found[parameter.name] = maker(scene)
    return found


# --- wrong arguments


class Duck:
    """Has every attribute, can be called, and is nothing."""

    def __getattr__(self, name: str) -> Duck:
        return self

    def __call__(self, *arguments: object, **named: object) -> Duck:
        return self


class Wrong(NamedTuple):
    """A value of a kind that some types accept."""

    kind: str
    make: Callable[[], object]


def _generator() -> Iterator[int]:
    yield 0


STRANGERS: Final = (
    Wrong("none", lambda: None),
    Wrong("bool", lambda: True),
    Wrong("float", lambda: 1.0),
    Wrong("float", lambda: np.float64(2)),
    Wrong("nan", lambda: math.nan),
    Wrong("int", lambda: 3),
    Wrong("str", lambda: "surprise"),
    Wrong("bytes", lambda: b"surprise"),
    Wrong("list", lambda: [object()]),
    Wrong("generator", _generator),
    Wrong("dict", lambda: {"surprise": 1}),
    Wrong("set", lambda: {"surprise"}),
    Wrong("callable", lambda: len),
    Wrong("class", lambda: EmulatedDriver),
    Wrong("duck", Duck),
)

EXTREMES: Final = (-1, -(2**70), 2**63, 2**70)

INTEGERS: Final = frozenset(
    {"int", "SupportsIndex", "LayerId", "LayerGroupId", "LifeCycleId", "CacheLevel", "PoolGroupId", "PoolId", "Stream", "_Id"}
)
STRINGS: Final = frozenset({"str", "DataRole"})
ALIASES: Final = {
    "Integers": "Sequence[SupportsIndex]",
    "BlockHashes": "int | str | bytes | Iterable[int | str | bytes]",
    "arguments.Integers": "Sequence[SupportsIndex]",
    "ScopeLike": "ReuseScope",
    "SupportsFloat": "float",
    "BlockHash": "int | str",
    "EventGather": "Callable",
    "PriorityCallback": "Callable",
    "MmKey": "tuple[object, ...]",
    "_Delta": "KVCacheStatsDelta",
}


def kinds_of(annotation: str) -> set[str]:
    """What a type accepts, as kinds of STRANGERS."""
    found: set[str] = set()
    for atom in atoms(annotation):
        name = atom.partition("[")[0]
        if atom in ALIASES:
            found |= kinds_of(ALIASES[atom])
        elif atom in INTEGERS or atom == "PageIndexMode":
            found.add("int")
        elif atom in STRINGS:
            found.add("str")
        elif atom == "float":
            found |= {"float", "int"}
        elif atom == "None":
            found.add("none")
        elif atom in ("bool", "bytes"):
            found.add(atom)
        elif name in ("Sequence", "list", "tuple", "Iterable", "frozenset"):
            items = kinds_of(atom.partition("[")[2][:-1].partition(",")[0])
            found |= {"list"} & items | ({"generator"} if name == "Iterable" and "int" in items else set())
            found |= {"set", "dict"} if name == "Iterable" and "str" in items else set()
        elif name == "Mapping":
            found.add("dict")
        elif name == "Callable":
            found |= {"callable", "class", "duck"}
        elif atom in ("object", "Any"):
            found |= {stranger.kind for stranger in STRANGERS}
        else:  # a class: no stranger is an object of it
            assert atom in CLASSES or hasattr(builtins, name), f"tests/arguments/values.py does not know the type {atom!r}"
    return found


def wrong_of(annotation: str, allowed: frozenset[int]) -> Iterator[object]:
    """Values that are not of a type, or that are integers beyond what is allowed; containers of such items too."""
    accepted = kinds_of(annotation)
    for stranger in STRANGERS:
        if stranger.kind not in accepted:
            yield stranger.make()
    names = [ALIASES.get(atom, atom) for atom in atoms(annotation)]
    if "int" in accepted and any(name in INTEGERS for name in names):
        yield from [value for value in EXTREMES if value not in allowed]
    for name in names:
        node = ast.parse(name, mode="eval").body
        if not isinstance(node, ast.Subscript):
            continue
        container = ast.unparse(node.value)
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if container in ("Sequence", "list", "Iterable"):
            for item in wrong_of(ast.unparse(items[0]), allowed):
                yield [item]
        elif container == "Mapping":
            for item in wrong_of(ast.unparse(items[1]), allowed):
                yield {0: item}


# Parameters whose type says nothing: what they must not be, by name.
NO_TOKENS: Final = (
    5, "abc", b"abc", object(), [object()], [1.5], [True, None], [-1], [2**31], [2**70], ["a"], [b"short"], [[1]], {1: 2.5},
    np.array([1.5]), np.array([[1]]), np.array([-1]), np.array([2**40]), Duck(),
)  # fmt: skip
NO_IDS: Final[tuple[object, ...]] = ([1], {"a": 1}, {1}, np.zeros(2), ([],))
OPAQUE: Final[Mapping[str, tuple[object, ...]]] = {
    "tokens": (*NO_TOKENS, None),
    "accepted_input_tokens": (*NO_TOKENS, None),
    "input_tokens": NO_TOKENS,
    "buf": (5, "abc", b"abcdefgh", [0, 0], np.zeros(16), np.zeros(16, np.int64), np.zeros(1, np.int32), np.zeros((4, 4), np.int32),
            Duck()),
    "out": (5, "abc", b"abcdefgh", [0, 0], np.zeros(16), np.zeros(16, np.int16), np.zeros((4, 4), np.int32), Duck()),
    "arrays": (5, "abc", b"abcdefgh", [], [0, 0], [np.zeros((2, 4), np.int32)], [np.zeros(8, np.int32)] * 3, Duck()),
    "offsets": (5, "abc", b"abcdefgh", [0, 0], np.zeros(16), np.zeros(1, np.int32), np.zeros((4, 4), np.int32), Duck()),
    "cold_page_codec": (5, "abc", Duck()),
    "block": (5, "abc", None, Duck()),
    "id": NO_IDS,
    "kv_cache_id": NO_IDS,
}  # fmt: skip


TOKENS_OF_EACH = (5, "abc", object(), [object()], [1.5], ["a"], [[object()]], [[-1]], {1: 2.5}, Duck())


def wrong(scene: Scene, operation: Operation, parameter: Parameter) -> Iterator[object]:
    """All that must be refused for a parameter."""
    own: Maker | None = SPECIAL.get(f"{operation}.{parameter.name}")
    if own is not None:
        special = own(scene)
        assert isinstance(special, tuple)
        yield from special
    if parameter.annotation == "object" or parameter.name in OPAQUE:
        assert parameter.name in OPAQUE, f"tests/arguments/values.py has no wrong {parameter.name!r} of {operation}"
        if str(operation) == "Step.commit":  # what the items are is seen at the step's end
            yield from (5, "abc", object(), {1: 2.5}, Duck())
        else:
            yield from TOKENS_OF_EACH if str(operation) in FOR_EACH else OPAQUE[parameter.name]
        return
    for value in wrong_of(parameter.annotation, lookup(EXTREMES_ALLOWED, operation, parameter) or frozenset()):
        if not (parameter.name in IN_BULK and value == [True]):
            yield value


# Tokens for each of several caches.
FOR_EACH: Final = frozenset({"commit_batch", "commit_ahead_batch", "KVCacheManager.step", "Step.commit_ahead"})
# Packed by the machine, which takes a bool for an integer: to look at each item would cost more than the packing.
IN_BULK: Final = frozenset({"base_indices"})

# Of the right type and wrong all the same.
SPECIAL: Final[Mapping[str, Maker]] = {
    "resize_batch.caches": lambda scene: ([scene.active, scene.foreign], [None], [scene.active.state]),
    "commit_batch.caches": lambda scene: ([scene.active, scene.foreign], [None], [scene.active.state]),
    "PlainBatchTables.add.cache": lambda scene: (scene.foreign, scene.closed, scene.suspended),
    "PlainBatchTables.remove.cache": lambda scene: (scene.foreign, scene.closed, scene.active),
    "PlainBatchTables.row.cache": lambda scene: (scene.foreign, scene.closed, scene.active),
    "PlainBatchTables.rows.caches": lambda scene: ([scene.foreign], [scene.active], [None], [scene.suspended.state]),
    "Step.commit.tokens": lambda scene: ([], [1, 2]),
    "Step.commit_ahead.tokens": lambda scene: ([], [1, 2]),
    "Step.advance.num_tokens": lambda scene: ([], [1, 2], [5]),
    "Step.rows.tables": lambda scene: (scene.tables,),
    "KVCacheManager.step.caches": lambda scene: ([scene.foreign], [scene.active, scene.suspended], [None], [scene.active.state]),
    "KVCacheManager.step.num_new_tokens": lambda scene: ([], [1, 2], ["x"], "x", 1.5, True, [math.nan]),
    "KVCacheManager.step.tokens": lambda scene: ([], [1, 2], [None], ["x"], [[-1]]),
    "SuspendYoungest.also": lambda scene: ([None], [scene.active.state]),
    "slots_to_write.begins": lambda scene: ([], [2, 3], [10], [11]),
    "slots_to_write.ends": lambda scene: ([], [2, 3], [1], [11]),
    "slots_to_write.layer_group_id": lambda scene: (7, scene.recurrent_group()),
    "slots_to_read.caches": lambda scene: ([scene.active, scene.foreign], [None], [scene.active.state]),
    "resize_batch.capacities": lambda scene: ([], [11, 12], ["x"], [math.nan]),
    "commit_batch.tokens": lambda scene: ([], [1, 2], [None], ["x"], [[-1]]),
}  # fmt: skip
