"""The process that serves one arm of the A/B run: `python -m bench.ab_worker`, started by `ab.py`."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Final

from bench.conversations import Workload
from bench.engine import Engine
from bench.setting import SLOT, make_driver
from bench.worker import check_build
from kv_cache_manager_v2 import (
    AttentionLayerConfig,
    BufferConfig,
    DataRole,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheManager,
    KVCacheManagerConfig,
    LayerId,
)

BLOCK: Final = 32  # tokens
GPU_BLOCKS_PER_REQUEST: Final = 96  # for 3,072 tokens of each open request, which leaves little for later turns
HOST_BLOCKS_PER_REQUEST: Final = 192


def serve(requests: int, num_open: int, seed: int, slot: int = SLOT) -> dict[str, object]:
    """Serve the requests with slots of so many bytes; what was measured, and what happened, which is the same on every build."""
    driver = make_driver("free")
    layer = AttentionLayerConfig(LayerId(0), [BufferConfig(DataRole("kv"), slot)])
    tiers = [
        GpuCacheTierConfig(GPU_BLOCKS_PER_REQUEST * num_open * slot),
        HostCacheTierConfig(HOST_BLOCKS_PER_REQUEST * num_open * slot),
    ]
    with KVCacheManager(KVCacheManagerConfig(BLOCK, tiers, [layer]), driver=driver) as manager:
        engine = Engine(manager, driver.create_stream(), Workload(seed), num_open)
        gc.freeze()  # as a server does when it is up
        figures = engine.serve(requests)
        movement = manager.movement
        happened = {
            "requests": figures.requests,
            "steps": len(figures.schedule),
            "reused_tokens": figures.reused,
            "preempted": figures.preempted,
            "pages_to_host": movement.pages_moved(0, 1),
            "pages_from_host": movement.pages_moved(1, 0),
            "pages_dropped": movement.pages_dropped(0) + movement.pages_dropped(1),
        }
        manager.check_invariants()
    return {
        "happened": happened,
        "seconds": figures.clock,
        "schedule": figures.schedule,
        "update": figures.update,
        "close": figures.close,
        "first_token": figures.first_token,
        "between_tokens": figures.between_tokens,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.ab_worker")
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--open", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    check_build()
    options.output.write_text(json.dumps(serve(options.requests, options.open, options.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
