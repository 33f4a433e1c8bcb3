"""The example as a user runs it, and that its comparison can fail."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from serve_tiny_llm import CHUNK_TOKENS, make_config
from tiny_llm.engine import Engine
from tiny_llm.model import ModelShape, TinyLlama
from tiny_llm.proof import compare
from tiny_llm.workload import make_workload

from kv_cache_manager_v2 import EmulatedDriver, KVCacheManager

SCRIPT = Path(__file__).resolve().parent.parent.parent / "examples" / "serve_tiny_llm.py"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["eager", "threads", "random"])
def test_every_logit_is_equal_under_every_schedule(schedule: str) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--schedule", schedule], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "are equal, to the bit" in done.stdout
    total = next(line for line in done.stdout.splitlines() if line.strip().startswith("all "))
    counts = [int(cell.replace(",", "")) for cell in total.split()[1:]]
    turns, prompt, gpu, host, disk, computed, generated, suspensions = counts
    assert gpu + host + disk + computed == prompt
    assert min(turns, gpu, host, disk, computed, generated, suspensions) > 0, "the example no longer shows what it is for"


def serve(tmp_path: Path, *, corrupt: bool) -> int:
    """Serve some conversations, then others; the number of logits that differ. `corrupt` changes a layer's keys in between."""
    shape = ModelShape()
    model = TinyLlama(shape, 0)
    driver = EmulatedDriver()
    manager = KVCacheManager(make_config(shape, str(tmp_path)), driver=driver)
    engine = Engine(model, manager, driver, max_running=4, chunk_tokens=CHUNK_TOKENS)
    engine.serve(make_workload(0, 4, 1))
    if corrupt:
        engine.memory.keys[0][:] += np.float32(0.5)
    engine.serve([replace(conversation, number=conversation.number + 100) for conversation in make_workload(1, 4, 1)])
    chunks, histories = engine.chunks, engine.histories
    engine.close()
    manager.shutdown()
    driver.close()
    return compare(model, chunks, histories).different


def test_a_page_that_holds_something_else_is_noticed(tmp_path: Path) -> None:
    """The second workload begins with the same system prompts, so it reads pages of the first."""
    assert serve(tmp_path, corrupt=False) == 0
    assert serve(tmp_path, corrupt=True) > 0
