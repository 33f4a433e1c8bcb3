"""An engine's id of a request: any object that has a hash."""

from __future__ import annotations

import enum
import logging
import uuid
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import pytest

from kv_cache_manager_v2 import ConfigError, LogicError
from tests.support.models import small
from tests.support.rig import Rig, toks


class Name(enum.Enum):
    """Ids of an engine."""

    FIRST = "first"


@dataclass(frozen=True)
class Pair:
    """Equal to another pair of the same numbers."""

    rank: int
    number: int


class Hostile:
    """Its comparison raises; its hash and its text work once."""

    def __init__(self) -> None:
        self.asked = 0

    def __hash__(self) -> int:
        self.asked += 1
        if self.asked > 1:
            raise RuntimeError("hashed again")
        return 5

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __repr__(self) -> str:
        return "<a hostile id>"


class Unshowable:
    """Has a hash and no text."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


IDS: list[tuple[Hashable, Hashable]] = [  # and an equal object
    (0, 0),
    (-1, -1),
    (2**64, 2**64),
    ("chat-7", "chat-" + str(7)),
    (b"seven", bytes([115, 101, 118, 101, 110])),
    (1.5, 1.5),
    (("a", 1), ("a", 1)),
    (uuid.UUID(int=7), uuid.UUID(int=7)),
    (Name.FIRST, Name("first")),
    (Pair(0, 7), Pair(0, 7)),
    (True, True),
]


@pytest.mark.parametrize(("given", "equal"), IDS, ids=str)
def test_an_id_is_kept_and_compared_by_equality(given: Hashable, equal: Hashable) -> None:
    """`id` is the object itself. Marks of statistics are found by an equal object, and by no other."""
    with Rig(small(8)) as rig:
        manager = rig.manager
        cache = rig.own(manager.create_kv_cache(id=given))
        assert cache.id is given
        assert cache.resume(rig.stream)
        assert cache.resize(8)
        assert manager.get_dirty_stats_kv_cache_ids() == {equal}
        cache.commit_pending_stats()
        assert manager.get_dirty_stats_kv_cache_ids() == set()
        manager.mark_stats_excluded(equal)
        assert manager.is_stats_excluded(given)
        assert not manager.is_stats_excluded((equal,))
        manager.clear_stats_excluded(given)
        assert not manager.is_stats_excluded(equal)
        assert str(given) in repr(cache) or repr(given) in repr(cache)


def test_an_integer_of_any_type_is_the_integer() -> None:
    with Rig(small(8)) as rig:
        cache = rig.own(rig.manager.create_kv_cache(id=np.int64(7)))
        assert type(cache.id) is int
        assert rig.own(cache.fork(id="twin")).id == "twin"


def test_the_code_of_an_id_disturbs_no_call(caplog: pytest.LogCaptureFixture) -> None:
    """An object whose methods raise is an id like any other: it equals itself alone."""
    with Rig(small(8)) as rig, caplog.at_level(logging.WARNING):
        first, second = Hostile(), Hostile()
        for given in (first, second):
            cache = rig.own(rig.manager.create_kv_cache(None, toks(0, 4), given))
            assert cache.resume(rig.stream)
            assert cache.resize(8)
        with pytest.raises(LogicError, match="<a hostile id>, <a hostile id>"):
            rig.manager.clear_reusable_blocks()
        rig.manager.check_invariants()


@pytest.mark.parametrize("given", [[1], {}, ("a", []), Unshowable()], ids=lambda value: type(value).__name__)
def test_an_object_without_a_hash_is_refused(given: Hashable) -> None:
    """The message has its class and the remedy."""
    with (
        Rig(small(8)) as rig,
        pytest.raises(ConfigError, match=f"id is of class {type(given).__name__}: .*; pass an int, a str or"),
    ):
        rig.manager.create_kv_cache(id=given)
