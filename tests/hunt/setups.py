"""What one run of the hunt is built from: a seed decides the model, the tiers, the device and which habits the engine has.

Rule: everything is small, so that pressure, partial blocks and collisions are the usual case.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Final

from kv_cache_manager_v2 import (
    AttentionLayerConfig,
    BufferConfig,
    CacheTierConfig,
    DiskCacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManagerConfig,
    SsmLayerConfig,
    SwaScratchReuseConfig,
)

MIB: Final = 1 << 20
WORD: Final = 8  # bytes of a fingerprint
SCHEDULES: Final = ("random", "threads", "eager")
MODELS: Final = ("full", "window", "full+window", "two pools", "hybrid", "hybrid+window", "scratch")


@dataclass(frozen=True)
class Group:
    """One kind of layer: full attention (no window), a window with sinks, or recurrent."""

    window: int | None
    sinks: int
    ssm: bool
    layers: int
    roles: int
    slot_bytes: int


@dataclass(frozen=True)
class Setup:
    """A configuration and the habits of the engine that uses it."""

    seed: int
    schedule: str
    model: str
    groups: list[Group]
    tokens_per_block: int
    gpu: int
    host: int  # bytes; 0: no such tier
    disk: int
    min_snapshot: bool
    scratch_rewind: int | None
    partial: bool
    backoff: int
    max_util: float
    vocabulary: int
    handles_return: bool  # destroyed streams' handles are given to the next stream
    views: bool  # the engine keeps views on index arrays over growth
    events: bool
    faults: bool
    miss_history: int
    key_hash: str
    text_only: bool
    transfer_timeout: float
    own_streams: float  # share of requests with a stream of their own
    exclusive_host: bool = False
    exclusive_disk: bool = False
    admission: str = "all"  # of the disk tier
    layer_ids: list[list[int]] = field(default_factory=list)  # by group

    @property
    def tiers(self) -> int:
        return 1 + (self.host > 0) + (self.disk > 0)

    def describe(self) -> str:
        memory = "+".join(f"{size / MIB:g}" for size in (self.gpu, self.host, self.disk) if size)
        habits = [
            name
            for name in (
                "handles_return",
                "views",
                "events",
                "faults",
                "partial",
                "min_snapshot",
                "exclusive_host",
                "exclusive_disk",
            )
            if getattr(self, name)
        ]
        return f"seed {self.seed} {self.schedule} {self.model} blocks of {self.tokens_per_block}, {memory} MiB, {' '.join(habits)}"


def draw(seed: int, schedule: str, model: str | None = None, faults: bool | None = None, **fixed: object) -> Setup:
    """The setup of a seed; what is given in `fixed` is not drawn."""
    rng = random.Random(f"hunt {seed} {schedule}")
    chosen = rng.choice(MODELS)
    kind = chosen if model is None else model
    tpb = rng.choice((4, 4, 4, 8, 2, 1) if kind != "scratch" else (2, 4))
    groups = _groups(rng, kind, tpb)
    tiers = rng.choice((1, 2, 2, 3, 3, 3, 4))  # 4: GPU and disk only
    timeout = 0.25 if schedule == "threads" else float(rng.choice((30, 200)))
    with_faults = rng.random() < 0.5
    setup = Setup(
        seed=seed,
        schedule=schedule,
        model=kind,
        groups=groups,
        tokens_per_block=tpb,
        gpu=rng.choice((2, 2, 4)) * MIB * len({group.slot_bytes for group in groups}),
        host=rng.choice((1, 2, 3)) * MIB if tiers in (2, 3) else 0,
        disk=rng.choice((2, 4)) * MIB * len({group.slot_bytes for group in groups}) if tiers in (3, 4) else 0,
        min_snapshot=any(group.ssm for group in groups) or rng.random() < 0.2,
        scratch_rewind=rng.choice((0, 3)) if kind == "scratch" else None,
        partial=rng.random() < 0.75,
        backoff=rng.choice((0, 0, 0, 1, 3)),
        max_util=rng.choice((1.0, 1.0, 0.9)),
        vocabulary=rng.choice((2, 3, 1000)),
        handles_return=rng.random() < 0.3,
        views=rng.random() < 0.3,
        events=rng.random() < 0.4,
        faults=with_faults if faults is None else faults,
        miss_history=rng.choice((0, 0, 50)),
        key_hash=rng.choice(("blake3", "sha256")),
        text_only=rng.random() < 0.5,
        transfer_timeout=timeout,
        own_streams=rng.choice((0.0, 0.3, 1.0)),
        exclusive_host=rng.random() < 0.3,
        exclusive_disk=rng.random() < 0.3,
        admission=rng.choice(("all", "all", "second_use", "adaptive")),
    )
    return replace(setup, **fixed) if fixed else setup  # type: ignore[arg-type]  # fields by name, from the caller


def _groups(rng: random.Random, model: str, tpb: int) -> list[Group]:
    slot = 64 << 10
    layers, roles = rng.choice(((1, 1), (1, 1), (1, 2), (2, 1), (2, 2)))
    window = rng.choice((1, 3, tpb, 2 * tpb + 1, 4 * tpb))
    sinks = rng.choice((0, 0, 1, tpb + 1))
    full = Group(None, 0, False, layers, roles, slot)
    sliding = Group(window, sinks, False, layers, roles, slot)
    state = Group(None, 0, True, 1, rng.choice((1, 2)), rng.choice((slot, 2 * slot)))
    if model == "full":
        return [full]
    if model == "window":
        return [sliding]
    if model == "full+window":
        return [full, sliding]
    if model == "two pools":
        return [full, Group(window, sinks, False, 1, 1, 2 * slot)]
    if model == "hybrid":
        return [full, state]
    if model == "hybrid+window":
        return [full, sliding, state]
    assert model == "scratch", model
    swa = Group(rng.choice((tpb, 2 * tpb + 1)), rng.choice((0, 1)), False, rng.choice((2, 4)), 1, slot)
    return [full, swa] if rng.random() < 0.5 else [swa]


def manager_config(setup: Setup, folder: str) -> KVCacheManagerConfig:
    """The configuration that a setup stands for."""
    tiers: list[CacheTierConfig] = [GpuCacheTierConfig(setup.gpu)]
    if setup.host:
        tiers.append(HostCacheTierConfig(setup.host, setup.exclusive_host))
    if setup.disk:
        tiers.append(DiskCacheTierConfig(setup.disk, folder, exclusive=setup.exclusive_disk, admission=setup.admission))
    layers: list[AttentionLayerConfig | SsmLayerConfig] = []
    for group in setup.groups:
        size = group.slot_bytes // (group.layers * group.roles)
        for _layer in range(group.layers):
            buffers = [BufferConfig(f"role {role}", size) for role in range(group.roles)]
            number = len(layers)
            if group.ssm:
                layers.append(SsmLayerConfig(number, buffers))
            else:
                layers.append(
                    AttentionLayerConfig(number, buffers, group.window, group.sinks if group.window is not None else None)
                )
    return KVCacheManagerConfig(
        setup.tokens_per_block,
        tiers,
        layers,
        max_util_for_resume=setup.max_util,
        enable_partial_reuse=setup.partial,
        reuse_match_backoff=setup.backoff,
        swa_scratch_reuse=None if setup.scratch_rewind is None else SwaScratchReuseConfig(setup.scratch_rewind),
        commit_min_snapshot=setup.min_snapshot,
        snapshot_at_block_ends=setup.min_snapshot and setup.seed % 3 == 0,
        snapshot_at_branches=setup.min_snapshot and setup.seed % 2 == 0,
        hit_curve_rate=(0.0, 0.4, 1.0)[setup.seed % 3],
        text_only=setup.text_only,
        rebalance_min_sampled_kv_caches=20,
        rebalance_cooldown_secs=0.0,
        rebalance_target_ratio_update_interval=5,
        block_key_hash=setup.key_hash,
        miss_history=setup.miss_history,
    )
