"""An engine whose kernels are numpy code: steps, token slots and `order` give it the right bytes, on every schedule."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kv_cache_manager_v2 import KVCache, Step, SuspendYoungest
from kv_cache_manager_v2.extras.arrays import BatchTables, pool_array
from kv_cache_manager_v2.ids import LayerId
from tests.support.engine import Token
from tests.support.models import KEY, Kind, small
from tests.support.rig import Rig

KINDS: tuple[Kind, ...] = ("full", (11, 5))
BLOCK = 4


class NumpyEngine:
    """Writes each token's id at its slot in each layer, and compares what attention would read with what was written."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        manager = rig.manager
        self.layers: list[tuple[int, Any, Any, Any]] = []  # group, converter, pages as tokens, configuration
        for layer in rig.config.layers:
            words = layer.buffers[0].size // BLOCK // 4
            pages = pool_array(manager, layer.layer_id, KEY, np.int32, (BLOCK, words))
            converter = manager.get_page_index_converter(layer.layer_id, KEY)
            self.layers.append((rig.group(layer.layer_id), converter, pages.reshape(-1, words), layer))
        self.tables = BatchTables(manager, 16, 32)
        self.tokens: dict[KVCache, list[Token]] = {}  # all tokens of each request, in the end
        self.read = 0

    def run(self, step: Step, counts: list[int]) -> None:
        self.rig.driver.order(self.rig.stream)
        histories = [cache.history_length for cache in step.caches]
        new = [self.tokens[cache][at : at + count] for cache, at, count in zip(step.caches, histories, counts, strict=True)]
        flat: list[Any] = [token for tokens in new for token in tokens]
        rows = np.asarray(step.rows(self.tables))
        for group, converter, pages, layer in self.layers:
            written = np.asarray(step.slots_to_write(group, converter).slots)
            assert len(set(written.tolist())) == len(flat)
            pages[written, 0] = flat
            table = self.tables.table(group)[rows]
            last = [(at + count - 1) // BLOCK for at, count in zip(histories, counts, strict=True)]
            at_end = np.asarray(converter(table[np.arange(len(rows)), last]))
            assert (at_end >= 0).all()
            slots, offsets, total = step.slots_to_read(group, converter)
            seen = pages[np.asarray(slots), 0]
            self.read += total
            for number, cache in enumerate(step.caches):
                begin, end = histories[number], histories[number] + counts[number]
                first = 0 if layer.window_size is None else max(0, begin + 1 - layer.window_size)
                wanted = [*self.tokens[cache][: min(first, layer.sink_size)], *self.tokens[cache][first:end]]
                assert seen[np.asarray(offsets)[number] : np.asarray(offsets)[number + 1]].tolist() == wanted
        step.commit(new)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("schedule", ["eager", "random", "threads"])
def test_bytes_of_a_numpy_engine(schedule: str, seed: int) -> None:
    """A dozen conversations that share prefixes, in chunks and token by token, with more of them than fit the GPU."""
    rng = random.Random(seed)
    with Rig(small(40, kinds=KINDS, tokens_per_block=BLOCK, host_slots=200), schedule, seed, engine=False) as rig:
        engine = NumpyEngine(rig)
        for number in range(12):
            tokens: list[Token] = [
                *range(100, 100 + 4 * (number % 4)),
                *range(1000 * number, 1000 * number + 10 + rng.randrange(30)),
            ]
            cache = rig.create(tokens[:-1])
            engine.tokens[cache] = tokens
            engine.tables.add(cache)
        running: list[KVCache] = list(engine.tokens)
        suspensions = 0
        for _step in range(2000):
            active = [cache for cache in running if cache.is_active or cache.resume(rig.stream)]
            chosen = rng.sample(active, min(len(active), 4))
            counts = [min(rng.choice([1, 1, 7]), len(engine.tokens[cache]) - cache.history_length) for cache in chosen]
            with rig.manager.step(chosen, counts, make_room=SuspendYoungest(active)) as step:
                if step.caches:
                    engine.run(step, [counts[position] for position in step.positions])
            suspensions += sum([1 for cache in active if not cache.is_active])
            for cache in list(running):
                if cache.history_length == len(engine.tokens[cache]):
                    cache.close()
                    running.remove(cache)
            if not running:
                break
        assert not running
        assert suspensions > 0
        assert engine.read > 1000
        assert (engine.tables.table(rig.group(LayerId(0))) == -1).all()
