"""Blocks of more tokens than a machine word has bits."""

from __future__ import annotations

import pytest

from tests.support.models import small
from tests.support.rig import Rig, toks


@pytest.mark.parametrize("position", [1, 30, 31, 32, 33, 62, 63, 64, 65, 100, 127, 128, 130, 200])
@pytest.mark.parametrize("kinds", [("full", "ssm"), ("full",), ((40, 0),)])
def test_every_position_of_a_large_block_can_be_an_endpoint(kinds: tuple[str | tuple[int, int], ...], position: int) -> None:
    """128 tokens a block: a request that ended anywhere is found again at exactly its length."""
    with Rig(small(12, kinds=kinds, tokens_per_block=128)) as rig:
        request = rig.start()
        assert request.advance(toks(0, position))
        request.close()
        assert rig.reused(toks(0, position)) == position
        assert rig.extend(toks(0, 256)) == position
        assert rig.reused(toks(0, 256)) == 256
