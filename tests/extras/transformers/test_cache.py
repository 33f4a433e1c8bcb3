"""A `PagedCache` in a loop of one's own: pressure, passes that raise, tokens taken back, and mistakes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from kv_cache_manager_v2 import ConfigError, LogicError, OutOfPagesError
from kv_cache_manager_v2.extras.transformers import PagedStore
from kv_cache_manager_v2.extras.transformers.cache_layers import PagedStateLayer
from kv_cache_manager_v2.extras.transformers.store import SuspendIdle
from kv_cache_manager_v2.storage.planner import Shortage
from tests.extras.transformers.models import make_model, random_tokens
from tests.extras.transformers.rig import MIB, Pair, compute, open_store

pytestmark = pytest.mark.torch


class Fault(Exception):
    """What a layer of the model raises."""


def fail(*_arguments: object) -> None:
    raise Fault


def test_caches_that_take_turns_suspend_each_other(family: str) -> None:
    """Batches of two on a GPU that holds a few: a pass brings its pages back, never at the cost of its own other row."""
    with open_store(make_model(family), "random", host_bytes=32 * MIB) as store:
        pairs: list[Pair] = []
        tokens: list[torch.Tensor] = []
        while not (pairs and store.manager.movement.pages_moved(1, 0) > 0) and len(pairs) < 60:
            prompt = random_tokens(120, seed=len(pairs), rows=2)
            pairs.append(Pair(store, prompt))
            tokens.append(pairs[-1].forward(prompt))
            if len(pairs) % 4 == 0:
                tokens = [pair.forward(token) for pair, token in zip(pairs, tokens, strict=True)]
        assert store.manager.movement.pages_moved(1, 0) > 0


def test_a_pass_that_raises_has_not_changed_the_cache(family: str) -> None:
    """Neither before nor after the first tokens. The same tokens can be passed again."""
    model = make_model(family)
    prompt = random_tokens(70)
    with open_store(model) as store:
        ends = range(41, 71) if store.one_by_one else (69, 70)
        pair = Pair(store, prompt)
        for beg, end in pairwise((0, 40, *ends)):
            hook = model.get_decoder().layers[2].register_forward_pre_hook(fail)
            try:
                with pytest.raises(Fault):
                    compute(model, prompt[:, beg:end], pair.paged)
            finally:
                hook.remove()  # other tests use the model too
            assert pair.paged.get_seq_length() == beg
            if beg:
                pair.paged.suspend()
            token = pair.forward(prompt[:, beg:end])
        hook = model.get_decoder().layers[2].register_forward_pre_hook(fail)
        with pytest.raises(Fault):
            compute(model, token, pair.paged)
        hook.remove()
        pair.paged.close()
        with store.open(torch.cat([prompt, token, token], dim=1)) as cache:
            assert cache.num_reused_tokens == [70]


def test_a_cache_whose_states_were_saved_in_part_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt between two layers: the states are of different lengths, and none of them may be reused."""
    model, prompt = make_model("qwen3_next"), random_tokens(40)
    with open_store(model) as store:
        cache = store.open(prompt)
        layer = cache.layers[1]
        assert isinstance(layer, PagedStateLayer)
        monkeypatch.setattr(layer, "save", fail)
        with pytest.raises(Fault):
            compute(model, prompt, cache)
        with pytest.raises(LogicError, match="interrupted while states were saved"):
            compute(model, prompt, cache)
        cache.close()
        assert store.open(prompt).num_reused_tokens == [0]


def test_rows_can_be_selected_and_repeated(family: str) -> None:
    """As transformers' own cache does it, between passes; a row that is taken twice goes two ways."""
    prompt = random_tokens(40, rows=2)
    with open_store(make_model(family), gpu_bytes=8 * MIB) as store:
        pair = Pair(store, prompt)
        token = pair.forward(prompt)
        for indices in ([1, 1, 0], [2, 0, 0, 1], [3]):
            order = torch.tensor(indices)
            pair.paged.reorder_cache(order)
            pair.own.reorder_cache(order)
            token = pair.forward(token[order] + torch.arange(len(indices))[:, None])


def test_tokens_of_the_last_pass_can_be_taken_back() -> None:
    """After `activate_past_recording`, as in assisted decoding; no others."""
    prompt = random_tokens(60)
    with open_store(make_model("gemma3")) as store:
        pair = Pair(store, prompt)
        for cache in (pair.paged, pair.own):
            cache.activate_past_recording()
        pair.forward(prompt[:, :50])
        pair.forward(prompt[:, 50:])
        with pytest.raises(ConfigError, match="at most the 10 tokens"):
            pair.paged.crop(-11)
        for cache in (pair.paged, pair.own):
            cache.crop(-4)
        assert pair.paged.get_seq_length() == 56
        pair.forward(prompt[:, 20:30])
        pair.paged.close()
        with store.open(torch.cat([prompt[:, :56], prompt[:, 20:30], prompt], dim=1)) as again:
            assert again.num_reused_tokens == [66]


def test_a_shortage_is_an_error_before_anything_is_computed() -> None:
    """Without a colder tier nothing can be suspended. The caches go on once another one is closed."""
    model = make_model("llama")
    with PagedStore(model, gpu_bytes=MIB, tokens_per_block=32) as store:
        prompts = [random_tokens(450, seed=seed) for seed in range(2)]
        first, second = [store.open(prompt) for prompt in prompts]
        compute(model, prompts[0], first)
        with pytest.raises(OutOfPagesError, match="2 caches are open: close some"):
            compute(model, prompts[1], second)
        assert second.get_seq_length() == 0
        first.close()
        compute(model, prompts[1], second)


def test_a_pass_waits_for_file_transfers_that_keep_slots() -> None:
    """Where no cache can be suspended and transfers are in flight, the call is tried again after them."""
    with open_store(make_model("llama")) as store:
        kv = store.open(random_tokens(8)).rows[0].kv
        policy = SuspendIdle(store)
        answers = [policy.make_room(kv, Shortage(0, 0, 1, False, in_transfer=slots), ()) for slots in (0, 2)]
        assert answers == [False, True]


def test_mistakes_are_refused() -> None:
    """With our errors, and what to do."""
    model = make_model("falcon_h1")
    ids = random_tokens(8)
    with open_store(model) as store:
        cache = store.open(ids)
        with pytest.raises(ConfigError, match="this cache has 1 rows"):
            model(input_ids=ids.repeat(2, 1), cache=cache)
        with pytest.raises(ConfigError, match="needs input_ids"):
            model(inputs_embeds=torch.zeros((1, 8, 64)), cache=cache)
        with pytest.raises(ConfigError, match="takes no pixel_values"):
            model(input_ids=ids, cache=cache, pixel_values=ids)
        with pytest.raises(LogicError, match="call the model that the store was made for"):
            model.get_decoder()(input_ids=ids, cache=cache)
        compute(model, ids, cache)
        with pytest.raises(LogicError, match="a state cannot be taken back"):
            cache.crop(-1)
        with pytest.raises(LogicError, match="open another"):
            cache.reset()
        cache.close()
        cache.close()
        with pytest.raises(LogicError, match="closed"):
            model(input_ids=ids, cache=cache)
    store.close()
    assert model(input_ids=ids).logits.shape == (1, 8, 256)  # the store has left the model as it was


def test_a_model_with_an_encoder_is_refused() -> None:
    """Its caches are of two kinds."""
    with pytest.raises(ConfigError, match="decoder-only"):
        PagedStore(T5ForConditionalGeneration(T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, vocab_size=32)), gpu_bytes=MIB)
