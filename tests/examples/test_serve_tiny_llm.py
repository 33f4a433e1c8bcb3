"""The example as a user runs it, and that its comparison can fail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from serve_tiny_llm import SHAPES, make_config, make_engine
from tiny_llm.engine import Engine
from tiny_llm.model import FloatArray, TinyLlama
from tiny_llm.paged import PagedMemory, PagedView
from tiny_llm.proof import compare
from tiny_llm.workload import make_workload

from kv_cache_manager_v2 import EmulatedDriver, KVCacheManager

SCRIPT = Path(__file__).resolve().parent.parent.parent / "examples" / "serve_tiny_llm.py"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["eager", "threads", "random"])
@pytest.mark.parametrize("model", ["llama", "hybrid"])
def test_every_logit_is_equal_under_every_schedule(model: str, schedule: str) -> None:
    command = [sys.executable, str(SCRIPT), "--model", model, "--schedule", schedule]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "are equal, to the bit" in done.stdout
    total = next(line for line in done.stdout.splitlines() if line.strip().startswith("all "))
    counts = [int(cell.replace(",", "")) for cell in total.split()[1:]]
    turns, prompt, gpu, host, disk, computed, generated, suspensions = counts
    assert gpu + host + disk + computed == prompt
    assert min(turns, gpu, host, disk, computed, generated, suspensions) > 0, "the example no longer shows what it is for"
    assert ("beam search: 20 answers" in done.stdout) == (model == "hybrid")


Change = Callable[[PagedMemory], None]


def serve(tmp_path: Path, model_name: str, change: Change, beam_width: int = 1) -> int:
    """Serve some conversations, change something, serve others; the number of logits that differ."""
    shape = SHAPES[model_name]
    model = TinyLlama(shape, 0)
    driver = EmulatedDriver()
    manager = KVCacheManager(make_config(shape, str(tmp_path)), driver=driver)
    engine = make_engine(model, manager, driver, max_running=4)
    engine.serve(make_workload(0, 4, 1, beam_width))
    change(engine.memory)
    others = make_workload(1, 4, 1, beam_width)
    engine.serve([replace(conversation, number=conversation.number + 100) for conversation in others])
    return close(engine, model, manager, driver)


def close(engine: Engine, model: TinyLlama, manager: KVCacheManager, driver: EmulatedDriver) -> int:
    chunks, histories = engine.chunks, engine.histories
    engine.close()
    manager.shutdown()
    driver.close()
    return compare(model, chunks, histories).different


def spoil(pools: dict[int, FloatArray]) -> None:
    for pool in pools.values():
        pool[:] += np.float32(0.5)


@pytest.mark.parametrize(
    ("model_name", "change"),
    [
        ("llama", lambda memory: spoil({0: memory.keys[0]})),
        ("hybrid", lambda memory: spoil(memory.keys)),
        ("hybrid", lambda memory: spoil(memory.states)),
    ],
)
def test_a_page_that_holds_something_else_is_noticed(tmp_path: Path, model_name: str, change: Change) -> None:
    """The second workload begins with the same system prompts, so it reads pages, or snapshots, of the first."""
    assert serve(tmp_path, model_name, lambda _memory: None) == 0
    assert serve(tmp_path, model_name, change) > 0


class StuckMemory(PagedMemory):
    """Forgets to move what beams take over from each other."""

    def reorder(self, beams: Sequence[PagedView], parents: Sequence[int], first_block: int) -> int:
        return 0


@pytest.mark.parametrize("memory_class", [PagedMemory, StuckMemory])
def test_beams_that_do_not_take_over_their_parents_pages_are_noticed(tmp_path: Path, memory_class: type[PagedMemory]) -> None:
    shape = SHAPES["hybrid"]
    model = TinyLlama(shape, 0)
    driver = EmulatedDriver()
    manager = KVCacheManager(make_config(shape, str(tmp_path)), driver=driver)
    engine = make_engine(model, manager, driver)
    engine.memory = memory_class(manager, shape)
    engine.serve(make_workload(0, 4, 1, 4))
    assert engine.beam_searches > 0
    assert (close(engine, model, manager, driver) > 0) == (memory_class is StuckMemory)
