"""Costs that must not grow, by count: calls of the package's own functions, which are visible on the interpreted build.

Times say the same, but only on a quiet machine; see bench/.
"""

from __future__ import annotations

import pytest

from kv_cache_manager_v2.build import COMPILED
from tests.support.inside import bytecodes_of, calls_of
from tests.support.models import MIB, attention, model
from tests.support.rig import Rig, toks

EVICTED = 16

pytestmark = pytest.mark.skipif(COMPILED, reason="calls between compiled functions are not seen from outside")


def calls_to_evict(slot_bytes: int) -> tuple[int, int]:
    """Fill the GPU with prompts of one block each, and count the calls of growing by `EVICTED` blocks."""
    config = model([attention(0, slot_bytes)], tokens_per_block=4, gpu=2 * MIB, max_util=1.0)
    with Rig(config, engine=False) as rig:
        resident = rig.manager.get_storage_statistics()[0].total
        for number in range(resident):
            cache = rig.open()
            assert cache.resize(4)
            cache.commit(toks(8 * number, 8 * number + 4))
            cache.close()
        cache = rig.open()
        dropped = rig.manager.movement.pages_dropped(0)
        calls = calls_of(lambda: cache.resize(4 * EVICTED))
        assert rig.manager.movement.pages_dropped(0) == dropped + EVICTED
        cache.close()
    return resident, calls


def test_evicting_a_page_takes_as_many_calls_among_thousands_as_among_hundreds() -> None:
    """The next page to evict is found without a search: only the depth of the trie of siblings may grow."""
    few, calls_among_few = calls_to_evict(8192)
    many, calls_among_many = calls_to_evict(512)
    assert many == 16 * few
    assert calls_among_many <= calls_among_few + 16 * EVICTED  # four levels more, in each of which a few calls are made


def work_to_commit(groups: int) -> int:
    """Bytecodes of the commit of 16 blocks, with so many layer groups that each need all of them."""
    layers = [attention(0, 64), *[attention(i, 64, window=256 + 8 * i) for i in range(1, groups)]]
    with Rig(model(layers, tokens_per_block=8, gpu=16 * MIB, max_util=1.0), engine=False) as rig:
        cache = rig.open(toks(0, 128))
        assert cache.resize(128)
        work = bytecodes_of(lambda: cache.commit(toks(0, 128)))
        cache.close()
    return work


def test_a_commit_is_linear_in_layer_groups() -> None:
    assert work_to_commit(128) < 16 * work_to_commit(8)


def work_to_explain(tokens_per_block: int, count: int) -> int:
    """Bytecodes of explaining the miss of a prompt that differs from a cached one in its last token."""
    config = model([attention(0, 16 * tokens_per_block)], tokens_per_block=tokens_per_block, gpu=4 * MIB, max_util=1.0)
    with Rig(config, engine=False) as rig:
        rig.seed(toks(0, count))
        return bytecodes_of(lambda: rig.manager.explain_miss(None, [*toks(0, count - 1), 1 << 30]))


@pytest.mark.parametrize("tokens_per_block", [4, 4096])
def test_explaining_a_miss_is_linear_in_the_prompt_at_any_block_length(tokens_per_block: int) -> None:
    assert work_to_explain(tokens_per_block, 16384) < 4 * work_to_explain(tokens_per_block, 4096)
