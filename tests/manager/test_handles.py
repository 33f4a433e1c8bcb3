"""Handles that are copied, pickled, constructed by the user, or used after the end."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import textwrap

import pytest

from kv_cache_manager_v2 import LogicError, PlannedDropHandle
from tests.support.models import small
from tests.support.rig import Rig, toks


def test_handles_cannot_be_copied_or_pickled() -> None:
    """A copy of a handle would end the request, or apply the drop, when it is dropped; a manager owns its memory."""
    with Rig(small(8, kinds=["full", (4, 0)])) as rig:
        request = rig.start()
        assert request.advance(toks(0, 10))
        request.cache.stop_committing()
        handle = request.cache.plan_committed_block_drop()
        assert isinstance(handle, PlannedDropHandle)
        for target in (request.cache, rig.manager, handle):
            for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(LogicError, match="cannot be copied"):
                    duplicate(target)
        gc.collect()
        rig.settle()
        assert request.cache.is_active
        handle.drop()


@pytest.mark.parametrize("name", ["KVCache", "KVCacheManager", "PlannedDropHandle"])
def test_a_handle_that_was_never_made_ends_quietly(name: str) -> None:
    """A constructor called with wrong arguments raises, and the incomplete object is freed silently."""
    script = f"""
        import gc
        import kv_cache_manager_v2 as kvcm
        for arguments in ((), (None,), (None, None), (1, 2, 3, 4, 5, 6)):
            try:
                kvcm.{name}(*arguments)
            except Exception:
                pass
            else:
                raise SystemExit("it was made")
        gc.collect()
    """
    if name != "KVCacheManager":
        script = script.replace(", (None, None)", "")  # with the right number of arguments the interpreted build makes one
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_cache_still_knows_all_its_tokens() -> None:
    """`committed_tokens` and `num_committed_tokens` agree after `close` too, those of the last, partial block included."""
    with Rig(small(8)) as rig:
        request = rig.start()
        assert request.advance(toks(0, 5))
        assert request.cache.resize(8)
        request.cache.commit([5])
        request.close()
        assert request.cache.num_committed_tokens == 6
        assert request.cache.committed_tokens == toks(0, 6)
