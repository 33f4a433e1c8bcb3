"""Names of the reference that an engine may call, with its meanings."""

from __future__ import annotations

import pytest

from tests.support.models import small
from tests.support.rig import Rig, toks


def test_the_diagnostics_of_a_hybrid_match_are_ordered() -> None:
    """reused <= before hybrid pruning <= divergence: snapshots at 8 only, attention to 10, a path of 12."""
    with Rig(small(24, kinds=("full", "ssm"))) as rig:
        request = rig.start()
        assert request.advance(toks(0, 8))
        assert request.advance(toks(8, 12))
        request.close()
        cache = rig.create(toks(0, 11))
        assert cache.num_committed_tokens == 8
        assert cache._get_num_reusable_tokens_before_hybrid_pruning() == 11
        assert cache._get_num_reusable_tokens_before_pruning() == 11


def test_a_cache_without_tokens_has_no_diagnostics() -> None:
    with Rig(small(4)) as rig:
        cache = rig.create()
        assert cache._get_num_reusable_tokens_before_pruning() == 0
        assert cache._get_num_reusable_tokens_before_hybrid_pruning() == 0


def test_the_finish_event_is_never_there() -> None:
    """The reference has one only inside its transitions: reading it is a ValueError."""
    with Rig(small(4)) as rig, pytest.raises(ValueError, match="finish_event"):
        _ = rig.create().finish_event
