"""What the device frees once, although an interrupt may hide it."""

from __future__ import annotations

import pytest

from kv_cache_manager_v2.device.freeing import Freeing
from kv_cache_manager_v2.errors import CuError, LogicError


def raiser(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("unknown", [LogicError("no such event"), CuError("invalid", 400), KeyError(7)])
def test_an_object_in_doubt_that_the_device_does_not_know_is_gone(unknown: Exception) -> None:
    freeing = Freeing()
    with pytest.raises(KeyboardInterrupt):
        freeing.free(7, lambda: raiser(KeyboardInterrupt()))
    assert freeing.doubtful == {7}
    freeing.free(7, lambda: raiser(unknown))


def test_an_object_in_doubt_that_the_device_refuses_to_free_is_still_there() -> None:
    """For another reason than that it does not exist. It stays in doubt."""
    freeing = Freeing()
    with pytest.raises(KeyboardInterrupt):
        freeing.free(7, lambda: raiser(KeyboardInterrupt()))
    with pytest.raises(CuError):
        freeing.free(7, lambda: raiser(CuError("unknown error", 999)))
    assert freeing.doubtful == {7}
    freeing.free(7, lambda: None)


def test_a_refusal_leaves_no_doubt() -> None:
    """A driver's own error has changed nothing, so the next refusal is one as well."""
    freeing = Freeing()
    for _attempt in range(2):
        with pytest.raises(LogicError):
            freeing.free(7, lambda: raiser(LogicError("still mapped")))
        assert not freeing.doubtful


def test_doubt_about_one_object_says_nothing_of_another() -> None:
    """The other one may be freed before the first is asked for again."""
    freeing = Freeing()
    with pytest.raises(KeyboardInterrupt):
        freeing.free(7, lambda: raiser(KeyboardInterrupt()))
    with pytest.raises(LogicError):
        freeing.free(8, lambda: raiser(LogicError("still mapped")))
    freeing.free(8, lambda: None)
    freeing.free(7, lambda: raiser(LogicError("no such event")))
