"""Serves conversations with a small language model whose keys and values live in kv_cache_manager_v2's pages.

    python examples/serve_tiny_llm.py [--model llama|hybrid] [--seed N] [--schedule eager|threads|random]

`llama` has attention layers, one of them with a sliding window. `hybrid` has recurrent layers, full attention and a window: a
prefix can be reused where a snapshot of the recurrent state was kept. Every third of its answers begins with a beam search.

There is no GPU: the emulated device runs streams, copies and file transfers as one would. The GPU tier holds a fraction of what the
conversations need, so prefixes are shared, pages move to host memory and disk and back, and requests are suspended and resumed.
At the end every logit is compared with a run that uses no cache manager. Exit status 0 if all are equal to the bit, else 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from typing import Literal

from tiny_llm.engine import Engine
from tiny_llm.model import HYBRID_SHAPE, ModelShape, TinyLlama
from tiny_llm.paged import layer_configs
from tiny_llm.proof import compare
from tiny_llm.report import conversation_table, movement_lines
from tiny_llm.workload import make_workload

from kv_cache_manager_v2 import (
    BatchDesc,
    CacheTier,
    DiskCacheTierConfig,
    EmulatedDriver,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheDesc,
    KVCacheManager,
    KVCacheManagerConfig,
)

MIB = 1 << 20
TOKENS_PER_BLOCK = 16
CHUNK_TOKENS = 64
MAX_RUNNING = 8
NUM_CONVERSATIONS = 12
NUM_TURNS = 5
BEAM_WIDTH = 3  # of the hybrid model's beam searches
SHAPES = {"llama": ModelShape(), "hybrid": HYBRID_SHAPE}
TIER_NAMES = {CacheTier.GPU_MEM: "GPU", CacheTier.HOST_MEM: "host", CacheTier.DISK: "disk"}


def make_config(shape: ModelShape, disk_path: str) -> KVCacheManagerConfig:
    """Three tiers: a GPU for about four of the conversations, a smaller host tier, and a disk for the rest."""
    unit = MIB if shape.recurrent else 2 * MIB  # the hybrid model needs half the memory
    return KVCacheManagerConfig(
        TOKENS_PER_BLOCK,
        [GpuCacheTierConfig(2 * unit), HostCacheTierConfig(unit), DiskCacheTierConfig(8 * unit, disk_path)],
        layer_configs(shape, TOKENS_PER_BLOCK),
        typical_step=BatchDesc([KVCacheDesc(512, 480)] * 4),
        commit_min_snapshot=bool(shape.recurrent),
        commit_stats_on_close=True,
    )


def make_engine(model: TinyLlama, manager: KVCacheManager, driver: EmulatedDriver, max_running: int = MAX_RUNNING) -> Engine:
    """Commits token by token, or where snapshots are worth their slots: at the ends of chunks."""
    commit_every = CHUNK_TOKENS if model.shape.recurrent else 1
    return Engine(model, manager, driver, max_running=max_running, chunk_tokens=CHUNK_TOKENS, commit_every=commit_every)


def main() -> int:
    """Serve, report, compare; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Serve conversations with a small model from managed pages, and check every logit."
    )
    parser.add_argument("--model", choices=list(SHAPES), default="llama", help="what is served (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the weights, the conversations and the random schedule"
    )
    parser.add_argument(
        "--schedule", choices=["eager", "threads", "random"], default="threads", help="how the device runs its streams"
    )
    options = parser.parse_args()
    schedule: Literal["eager", "threads", "random"] = options.schedule
    started = time.perf_counter()
    shape = SHAPES[options.model]
    model = TinyLlama(shape, options.seed)
    driver = EmulatedDriver(schedule, options.seed)
    with tempfile.TemporaryDirectory() as disk_path:
        manager = KVCacheManager(make_config(shape, disk_path), driver=driver)
        engine = make_engine(model, manager, driver)
        engine.serve(make_workload(options.seed, NUM_CONVERSATIONS, NUM_TURNS, BEAM_WIDTH if shape.recurrent else 1))
        served = time.perf_counter()
        tiers = [TIER_NAMES[tier] for tier in manager.cache_tier_list]
        print(conversation_table(engine.stats, tiers))
        print(movement_lines(manager, tiers))
        if engine.beam_searches:
            pages = f"{engine.beam_pages_copied:,} pages and states copied between beams"
            print(f"beam search: {engine.beam_searches} answers begun with {BEAM_WIDTH} beams, {pages}")
        engine.close()
        manager.shutdown()
        driver.close()
    result = compare(model, engine.chunks, engine.histories)
    compared = time.perf_counter() - served
    print(f"served in {served - started:.1f} s ({engine.steps} steps, {schedule} schedule), compared in {compared:.1f} s")
    if result.different:
        print(
            f"WRONG: {result.different:,} of {result.logits:,} logits differ; the first: {result.first_difference}", file=sys.stderr
        )
        return 1
    print(f"all {result.logits:,} logits of {result.chunks:,} chunks are equal, to the bit, to a run without any cache manager")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
