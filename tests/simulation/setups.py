"""What a run simulates: a model's layers, a few slots of memory on each tier, a device's schedule, all drawn from one seed.

Rule: everything is so small that every tier overflows, prefixes collide, and blocks end up partial: two or three different tokens,
blocks of one to eight, pools of a handful of slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

from kv_cache_manager_v2.config import (
    AttentionLayerConfig,
    BufferConfig,
    CacheTierConfig,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    LayerConfig,
    SsmLayerConfig,
    SwaScratchReuseConfig,
)
from kv_cache_manager_v2.ids import DataRole, LayerId
from tests.simulation.model import Kind

GRAIN: Final = 2 << 20  # smallest chunk of the GPU and of a disk tier, bytes

SHAPES: Final = (
    "full",
    "full+window",
    "window with sinks",
    "two pool groups",
    "min snapshot",
    "full+ssm",
    "full+window+ssm",
    "ssm",
    "scratch",
)


@dataclass
class Setup:
    """One configuration and how it is driven."""

    seed: int
    shape: str
    size: int  # tokens per block
    kinds: list[Kind]  # by life cycle
    config: KVCacheManagerConfig
    schedule: str
    timeout_calls: int  # driver calls after which a file transfer counts as hanging
    num_streams: int
    alphabet: list[int | bytes]
    num_scopes: int
    longest: int  # tokens of the longest request
    max_rewind: int = 0
    scratch: bool = False
    gpu_slots: int = 0  # about, for each pool group
    tiers: str = "ghd"
    faults: bool = False

    def describe(self) -> str:
        config = self.config
        return (
            f"{self.shape}, {self.size} tokens a block, kinds {[str(kind) for kind in self.kinds]}, tiers {self.tiers} with about "
            f"{self.gpu_slots} GPU slots, {self.schedule} schedule, back-off {config.reuse_match_backoff}, "
            f"partial {config.enable_partial_reuse}, adoption {config.allow_seq_rebasing}, "
            f"snapshots {config.commit_min_snapshot}, at block ends only {config.snapshot_at_block_ends}, "
            f"resume up to {config.max_util_for_resume}, colder tiers keep copies {[t.keeps_copies for t in config.cache_tiers]}"
        )


@dataclass
class _Draft:
    """Layers while they are drawn."""

    layers: list[LayerConfig] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)


def draw(seed: int, path: str, shape: str | None = None, faults: bool | None = None) -> Setup:
    """A setup from a seed; `path` is where the disk tier puts its files."""
    random = Random(seed)
    shape = SHAPES[seed % len(SHAPES)] if shape is None else shape
    size = random.choice((1, 2, 2, 3, 4, 4, 5, 8))
    kinds = _kinds(random, shape, size)
    floor = structural_floor(kinds, size)
    slots = max(floor, 2) + random.randrange(1, 7)
    tiers = random.choice(("ghd", "ghd", "ghd", "ghd", "gh", "gd", "g"))
    layers, totals = _layers(random, kinds, size, slots, shape, seed % 2 == 1)
    grains = sum(len(sizes) for sizes in totals) + (2 if shape == "two pool groups" else 0)
    exclusive = (seed % 7 < 2, seed % 11 < 3)
    admission = ("all", "all", "second_use", "adaptive")[seed % 13 % 4]
    min_snapshot = "ssm" in shape or shape == "min snapshot"
    config = KVCacheManagerConfig(
        tokens_per_block=size,
        cache_tiers=_tiers(random, tiers, path, slots, grains, totals, exclusive, admission),
        layers=layers,
        max_util_for_resume=random.choice((0.97, 1.0, 0.75)),
        enable_partial_reuse=random.random() < 0.75,
        reuse_match_backoff=random.choice((0, 0, 0, 1, 2, size + 1)),
        swa_scratch_reuse=SwaScratchReuseConfig(random.randrange(0, 4)) if shape == "scratch" else None,
        commit_min_snapshot=min_snapshot,
        snapshot_at_block_ends=min_snapshot and seed % 5 < 2,
        hit_curve_rate=(0.0, 0.4, 1.0)[seed % 3],
        allow_seq_rebasing=seed % 4 > 0,
        rebalance_min_sampled_kv_caches=3,
        rebalance_cooldown_secs=0.0,
        rebalance_target_ratio_update_interval=2,
        rebalance_ratio_threshold=1.02,
        rebalance_moving_average_decay=0.5,  # the latest lengths decide, so that shares keep changing
    )
    return Setup(
        seed=seed,
        shape=shape,
        size=size,
        kinds=kinds,
        config=config,
        schedule=random.choice(("random", "random", "eager")),
        timeout_calls=random.choice((60, 300)),
        num_streams=random.randrange(1, 4),
        alphabet=_alphabet(random),
        num_scopes=random.randrange(1, 4),
        longest=max(6, min(64 if shape == "scratch" else 48, size * (slots * (3 if shape == "scratch" else 1) - len(kinds) + 1))),
        max_rewind=config.swa_scratch_reuse.max_rewind_len if config.swa_scratch_reuse is not None else 0,
        scratch=shape == "scratch",
        gpu_slots=slots,
        tiers=tiers,
        faults=random.random() < 0.6 if faults is None else faults,
    )


def plain(
    path: str,
    kinds: list[Kind],
    size: int = 4,
    slots: int = 16,
    tiers: str = "ghd",
    schedule: str = "eager",
    max_rewind: int | None = None,
    faults: bool = False,
    exclusive: tuple[bool, bool] = (True, True),
) -> Setup:
    """A setup without any draw, for a test that knows what it wants."""
    random = Random(0)
    layers, totals = _layers(random, kinds, size, slots, "")
    scratch = SwaScratchReuseConfig(max_rewind) if max_rewind is not None else None
    config = KVCacheManagerConfig(
        tokens_per_block=size,
        cache_tiers=_tiers(random, tiers, path, slots, sum(len(sizes) for sizes in totals), totals, exclusive, "all"),
        layers=layers,
        swa_scratch_reuse=scratch,
        commit_min_snapshot=any(kind.recurrent for kind in kinds),
        max_util_for_resume=1.0,
    )
    rewind = max_rewind if max_rewind is not None else 0
    return Setup(0, "plain", size, kinds, config, schedule, 60, 2, [0, 1], 1, 64, rewind, scratch is not None, slots, tiers, faults)


def structural_floor(kinds: list[Kind], size: int) -> int:
    """Slots that one pool group for all of them needs at least."""
    floors = [kind.sink_blocks + (kind.window + size - 2) // size + 1 for kind in kinds if kind.window is not None]
    widest = max(floors, default=1)
    return sum(floors) + sum(1 if kind.recurrent else widest for kind in kinds if kind.window is None)


def _kinds(random: Random, shape: str, size: int) -> list[Kind]:
    full, ssm = Kind(), Kind(recurrent=True)
    window = Kind(window=random.randrange(1, 2 * size + 3))
    if shape == "full":
        return [full]
    if shape == "full+window" or shape == "two pool groups":
        return [full, window] if random.random() < 0.5 else [window, full]
    if shape == "window with sinks":
        sinks = Kind(window=window.window, sink_blocks=random.choice((1, 1, 2)))
        return random.choice(([sinks], [sinks, window], [full, sinks]))
    if shape == "min snapshot":
        return random.choice(([full, window], [window], [window, Kind(window=(window.window or 0) + size)]))
    if shape == "full+ssm":
        return [full, ssm]
    if shape == "full+window+ssm":
        return [window, ssm, full]
    if shape == "ssm":
        return random.choice(([ssm], [ssm, window]))
    assert shape == "scratch", shape
    return random.choice(([full, window], [window], [window, Kind(window=(window.window or 0) + size)]))


def _layers(
    random: Random, kinds: list[Kind], size: int, slots: int, shape: str, both: bool = False
) -> tuple[list[LayerConfig], list[list[int]]]:
    """Layers of each kind, interleaved, and the slot bytes of each pool by pool group.

    `both`: a recurrent layer after one of attention is a part of that.
    """
    unit = 16 * size  # two words for each token
    depth = random.choice((1, 2))  # layers of each kind
    apart = random.random() < 0.5  # states of another size than pages: a pool group of their own
    unlike = random.random() < 0.15  # pages of two sizes
    extra = random.random() < 0.3  # a second, smaller buffer size: two pools in each group
    layers: list[LayerConfig] = []
    totals: list[list[int]] = []
    sizes_of: list[list[int]] = []
    for number, kind in enumerate(kinds):
        slot = GRAIN // slots
        if shape == "two pool groups":  # several grains each, so that shares can change
            slot = 2 * GRAIN // slots // (2 if number > 0 else 1)
        elif (kind.recurrent and apart) or (number > 0 and unlike):
            slot //= 2
        big = slot // (2 * depth) // unit * unit
        sizes = [big * 2 * depth] + ([unit * depth] if extra else [])
        sizes_of.append(sizes)
        if sizes not in totals:
            totals.append(sizes)
    for level in range(depth):
        for number, kind in enumerate(kinds):
            big = sizes_of[number][0] // (2 * depth)
            buffers = [BufferConfig(DataRole("key"), big), BufferConfig(DataRole("value"), big)]
            if extra:
                buffers.append(BufferConfig(DataRole("scale"), unit))
            if not kind.recurrent and size % 2 == 0 and number == 0 and level == 0:
                buffers[1] = BufferConfig(DataRole("value"), big // (size // 2), 2)  # its kernel uses blocks of two tokens
            layer = LayerId(level * len(kinds) + number)
            if kind.recurrent and both and number > 0:
                states = [BufferConfig(DataRole(f"{buffer.role} state"), buffer.size) for buffer in buffers]
                before = layers.pop()
                assert isinstance(before, AttentionLayerConfig)
                layers.append(replace(before, states=states))
            elif kind.recurrent:
                layers.append(SsmLayerConfig(layer, buffers))
            else:
                sinks = kind.sink_blocks * size if kind.sink_blocks else None
                layers.append(AttentionLayerConfig(layer, buffers, kind.window, sinks))
    return layers, totals


def _tiers(
    random: Random,
    tiers: str,
    path: str,
    slots: int,
    grains: int,
    totals: list[list[int]],
    exclusive: tuple[bool, bool],
    admission: str,
) -> list[CacheTierConfig]:
    """`exclusive`: of the host and of the disk tier. `admission`: of the disk tier."""
    made: list[CacheTierConfig] = []
    for letter in tiers:
        if letter == "g":
            made.append(GpuCacheTierConfig(GRAIN * grains))
        elif letter == "h":
            made.append(HostCacheTierConfig(sum(map(sum, totals)) * random.randrange(2, slots + 4), exclusive[0]))
        else:
            made.append(DiskCacheTierConfig(GRAIN * grains, path, exclusive=exclusive[1], admission=admission))
    return made


def _alphabet(random: Random) -> list[int | bytes]:
    """Ids, and digests whose words could not be ids: the outside's block keys hash digests without a mark, so that a digest of
    small words would give two sequences one key."""
    tokens: list[int | bytes] = [0, 1] if random.random() < 0.6 else [0, 1, 2**31 - 1]
    if random.random() < 0.4:
        tokens.append(b"\x00\x00\x00\x80" * 8)  # looks like the packed form's mark of a digest
    if random.random() < 0.2:
        tokens.append(b"\xff" * 32)
    return tokens
