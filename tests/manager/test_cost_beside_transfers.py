"""What a call costs beside file transfers in flight: nothing for those of others, of open requests and of closed ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from kv_cache_manager_v2.build import COMPILED
from tests.support.inside import calls_of
from tests.support.models import small
from tests.support.rig import Rig, toks

TOKENS = 16  # of each request: four blocks


def costs(blocks: int, closed: bool, directory: Path) -> tuple[int, int, int]:
    """Requests in flight; the calls of a probe, and of a look at one request's load, beside their reads, which hang."""
    config = small(blocks, host_slots=blocks, disk=(str(directory), 2 * blocks))
    with Rig(config, engine=False, transfer_timeout=1e9) as rig:
        prompts = [toks(100 * i, 100 * i + TOKENS) for i in range(blocks // 8)]
        for prompt in prompts:
            rig.seed(prompt, chunk=4)
        for i in (1, 2):  # fills the GPU, then the host
            rig.seed(toks(10_000_000 * i, 10_000_000 * i + 4 * blocks - 4), chunk=4)
        hanging = rig.driver.hang("read_file", times=None)
        caches = [rig.create(prompt) for prompt in prompts]
        for i, cache in enumerate(caches):
            assert cache.resume(rig.stream)
            if i % 2:  # a block that waits for the load
                assert cache.resize(TOKENS + 4)
                cache.commit(toks(100 * i + TOKENS, 100 * i + TOKENS + 4))
            if closed and i > 0:
                cache.close()
        rig.probe(prompts[0])
        probe = calls_of(lambda: rig.probe(prompts[0]))
        look = calls_of(lambda: caches[0].is_loaded)
        hanging.open()
        rig.driver.synchronize()
        assert closed or caches[1].is_loaded
        assert rig.probe(toks(100, 100 + TOKENS + 4)) == TOKENS + 4
        return len(prompts), probe, look


@pytest.mark.skipif(COMPILED, reason="calls are counted with the interpreter's profiler")
@pytest.mark.parametrize("closed", [False, True])
def test_transfers_of_others_cost_nothing(closed: bool, tmp_path: Path) -> None:
    few, many = (costs(blocks, closed, tmp_path) for blocks in (64, 512))
    assert many[0] == 8 * few[0]
    for one, other in zip(few[1:], many[1:], strict=True):
        assert other < one + 10, "beside more transfers of others a call costs more"
