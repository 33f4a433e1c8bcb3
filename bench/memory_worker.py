"""The process that measures the memory of the cache's Python objects: `python -m bench.memory_worker`.

Rule: a figure is the growth of the process's resident memory between two object counts, divided by their difference. So the fixed
cost of a manager cancels out. The driver has no memory and slots are small, so the bytes of pages do not count.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bench.setting import BLOCK, Bench, Setting, prompt_tokens
from bench.worker import check_build
from kv_cache_manager_v2 import KVCache


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def per_cached_block(blocks: int, layers: str) -> float:
    """Bytes for one more cached block with a page of each life cycle, its 128 bytes of tokens among them."""
    bench = Bench(Setting(layers=layers), 2 * blocks + 1024)
    bench.cache_others(blocks)
    before = resident_bytes()
    for serial in range(blocks // 256):
        bench.cache_prompt(prompt_tokens(256 * BLOCK, serial))
    after = resident_bytes()
    bench.close()
    return (after - before) / (blocks // 256 * 256)


def per_open_request(requests: int, tokens: int) -> float:
    """Bytes for one more active request of so many tokens, all of them shared with a cached prompt."""
    bench = Bench(Setting(), 4 * tokens // BLOCK + requests * 2)
    prompt = prompt_tokens(tokens)
    bench.cache_prompt(prompt)
    open_caches: list[KVCache] = []

    def open_some() -> None:
        for _i in range(requests):
            cache = bench.manager.create_kv_cache(None, prompt)
            assert cache.resume(bench.stream)
            open_caches.append(cache)

    open_some()
    before = resident_bytes()
    open_some()
    after = resident_bytes()
    for cache in open_caches:
        cache.close()
    bench.close()
    return (after - before) / requests


WEIGHINGS: Final[dict[str, Callable[[bool], float]]] = {
    "cached block": lambda quick: per_cached_block(25_600 if quick else 256_000, "full"),
    "cached block, full + window": lambda quick: per_cached_block(25_600 if quick else 256_000, "window"),
    "open request of 1 block": lambda quick: per_open_request(500 if quick else 5000, BLOCK),
    "open request of 256 blocks": lambda quick: per_open_request(200 if quick else 1000, 256 * BLOCK),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.memory_worker")
    parser.add_argument("title", choices=list(WEIGHINGS))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    check_build()
    print(json.dumps(WEIGHINGS[options.title](options.quick)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
