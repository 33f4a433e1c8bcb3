"""What must not grow does not, by count: calls of the package's own functions on the interpreted build, where they can be seen.

Times say the same, but only on a quiet machine; see bench/.
"""

from __future__ import annotations

import pytest

from kv_cache_manager_v2.build import COMPILED
from tests.support.inside import calls_of
from tests.support.models import MIB, attention, model
from tests.support.rig import Rig, toks

EVICTED = 16

pytestmark = pytest.mark.skipif(COMPILED, reason="calls between compiled functions are not seen from outside")


def calls_to_evict(slot_bytes: int) -> tuple[int, int]:
    """Prompts of one block each that fill the GPU, and the calls that it takes to grow by `EVICTED` blocks in their place."""
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
