"""Two blocks with one key: a digest enters a key as the bytes that eight ids would have."""

from __future__ import annotations

import pytest

from tests.manager.engine import Token
from tests.manager.helpers import Rig, small

IDS: list[Token] = list(range(1, 9))
DIGEST: list[Token] = [b"".join(n.to_bytes(4, "little") for n in range(1, 9))]


@pytest.mark.parametrize("order", [(IDS, DIGEST), (DIGEST, IDS)], ids=["digest last", "ids last"])
@pytest.mark.parametrize("probe_first", [True, False])
def test_blocks_of_equal_keys_come_and_go_beside_each_other(order: tuple[list[Token], list[Token]], probe_first: bool) -> None:
    """Probing by keys keeps an index of them; a second block of the same key neither breaks the eviction of the first nor is it
    mixed up with it by a match of tokens."""
    with Rig(small(8, tokens_per_block=8)) as rig:
        if probe_first:
            assert rig.manager.probe_reuse_by_keys(None, []) == 0
        for tokens in order:
            rig.seed(tokens)
        assert rig.manager.probe_reuse_by_keys(None, []) == 0
        rig.settle()
        assert [rig.probe(tokens) for tokens in order] == [len(tokens) for tokens in order]
        rig.take(8).close()  # evicts both
        rig.settle()
        assert [rig.probe(tokens) for tokens in order] == [0, 0]
