"""The live hit curve of a manager against what a plan computes from the same prompts."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kv_cache_manager_v2 import ConfigError, LogicError, ReuseScope
from kv_cache_manager_v2.reuse.live_curve import LiveCurve
from kv_cache_manager_v2.reuse.tokens import pack
from tests.planning.test_sampled_curve import SIZE, conversations, exact
from tests.support.engine import Token
from tests.support.models import slot_size, small
from tests.support.rig import HOST, Rig, mixed, toks

BLOCKS = 64  # on the GPU


def prompt_of(ids: list[int]) -> list[Token]:
    """The same tokens for the same id."""
    tokens: list[Token] = []
    for block in ids:
        chooser = random.Random(block)
        tokens.extend([chooser.randrange(1 << 31) for _token in range(SIZE)])
    return tokens


def test_at_rate_1_a_manager_says_what_a_plan_of_its_prompts_says() -> None:
    """Whatever its own size; requests that warm the cache are not counted."""
    prompts = conversations(1, 120, 2)
    config = small(BLOCKS, tokens_per_block=SIZE)
    config.hit_curve_rate = 1.0
    with Rig(config) as rig:
        for ids in prompts:
            rig.extend(prompt_of(ids))
        curve, right = rig.manager.hit_curve(), exact(prompts)
        assert (curve.exact, curve.total_tokens) == (True, right.total_tokens)
        assert [curve.hits(size) for size in range(256)] == [right.hits(size) for size in range(256)]
        assert curve.block_bytes == slot_size(BLOCKS, SIZE)
        rig.manager.restart_hit_curve()
        rig.extend(prompt_of(prompts[-1]))
        assert rig.manager.hit_curve().ceiling == rig.manager.hit_curve().total_tokens == len(prompts[-1]) * SIZE


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    config = small(BLOCKS, tokens_per_block=SIZE)
    config.hit_curve_rate = 1.0
    with Rig(config) as rig:
        request = rig.start(toks(0, SIZE))
        request.advance(toks(0, 3 * SIZE + 5))
        request.close()
        rig.create(toks(0, 4 * SIZE)).close()
        assert rig.manager.hit_curve().ceiling == 3 * SIZE


def found(*prompts: list[Token], scopes: Sequence[ReuseScope] = ()) -> int:
    """Tokens of the last prompt that an unlimited cache finds after the others."""
    curve = LiveCurve(SIZE, 1.0, 100)
    for number, prompt in enumerate(prompts):
        curve.restart()
        curve.look_up(scopes[number] if scopes else ReuseScope(), pack(prompt), [])
    return curve.curve(0, 0).ceiling


@pytest.mark.parametrize("make", [toks, mixed])
def test_a_block_is_known_by_all_tokens_before_it_and_its_scope(make: Callable[[int, int], list[Token]]) -> None:
    """Also among digests."""
    prompt = make(60, 60 + 4 * SIZE)
    assert found(prompt, prompt) == 4 * SIZE
    assert found(prompt, [*prompt[: 2 * SIZE + 1], 1_000, *prompt[2 * SIZE + 2 :]]) == 2 * SIZE
    assert found([*prompt[:1], 1_000, *prompt[2:]], prompt) == 0
    assert found(prompt, prompt, scopes=[ReuseScope(1), ReuseScope(2)]) == 0
    assert found(prompt, []) == 0


def test_what_many_conversations_share_is_counted_exactly_at_any_rate() -> None:
    config = small(BLOCKS, tokens_per_block=SIZE)
    config.hit_curve_rate = 1e-9  # no other block is sampled
    with Rig(config) as rig:
        shared = toks(0, 2 * SIZE)
        for number in range(1, 20):
            rig.extend([*shared, *toks(1000 * number, 1000 * number + SIZE)])
        curve = rig.manager.hit_curve()
        assert curve.total_tokens == 19 * 3 * SIZE
        assert curve.ceiling == curve.hits(2) == 10 * 2 * SIZE, "eight made it a stem, the ninth used it first"


def test_dummy_requests_are_not_counted() -> None:
    config = small(BLOCKS, tokens_per_block=SIZE)
    config.hit_curve_rate = 1.0
    with Rig(config, engine=False) as rig:
        rig.manager.mark_stats_excluded(7)
        rig.create(toks(0, 3 * SIZE), id=7).close()
        assert rig.manager.hit_curve().total_tokens == 0


def test_a_colder_level_has_the_curve_of_what_the_warmer_ones_leave() -> None:
    config = small(8, tokens_per_block=SIZE, host_slots=8)
    config.hit_curve_rate = 1.0
    with Rig(config) as rig:
        for _turn in range(2):
            for beg in (0, 1000, 2000):
                rig.extend(toks(beg, beg + 4 * SIZE))
        assert [rig.manager.hit_curve().hits(size) for size in (8, 12)] == [0, 12 * SIZE]
        assert [rig.manager.hit_curve(HOST).hits(size) for size in (0, 4, 100)] == [0, 12 * SIZE, 12 * SIZE]
        with pytest.raises(ConfigError):
            rig.manager.hit_curve(2)


def test_without_a_rate_there_is_no_curve() -> None:
    with Rig(small(BLOCKS), engine=False) as rig:
        assert rig.manager.hit_curve_rate == 0
        for call in (rig.manager.hit_curve, rig.manager.restart_hit_curve):
            with pytest.raises(LogicError, match="configure hit_curve_rate"):
                call()
    with pytest.raises(ConfigError, match=r"hit_curve_rate is 1\.5"):
        replace(small(BLOCKS), hit_curve_rate=1.5)


def test_threads_may_ask_while_others_serve() -> None:
    config = small(BLOCKS, tokens_per_block=SIZE)
    config.hit_curve_rate = 1.0
    with Rig(config, engine=False) as rig:
        ended = threading.Event()
        seen: list[int] = []

        def ask() -> None:
            while not ended.is_set():
                seen.append(rig.manager.hit_curve().total_tokens)

        def serve(first: int) -> None:
            for number in range(first, first + 50):
                rig.manager.create_kv_cache(None, toks(number, number + 3 * SIZE)).close()

        asker = threading.Thread(target=ask)
        servers = [threading.Thread(target=serve, args=(1000 * number,)) for number in range(3)]
        for thread in (asker, *servers):
            thread.start()
        for thread in servers:
            thread.join()
        ended.set()
        asker.join()
        assert seen == sorted(seen)
        assert rig.manager.hit_curve().total_tokens == 3 * 50 * 3 * SIZE
