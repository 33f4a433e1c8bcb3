"""What a model is given beside its tokens: pages hold what the tokens imply, and anything else is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import cast

import pytest
import torch

from kv_cache_manager_v2 import ConfigError, LogicError
from kv_cache_manager_v2.extras.transformers import PagedCache, PagedStore, install_continuous_batching
from tests.extras.transformers.models import make_model, random_tokens
from tests.extras.transformers.rig import MIB, open_store

pytestmark = pytest.mark.torch

IDS = random_tokens(40, rows=2)
MASK = torch.ones_like(IDS)
MASK[1, :5] = 0  # the second row is padded
POSITIONS = (MASK.cumsum(-1) - 1).clamp(min=0)
HOLE = MASK.clone()
HOLE[0, 20:30] = 0
OTHERS: dict[str, dict[str, object]] = {
    "positions that begin later": {"position_ids": POSITIONS + 100},
    "positions that count padding": {"position_ids": torch.arange(40)[None]},
    "positions of fewer tokens": {"position_ids": POSITIONS[:, :1]},
    "no positions": {"position_ids": None},
    "a hole": {"attention_mask": HOLE},
    "no padding": {"attention_mask": torch.ones_like(MASK)},
    "a mask of fewer columns": {"attention_mask": MASK[:, 10:]},
    "a mask of four dimensions": {"attention_mask": MASK[:, None, None]},
    "masks by kind of layer": {"attention_mask": {"full_attention": MASK}},
    "no mask": {"attention_mask": None},
}


@pytest.mark.parametrize("other", OTHERS)
def test_positions_and_masks_that_the_tokens_do_not_imply_are_refused(other: str) -> None:
    """Before anything is computed: the next user would get these keys and values for equal tokens."""
    model = make_model("llama")
    with open_store(model) as store, torch.no_grad():
        cache = store.open(IDS, MASK)
        given = {"attention_mask": MASK, "position_ids": POSITIONS, **OTHERS[other]}
        with pytest.raises(ConfigError, match="|".join(OTHERS[other])):
            model(input_ids=IDS, cache=cache, **given)
        with pytest.raises(ConfigError, match="|".join(OTHERS[other])):
            model(IDS, given["attention_mask"], given["position_ids"], cache)
        assert cache.get_seq_length() == 0
        cache.close()
        assert store.open(IDS, MASK).num_reused_tokens == [0, 0]


@pytest.mark.parametrize("name", ["token_type_ids", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "pixel_values"])
def test_what_gives_tokens_another_meaning_is_refused(name: str) -> None:
    """Types, several sequences in one row, other modalities: equal tokens would share pages. Types of 0 mean nothing."""
    model, ids = make_model("llama"), IDS[:1]
    with open_store(model) as store, torch.no_grad():
        cache = store.open(ids)
        with pytest.raises(ConfigError, match=name):
            model(input_ids=ids, cache=cache, **{name: torch.ones_like(ids)})
        assert cache.get_seq_length() == 0
        model(input_ids=ids, cache=cache, token_type_ids=torch.zeros_like(ids))


def test_a_model_that_ignores_its_states_takes_tokens_one_by_one() -> None:
    """After the first pass: with several it would compute wrong tokens, which others would reuse."""
    model, ids = make_model("jamba"), IDS[:1]
    with open_store(model, gpu_bytes=8 * MIB) as store, torch.no_grad():
        cache = store.open(ids)
        model(input_ids=ids[:, :30], cache=cache)
        with pytest.raises(ConfigError, match="input_ids has 2 columns after the first 30; JambaForCausalLM ignores"):
            model(input_ids=ids[:, 30:32], cache=cache)
        model(input_ids=ids[:, 30:31], cache=cache)
        assert cache.get_seq_length() == 31


@pytest.mark.parametrize(("name", "value"), [("num_beams", 0), ("num_return_sequences", -1), ("prefill_chunk_size", -1)])
def test_numbers_of_generation_are_checked(name: str, value: int) -> None:
    """Before a cache is opened, in the call and in a configuration."""
    with open_store(make_model("llama")) as store:
        generate: Callable[..., object] = store.generate
        with pytest.raises(ConfigError, match=f"{name} is {value}; it must be at least 1"):
            generate(IDS[:1], max_new_tokens=1, **{name: value})
        assert not store.caches


def test_a_copy_of_the_model_is_a_model_without_the_store() -> None:
    """It computes with caches of its own; one of the store is refused."""
    model, ids = make_model("llama"), IDS[:1]
    with open_store(model) as store, torch.no_grad():
        cache = store.open(ids)
        model(input_ids=ids[:, :30], cache=cache)
        twin = copy.deepcopy(model)
        assert torch.equal(twin(ids).logits, model(ids).logits)
        with pytest.raises(LogicError, match="the model that the store was made for"):
            twin(input_ids=ids[:, 30:], cache=cache)
        model(input_ids=ids[:, 30:], cache=cache)


@pytest.mark.parametrize("make", [PagedStore, install_continuous_batching])
def test_what_is_no_model_is_refused(make: Callable[..., object]) -> None:
    """With the value."""
    with pytest.raises(ConfigError, match="model is 3; it must be"):
        make(3, gpu_bytes=MIB)


@pytest.mark.parametrize("name", ["position_ids", "attention_mask"])
def test_they_are_refused_without_padding_and_after_the_first_pass(name: str) -> None:
    """In a pass of one token too, and by `generate`."""
    model, ids = make_model("llama"), IDS[:1]
    with open_store(model) as store, torch.no_grad():
        cache = store.open(ids)
        model(input_ids=ids[:, :39], cache=cache)
        given = {"position_ids": torch.tensor([[40]]), "attention_mask": HOLE[:1]}[name]
        with pytest.raises(ConfigError, match=name):
            model(input_ids=ids[:, 39:], cache=cache, **{name: given})
        cache.close()
        with pytest.raises(ConfigError, match=r"position_ids|attention_mask"):
            store.generate(ids, **{name: {"position_ids": POSITIONS[:1] + 1, "attention_mask": HOLE[:1]}[name]})


def test_those_that_the_tokens_imply_are_accepted(family: str) -> None:
    """In passes over a padded batch, the first shorter than the padding; its rows are reused without it. And by `generate`."""
    model = make_model(family)
    with open_store(model, gpu_bytes=8 * MIB) as store, torch.no_grad():
        with store.open(IDS, MASK, reuse=False) as cache:
            ends = (39, 40) if store.one_by_one else (3, 39, 40)  # such a model takes several tokens in its first pass alone
            for beg, end in zip((0, *ends[:-1]), ends, strict=True):
                model(
                    input_ids=IDS[:, beg:end], attention_mask=MASK[:, :end].bool(), position_ids=POSITIONS[:, beg:end], cache=cache
                )
        with store.open(torch.cat([IDS[1:, 5:], IDS[1:]], dim=1)) as again:
            assert again.num_reused_tokens == [35]
        given = {"attention_mask": MASK, "position_ids": POSITIONS, "max_new_tokens": 3, "do_sample": False}
        assert torch.equal(store.generate(IDS, **given), model.generate(IDS, **given))


@pytest.mark.parametrize("indices", [[-1], [2], [], [0, 0.5], [True], 1])
def test_rows_that_there_are_not_are_refused(indices: object) -> None:
    """Before any row is closed."""
    model = make_model("llama")
    with open_store(model) as store:
        cache = store.open(IDS)
        with torch.no_grad():
            model(input_ids=IDS, cache=cache)
        with pytest.raises(ConfigError, match="indices"):
            cache.batch_select_indices(torch.tensor(indices))
        for repeats in (0, -1, 1.5):
            with pytest.raises(ConfigError, match="repeats"):
                cache.batch_repeat_interleave(cast("int", repeats))
        with pytest.raises(ConfigError, match="tokens_to_remove is 'a'"):
            cache.crop(cast("int", "a"))
        with torch.no_grad():
            model(input_ids=IDS[:, :1], cache=cache)


def test_prompts_and_masks_of_other_kinds_are_refused() -> None:
    """By `open` and `generate`, with the value."""
    with open_store(make_model("llama")) as store:
        ids = random_tokens(6)
        prompts: list[object] = [None, ids.tolist(), ids.numpy(), torch.tensor(3), ids[:0], ids[:, :0], ids.float(), ids[None]]
        for prompt in prompts:
            for call in (store.open, store.generate):
                with pytest.raises(ConfigError, match="input_ids"):
                    call(cast("torch.Tensor", prompt))
        with pytest.raises(ConfigError, match="input_ids"):
            store.generate(ids[0])
        masks: list[object] = [ids.tolist(), torch.ones((2, 3)), torch.ones((1, 5)), torch.ones(6)]
        for mask in masks:
            for call in (store.open, store.generate):
                with pytest.raises(ConfigError, match="attention_mask"):
                    call(ids, cast("torch.Tensor", mask))
        with pytest.raises(ConfigError, match="reuse is 1"):
            store.open(ids, reuse=cast("bool", 1))
        assert not store.caches
        caches: list[PagedCache] = [store.open(ids[0], torch.ones(6)), store.open(ids.int())]
        assert [len(cache.rows) for cache in caches] == [1, 1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("disk", "x"),
        ("disk", ("/tmp",)),
        ("configure", 3),
        ("snapshot_every", -1),
        ("snapshot_every", "a"),
        ("tokens_per_block", "a"),
    ],
)
def test_settings_of_a_store_are_checked(name: str, value: object) -> None:
    """With the name and the value."""
    model = make_model("llama")
    with pytest.raises(ConfigError, match=f"{name} is"):
        PagedStore(model, gpu_bytes=MIB, **{name: value})  # type: ignore[arg-type]
