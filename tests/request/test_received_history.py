"""A history that another instance computed exceeds the capacity: blocks that were never written cannot be reused."""

from __future__ import annotations

import pytest

from tests.support.models import small
from tests.support.rig import Rig, toks


@pytest.mark.parametrize("written", [1, 2, 4, 6, 7])
@pytest.mark.parametrize("committed", [0, 1])
@pytest.mark.parametrize("more", [6, 8, 15])
def test_a_block_that_the_jump_leaves_half_written_is_not_published(written: int, committed: int, more: int) -> None:
    """Its page falls out of the window at once, so that the rest of it cannot be received either. Whole blocks are published."""
    with Rig(small(16, kinds=["full", (4, 0)])) as rig:
        tokens = toks(0, written + 17)
        request = rig.start()
        cache = request.cache
        assert cache.resize(written, 0)
        request.write(tokens[:written])
        cache.commit(tokens[:committed])
        assert cache.resize(written + 17, written + 17)
        assert rig.engine is not None
        rig.engine.receive(cache, tokens[written:], written)
        cache.commit(tokens[committed:more])
        cache.stop_committing()
        cache.close()
        for length in range(1, more + 1):
            again = rig.start(tokens[:length])
            again.check()
            again.close()
