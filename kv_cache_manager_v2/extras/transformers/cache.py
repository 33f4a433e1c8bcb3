"""A transformers cache whose keys, values and states lie in pages of the manager."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Final

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, LinearAttentionCacheLayerMixin

from kv_cache_manager_v2.arguments import at_least, whole, wholes
from kv_cache_manager_v2.batch_calls import commit_batch, resize_batch
from kv_cache_manager_v2.errors import ConfigError, LogicError, OutOfPagesError
from kv_cache_manager_v2.extras.transformers.cache_layers import (
    ForwardPass,
    PagedAttentionLayer,
    PagedHybridLayer,
    PagedStateLayer,
)
from kv_cache_manager_v2.kv_cache import KVCache
from kv_cache_manager_v2.reuse.keys import ScopeLike
from kv_cache_manager_v2.reuse.limits import MatchLimits
from kv_cache_manager_v2.reuse_match import ReuseMatch

if TYPE_CHECKING:
    from kv_cache_manager_v2.extras.transformers.model_layers import LayerBuffers
    from kv_cache_manager_v2.extras.transformers.store import PagedStore


class Row:
    """One sequence of a batch."""

    def __init__(self, kv: KVCache, pad: int, start: int, tokens: list[int]) -> None:
        self.kv: Final = kv
        self.pad: Final = pad  # columns before its first token
        self.start: Final = start  # tokens that were found when the cache was opened
        self.tokens: Final = tokens  # those that were computed after them

    def uncommitted(self) -> list[int]:
        """Computed tokens that are not committed."""
        return self.tokens[self.kv.num_committed_tokens - self.start :]


class PagedCache(Cache):
    """What a model takes as `cache`, for a batch of sequences. `PagedStore.open` makes it; `close()` or a `with` block ends it.

    Pass the tokens after the first `get_seq_length()` columns to the model: the columns before them are computed. With padding,
    pass `attention_mask` of all columns so far too, and `position_ids` that count from each row's first token. A forward pass
    brings the pages back if the cache is suspended. Where there is no room for its tokens, it raises OutOfPagesError before it
    computes anything. A pass that raises has not changed the cache. Other caches of the store can reuse what a pass has computed:
    full blocks at once, the rest after `close()`; with recurrent layers the ends of prefills, and the end.
    """

    def __init__(
        self, store: PagedStore, prompts: Sequence[list[int]], pads: Sequence[int], scope: ScopeLike | None, reuse: bool
    ) -> None:
        """Internal. `PagedStore.open` makes caches."""
        self.store = store
        self.current_pass: ForwardPass | None = None  # between the passes too, if that one raised
        self._unsettled: ForwardPass | None = None  # the last pass, of which `crop` may still take tokens back
        self._record_past = False
        self._is_torn = False  # states in the pages may be of different lengths
        manager = store.manager
        if reuse:
            kvs = [manager.create_kv_cache(reuse_match=match) for match in find_matches(store, prompts, pads, scope)]
        else:
            kvs = [manager.create_kv_cache(scope) for _prompt in prompts]
        self.rows = [Row(kv, pad, kv.num_committed_tokens, []) for kv, pad in zip(kvs, pads, strict=True)]
        self.reused_by_level = [kv.cached_tokens_by_level for kv in kvs]  # tokens found, by row and cache level
        self.length = max([row.start + row.pad for row in self.rows if row.start > 0] or [0])
        super().__init__(layers=[self._layer(buffers) for buffers in store.buffers])
        self._state_layers = [layer for layer in self.layers if isinstance(layer, PagedStateLayer)]
        store.caches.append(self)

    def _layer(self, buffers: LayerBuffers) -> CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer:
        if buffers.attention and buffers.states:
            return PagedHybridLayer(self, buffers)
        if buffers.attention:
            return PagedAttentionLayer(self, buffers)
        return PagedStateLayer(self, buffers) if buffers.states else DummyLayer()

    # --- its life

    def __enter__(self) -> PagedCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def is_closed(self) -> bool:
        """Whether `close()` was called."""
        return self not in self.store.caches

    @property
    def is_active(self) -> bool:
        """Whether all its pages are on the GPU and locked."""
        return all(row.kv.is_active for row in self.rows)

    @property
    def num_reused_tokens(self) -> list[int]:
        """How many tokens of each row were found when the cache was opened."""
        return [sum(levels) for levels in self.reused_by_level]

    def resume(self) -> None:
        """Bring the pages to the GPU, at the cost of idle caches. A forward pass does so itself. Raises OutOfPagesError."""
        self._require_open("resume()")
        self.store.resume(self)

    def suspend(self) -> None:
        """Let other caches have the pages, between forward passes. The store does so itself if pages are short."""
        self._require_open("suspend()")
        for row in self.rows:
            if row.kv.is_active:
                row.kv.suspend()

    def close(self) -> None:
        """End the sequences: what is computed stays cached for others. Idempotent.

        A suspended cache is resumed if it has something to commit. If there is no room for that, it is lost. Raises
        PageDataLostError, with the cache closed, if bytes of its pages were lost on disk.
        """
        if self.is_closed:
            return
        with ExitStack() as ends:
            ends.callback(self.store.caches.remove, self)
            for row in self.rows:
                ends.callback(row.kv.close)
            self.current_pass = None
            if not self._is_torn and any(row.uncommitted() for row in self.rows):
                with suppress(OutOfPagesError):
                    self.resume()
                    self._settle()
                    for row in self.rows:
                        row.kv.commit(row.uncommitted(), is_end=True)
            for row in self.rows:
                row.kv.stop_committing()

    def _require_open(self, call: str) -> None:
        if self.is_closed:
            raise LogicError(f"{call} of a cache that is closed: open another one")

    # --- a forward pass, told by the store's hooks

    def check(self, input_ids: torch.Tensor) -> None:
        """Raise unless a forward pass over these tokens may begin."""
        self._require_open("a forward pass")
        if input_ids.dim() != 2 or len(input_ids) != len(self.rows):
            raise ConfigError(f"input_ids has shape {tuple(input_ids.shape)}; this cache has {len(self.rows)} rows")
        if self._is_torn:
            raise LogicError("a forward pass was interrupted while states were saved: close this cache and open another one")

    def begin(self, input_ids: torch.Tensor) -> None:
        """A forward pass over these tokens begins: take pages for them. Raises OutOfPagesError."""
        self.current_pass = None
        self.resume()
        self._settle()
        begin, end = self.length, self.length + input_ids.shape[1]
        pads = [row.pad for row in self.rows]
        counts = [max(0, end - row.pad) - row.kv.history_length for row in self.rows]
        step = self.store.begin_step(self, counts)
        self.current_pass = ForwardPass(step, begin, end, pads, input_ids.device)
        for layer in self._state_layers:
            layer.load(self.current_pass)

    def end(self, input_ids: torch.Tensor) -> None:
        """The forward pass has ended well."""
        done = self.current_pass
        assert done is not None
        new: list[list[int]] = input_ids.tolist()
        self._is_torn = bool(self._state_layers)
        for layer in self._state_layers:
            layer.save(done)
        for row, tokens in zip(self.rows, new, strict=True):
            row.tokens.extend(tokens[max(0, row.pad - done.begin) :])
        self.length = done.end
        self._is_torn = False
        self.current_pass = None
        self._unsettled = done
        if not self._record_past:
            self._settle()

    def _settle(self) -> None:
        """Commit what the last pass has computed, or only count it as history."""
        done = self._unsettled
        if done is None:
            return
        kvs = [row.kv for row in self.rows]
        if self.store.commits(self.length, self.length - done.begin):
            commit_batch(kvs, [row.uncommitted() for row in self.rows])
        else:
            lengths = [max(0, self.length - row.pad) for row in self.rows]
            advanced = resize_batch(kvs, [kv.capacity for kv in kvs], lengths)
            if advanced < len(kvs):
                raise self.store.shortage_of(kvs[advanced])
        self._unsettled = None

    def prefill_end(self, prompt_columns: int) -> int:
        """The column up to which the next pass over a prompt should go, so that equal prompts can begin there.

        With recurrent layers and without padding this is a block boundary before the end of the prompt, until a state there is
        cached. Else it is the end.
        """
        if any(row.pad for row in self.rows):
            return prompt_columns
        return self.rows[0].kv.prefill_end(prompt_columns)

    # --- what generation asks of a cache

    def activate_past_recording(self) -> None:
        """Commit a pass only when the next one begins, so that `crop` can take back its last tokens."""
        self._record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens of the last pass, after `activate_past_recording()`.

        Raises ConfigError for more tokens than that, LogicError for recurrent states, which cannot be taken back.
        """
        count = -whole(tokens_to_remove, "tokens_to_remove")
        if count == 0:
            return
        if self._state_layers:
            raise LogicError("crop() of a model with recurrent layers: a state cannot be taken back")
        last = 0 if self._unsettled is None else self.length - self._unsettled.begin
        if not 0 < count <= last:
            raise ConfigError(
                f"tokens_to_remove is {tokens_to_remove}; at most the {last} tokens of the last forward pass can be removed, as a "
                "negative number, if activate_past_recording() was called before it"
            )
        length = self.length - count
        for row in self.rows:
            del row.tokens[max(0, length - row.pad) - row.start :]
        self.length = length

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i goes on from row `beam_idx[i]`."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes `repeats` rows, at least one. Raises as `batch_select_indices`."""
        count = at_least(repeats, "repeats", 1)
        self.batch_select_indices(torch.arange(len(self.rows)).repeat_interleave(count))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Row i goes on from row `indices[i]`: a row that is taken several times is forked, one that is not taken is closed.

        Raises ConfigError for no rows and for rows that there are not, and OutOfPagesError if there is no room for the copies of
        recurrent states. Nothing has changed then.
        """
        self._require_open("batch_select_indices()")
        parents = wholes(indices, "indices", 0)
        if not parents or max(parents) >= len(self.rows):
            raise ConfigError(f"indices is {parents}; it must be at least one of the rows 0..{len(self.rows) - 1}")
        self.current_pass = None
        if parents == list(range(len(self.rows))):
            return
        self.resume()
        self._settle()
        forks: list[KVCache] = []
        rows: list[Row] = []
        try:
            for position, parent in enumerate(parents):
                row = self.rows[parent]
                if parent in parents[:position]:
                    forks.append(row.kv.fork())
                    row = Row(forks[-1], row.pad, row.start, list(row.tokens))
                rows.append(row)
        except BaseException:
            for fork in forks:
                fork.close()
            raise
        for number, row in enumerate(self.rows):
            if number not in parents:
                row.kv.close()
        self.rows = rows

    def reset(self) -> None:
        """Not supported: raises LogicError."""
        raise LogicError("reset() of a paged cache: close it and open another one")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that are computed: those before the pass, until it has ended well."""
        return self.length

    @property
    def is_croppable(self) -> bool:
        return not self._state_layers

    @property
    def is_compileable(self) -> bool:
        return False


def find_matches(store: PagedStore, prompts: Sequence[list[int]], pads: Sequence[int], scope: ScopeLike | None) -> list[ReuseMatch]:
    """The longest matches with which all rows begin at one column. The last token of each prompt is left to be computed."""
    begin = min([len(prompt) - 1 + pad for prompt, pad in zip(prompts, pads, strict=True)])
    while True:
        matches: list[ReuseMatch] = []
        for prompt, pad in zip(prompts, pads, strict=True):
            matches.append(store.manager.find_reuse(scope, prompt[:-1], MatchLimits(max_tokens=max(0, begin - pad))))
        found = min([match.num_tokens + pad for match, pad in zip(matches, pads, strict=True)])
        if all(match.num_tokens == max(0, begin - pad) for match, pad in zip(matches, pads, strict=True)):
            return matches
        begin = min(found, begin - 1)
