"""`PagedStore.generate` gives the tokens of `model.generate`, with whatever of the prompts is cached."""

from __future__ import annotations

import pytest
import torch

from kv_cache_manager_v2 import ConfigError
from kv_cache_manager_v2.extras.transformers import PagedStore
from tests.extras.transformers.models import make_model, random_tokens
from tests.extras.transformers.rig import MIB, open_store

pytestmark = pytest.mark.torch

NEW = 6
PREFIX = random_tokens(70)


def prompts(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts with the common prefix and so many tokens of their own, padded on the left, and their mask."""
    columns = PREFIX.shape[1] + max(lengths)
    ids = torch.zeros((len(lengths), columns), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, columns - PREFIX.shape[1] - length :] = torch.cat([PREFIX, random_tokens(length, seed=row + 1)], dim=1)[0]
    return ids, (ids != 0).long()


def check(store: PagedStore, ids: torch.Tensor, mask: torch.Tensor, **options: object) -> torch.Tensor:
    """Generate with the store and without, and compare. Returns the tokens."""
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    torch.manual_seed(0)
    own = {**options, "prefill_chunk_size": None} if store.one_by_one else options  # in chunks such a model is wrong by itself
    expected = store.model.generate(ids, attention_mask=mask, **own)
    torch.manual_seed(0)
    found = store.generate(ids, mask, scope=None, **options)
    assert torch.equal(found, expected)
    assert not store.caches
    return found


WAYS: dict[str, dict[str, object]] = {
    "greedy": {},
    "in chunks": {"prefill_chunk_size": 32},
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "top_k": 5, "num_return_sequences": 3},
}


@pytest.mark.parametrize(
    ("way", "lengths"),
    [("greedy", (9,)), ("in chunks", (9,)), ("greedy", (9, 30, 3)), ("beams", (9, 30, 3)), ("samples", (9, 30, 3))],
)
def test_tokens_are_equal_and_prefixes_are_reused(family: str, way: str, lengths: tuple[int, ...]) -> None:
    """One prompt, and a batch of three that is padded on the left: at first, again, and a second turn on the first answers."""
    ids, mask = prompts(*lengths)
    options = WAYS[way]
    with open_store(make_model(family), gpu_bytes=16 * MIB) as store:
        answer = check(store, ids, mask, **options)
        with store.open(ids, mask) as again:
            whole = [len(PREFIX[0]) + length - 1 for length in lengths]
            cut = [64 if len(lengths) == 1 and not store.one_by_one else 0 for _length in lengths]
            assert again.num_reused_tokens == (cut if store.is_recurrent else whole)
        check(store, ids, mask, **options)
        rows = len(answer) // len(ids)
        turn = torch.cat([answer[::rows], random_tokens(5, seed=9, rows=len(ids))], dim=1)
        turn_mask = torch.cat([mask, torch.ones((len(ids), NEW + 5), dtype=torch.long)], dim=1)
        if way != "beams":  # the answer may be a beam that had ended, whose last state was not kept
            with store.open(turn, turn_mask) as second:
                assert second.num_reused_tokens == [tokens + NEW for tokens in whole]
        check(store, turn, turn_mask, **options)


ASSISTED = ("gemma3", "llama")  # families without recurrent layers


@pytest.mark.parametrize("own_family", ASSISTED)
@pytest.mark.parametrize("way", ["look-up", "assistant"])
def test_assisted_decoding_begins_with_an_empty_cache(own_family: str, way: str) -> None:
    """transformers gives wrong tokens on one that holds a prefix. What is rejected is taken back; what is kept can be reused."""
    ids = torch.cat([PREFIX, PREFIX[:, :40]], dim=1)
    options: dict[str, object] = (
        {"prompt_lookup_num_tokens": 4} if way == "look-up" else {"assistant_model": make_model(own_family, 1)}
    )
    with open_store(make_model(own_family), gpu_bytes=16 * MIB) as store:
        for _turn in range(2):
            answer = check(store, ids, torch.ones_like(ids), **options)
        assert torch.equal(answer, check(store, ids, torch.ones_like(ids)))
        with store.open(answer) as cache:
            assert cache.num_reused_tokens == [answer.shape[1] - 1]


def test_users_share_no_pages_across_scopes() -> None:
    """Equal prompts are reused within a LoRA id and salt only."""
    ids, mask = prompts(9)
    with open_store(make_model("gemma3")) as store:
        store.generate(ids, mask, scope=(None, "alice"), max_new_tokens=1)
        reused = [store.open(ids, scope=scope).num_reused_tokens for scope in (None, (None, "bob"), (7, "alice"), (None, "alice"))]
    assert reused == [[0], [0], [0], [78]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": object()}, "takes no cache"),
        ({"cache_implementation": "static"}, "takes no cache_implementation"),
        ({"attention_mask": torch.tensor([[1, 0, 1]])}, "padding that is not on the left"),
        ({"attention_mask": torch.tensor([[0, 1, 0]])}, "padding that is not on the left"),
        ({"prompt_lookup_num_tokens": 3}, "recurrent layers cannot"),
    ],
)
def test_what_cannot_be_generated_is_refused(options: dict[str, object], message: str) -> None:
    """With the reason, before anything is computed."""
    with open_store(make_model("falcon_h1")) as store:
        with pytest.raises(ConfigError, match=message):
            store.generate(random_tokens(3), **options)  # type: ignore[arg-type]  # the mask is among them
        assert not store.caches


def test_without_a_mask_the_pad_token_is_padding() -> None:
    """As in `model.generate`; not where it ends sequences too, so that prompts may have it."""
    ids, mask = prompts(9, 30)
    with open_store(make_model("llama"), gpu_bytes=16 * MIB) as store:
        masked = store.generate(ids, mask, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(store.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0), masked)
        unmasked = store.generate(ids, torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        assert not torch.equal(unmasked, masked), "padding is seen"
        ended = store.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0, eos_token_id=[1, 0])
        assert torch.equal(ended, unmasked[:, : ended.shape[1]])
