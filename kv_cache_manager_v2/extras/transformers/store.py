"""The cache of one transformers model, for `generate` and for loops of one's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Final

import torch
from transformers import PreTrainedModel

from kv_cache_manager_v2.arguments import at_least, flag
from kv_cache_manager_v2.device.driver import Driver
from kv_cache_manager_v2.errors import ConfigError, OutOfPagesError
from kv_cache_manager_v2.extras.transformers.cache import PagedCache
from kv_cache_manager_v2.extras.transformers.inputs import left_padding, prompt_tensor, require_default, require_padding_given
from kv_cache_manager_v2.extras.transformers.model_layers import learn_layers, uses_states
from kv_cache_manager_v2.extras.transformers.model_pages import Configure, Disk, ModelPages
from kv_cache_manager_v2.kv_cache import KVCache
from kv_cache_manager_v2.reuse.keys import ScopeLike
from kv_cache_manager_v2.step import Step
from kv_cache_manager_v2.storage.planner import Shortage
from kv_cache_manager_v2.suspension import SuspendCheapest


class SuspendIdle(SuspendCheapest):
    """Suspends open caches other than the one whose forward pass begins: those whose pages are cheapest to bring back.

    If none can be suspended, it waits for file transfers that keep slots.
    """

    def __init__(self, store: PagedStore) -> None:
        super().__init__()
        self.store: Final = store
        self.asking: PagedCache | None = None

    def make_room(self, asking: KVCache, shortage: Shortage, candidates: Sequence[KVCache]) -> bool:
        self.also = [row.kv for cache in self.store.caches if cache is not self.asking for row in cache.rows]
        if super().make_room(asking, shortage, ()):
            return True
        if shortage.in_transfer > 0:
            self.store.driver.synchronize()
        return shortage.in_transfer > 0


class ModelHook:
    """A hook of a store on its model. A copy does nothing: the store serves the model that it was made for, and no copy of it."""

    def __init__(self, call: Callable[..., None] | None) -> None:
        self.call: Final = call

    def __call__(self, *args: object) -> None:
        if self.call is not None:
            self.call(*args)

    def __reduce__(self) -> tuple[object, ...]:
        return ModelHook, (None,)


class PagedStore(ModelPages):
    """The cache of one model: pages on the GPU, in host memory and on disk, which sequences with a common prefix share.

    `gpu_bytes`, `host_bytes` and `disk`, a directory and bytes in it, are the memory of the pages. What each layer keeps is learnt
    from the model. `snapshot_every` is the number of generated tokens between two states of recurrent layers that can be reused; 0:
    only those after each prefill and at the end. `configure` may change any other setting of the manager, such as `typical_step`:
    one prompt of 2,048 tokens that is computed, and three sequences as long that are decoded. Without `driver`, pages are on the
    model's GPU, or in host memory for a model on the CPU. A store is used by one thread at a time.

    A pass computes what its tokens imply, since pages are found by these alone: other `position_ids`, an `attention_mask` with more
    than the left padding that `open` was told of, and inputs of other modalities raise ConfigError before anything is computed.

    Raises ConfigError for a model whose layers keep something else than keys, values and recurrent states, or on several devices.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        gpu_bytes: int,
        host_bytes: int = 0,
        disk: Disk | None = None,
        tokens_per_block: int = 16,
        snapshot_every: int = 0,
        configure: Configure | None = None,
        driver: Driver | None = None,
    ) -> None:
        self.snapshot_every: Final = at_least(snapshot_every, "snapshot_every", 0)
        plans = learn_layers(model)
        super().__init__(model, plans, gpu_bytes, host_bytes, disk, tokens_per_block, configure, driver)
        self.has_attention: Final = any(plan.attention for plan in plans)
        self.one_by_one: Final = self.is_recurrent and not uses_states(model, plans)  # tokens after a prefix must be passed so
        self._parameters: Final = list(inspect.signature(type(model).forward).parameters)[1:]  # of a forward pass
        self.caches: Final[list[PagedCache]] = []  # those that are open
        self._policy: Final = SuspendIdle(self)
        self._hooks: Final = [
            model.register_forward_pre_hook(ModelHook(self._before_pass), with_kwargs=True),
            model.register_forward_hook(ModelHook(self._after_pass), with_kwargs=True),
        ]

    def open(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        scope: ScopeLike | None = None,
        reuse: bool = True,
    ) -> PagedCache:
        """A cache for a prompt, or a batch of prompts, that has the longest reusable prefix. Takes no pages on the GPU yet.

        `input_ids` has shape (rows, columns), or (columns,) for one row. `attention_mask` has the same shape, with 0 for padding,
        which is on the left. `scope` is (lora_id, salt), each an integer or a string: rows share pages within one scope only. All
        rows begin at one column. With `reuse=False` the cache begins empty. Raises ConfigError for other tensors.
        """
        ids = prompt_tensor(input_ids, (1, 2))
        pads = left_padding(attention_mask, ids)
        prompts = [row[pad:] for row, pad in zip(ids.view(-1, ids.shape[-1]).tolist(), pads, strict=True)]
        return PagedCache(self, prompts, pads, scope, flag(reuse, "reuse"))

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        scope: ScopeLike | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """`model.generate`, with what of the prompts is cached, and leaving all that it computes cached. Returns what that returns.

        `input_ids` and `attention_mask` are as for `open`, with two dimensions; `kwargs` are those of `model.generate`. Without a
        mask, tokens of the id `pad_token_id` are padding if it is configured, and no end token, as in `model.generate`. Beams and
        returned sequences have pages of their own where they differ. Assisted decoding begins with an empty cache, since
        transformers cannot begin it with another. Raises ConfigError for a cache in `kwargs`, for assisted decoding with recurrent
        layers, and for a model without attention.
        """
        for name in ("cache", "past_key_values", "cache_implementation", "inputs_embeds"):
            if kwargs.get(name) is not None:
                raise ConfigError(f"generate() of a store takes no {name}: it opens a cache for input_ids")
        if not self.has_attention:
            raise ConfigError(
                "the model has no attention layer, so generate() of transformers cannot begin after a prefix; use open()"
            )
        prompts = prompt_tensor(input_ids, (2,))
        mask = self._padding_mask(prompts, kwargs) if attention_mask is None else attention_mask
        pads = left_padding(mask, prompts)
        require_default(kwargs, pads, 0, input_ids.shape[1])
        assisted = kwargs.get("assistant_model") is not None or bool(self._option(kwargs, "prompt_lookup_num_tokens"))
        if assisted and self.is_recurrent:
            raise ConfigError("assisted decoding takes tokens back, which recurrent layers cannot")
        rows = max(self._count(kwargs, "num_beams") or 1, self._count(kwargs, "num_return_sequences") or 1)
        chunk = self._count(kwargs, "prefill_chunk_size") or input_ids.shape[1]
        ids, masks = input_ids.repeat_interleave(rows, 0), mask.repeat_interleave(rows, 0)
        padded = any(pads)
        with self.open(ids, masks, scope=scope, reuse=not assisted and not (padded and self.one_by_one)) as cache:
            if self.is_recurrent and not padded:
                self._prefill(cache, ids, chunk)
            if self.one_by_one:
                kwargs["prefill_chunk_size"] = None
            return self.model.generate(input_ids, attention_mask=mask, cache=cache, **kwargs)

    def close(self) -> None:
        """Close all caches and free all memory. The model is as it was. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        for cache in list(self.caches):
            cache.close()
        super().close()

    # --- what caches ask

    def commits(self, length: int, new: int) -> bool:
        """Whether a pass of `new` tokens up to this length is committed. With recurrent layers each commit copies a state."""
        return not self.is_recurrent or new > 1 or (self.snapshot_every > 0 and length % self.snapshot_every == 0)

    def resume(self, cache: PagedCache) -> None:
        """Bring the pages of a cache to the GPU. Raises OutOfPagesError."""
        self._policy.asking = cache
        for row in cache.rows:
            if not row.kv.is_active and not row.kv.resume(self.stream, make_room=self._policy):
                raise self.shortage_of(row.kv)

    def begin_step(self, cache: PagedCache, counts: Sequence[int]) -> Step:
        """A step with pages for all rows of a cache, which the host may touch at once. Raises OutOfPagesError."""
        self._policy.asking = cache
        step = self.manager.step([row.kv for row in cache.rows], counts, make_room=self._policy)
        step.__enter__()
        if step.short:
            raise self.shortage_of(step.short[0])
        self.driver.order(self.stream)
        return step

    def shortage_of(self, kv: KVCache) -> OutOfPagesError:
        """What a call raises that has not got its pages."""
        return OutOfPagesError(
            f"no pages for a forward pass: {kv.last_shortage}; {len(self.caches)} caches are open: "
            "close some, or give the store more memory"
        )

    # --- the hooks

    def _before_pass(self, module: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        inputs = self._inputs(args, kwargs)
        cache = self._cache_of(inputs)
        if cache is not None:
            ids = _ids_of(inputs)
            cache.check(ids)
            if self.one_by_one and cache.length > 0 and ids.shape[1] > 1:
                raise ConfigError(
                    f"input_ids has {ids.shape[1]} columns after the first {cache.length}; {type(self.model).__name__} ignores its "
                    "recurrent states in a pass of several tokens: pass these one by one, as generate() of the store does"
                )
            pads = [row.pad for row in cache.rows]
            require_default(inputs, pads, cache.length, cache.length + ids.shape[1])
            require_padding_given(inputs, self._parameters, pads)
            cache.begin(ids)

    def _after_pass(self, module: object, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
        inputs = self._inputs(args, kwargs)
        cache = self._cache_of(inputs)
        if cache is not None:
            cache.end(_ids_of(inputs))

    def _inputs(self, args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, object]:
        """The arguments of a pass by name."""
        return {**dict(zip(self._parameters, args, strict=False)), **kwargs}

    def _cache_of(self, inputs: dict[str, object]) -> PagedCache | None:
        for value in inputs.values():
            if isinstance(value, PagedCache) and value.store is self:
                return value
        return None

    def _option(self, kwargs: dict[str, object], name: str) -> int | None:
        """An option of generation: in the call, in the configuration that it passes, or in the model's."""
        value = kwargs.get(name, getattr(kwargs.get("generation_config") or self.model.generation_config, name, None))
        return value if isinstance(value, int) else None

    def _count(self, kwargs: dict[str, object], name: str) -> int | None:
        """As `_option`, for a number of at least 1. Raises ConfigError for another."""
        value = self._option(kwargs, name)
        given = kwargs.get(name, value)
        return None if given is None else at_least(given, name, 1)

    def _padding_mask(self, input_ids: torch.Tensor, kwargs: dict[str, object]) -> torch.Tensor:
        """The mask that `model.generate` takes if it is given none: padding is the pad token, if that is no end token."""
        config = kwargs.get("generation_config") or self.model.generation_config
        pad = self._option(kwargs, "pad_token_id")
        ends = kwargs.get("eos_token_id", getattr(config, "eos_token_id", None))
        if pad is None or pad in (ends if isinstance(ends, (list, tuple)) else [ends]):
            return torch.ones_like(input_ids)
        return (input_ids != pad).to(input_ids.dtype)

    def _prefill(self, cache: PagedCache, input_ids: torch.Tensor, chunk: int) -> None:
        """Compute prompts of one length up to where equal prompts need a state. The last token is left."""
        end = input_ids.shape[1]
        stop = cache.prefill_end(end)
        if self.one_by_one:
            stop, chunk = (end - 1 if cache.length else 0), 1
        elif stop == end:  # there is a state already
            stop = 0
        with torch.no_grad():
            while cache.length < stop:
                self.model(input_ids=input_ids[:, cache.length : min(stop, cache.length + chunk)], cache=cache)


def _ids_of(inputs: dict[str, object]) -> torch.Tensor:
    ids = inputs.get("input_ids")
    if not isinstance(ids, torch.Tensor):
        raise ConfigError("a forward pass with a paged cache needs input_ids: without tokens nothing could be reused")
    return ids
