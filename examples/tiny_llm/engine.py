"""A serving engine in small: continuous batching, chunked prefill and preemption on top of `KVCacheManager`.

The manager decides where keys and values are stored; the engine decides only which requests compute next. Open requests are kept in
order of admission, and the running ones are a prefix of that order. On a shortage the newest running request is suspended.
Suspended requests resume oldest first, once another request has ended.

Prefill and decode have a stream each. A request moves from one to the other when its prompt is done; the manager makes the second
stream wait for what the first still does with the request's pages. Whatever is published by `commit` may still be in flight: who
reuses it waits on its stream, never on the host. The host waits only for the logits that it must look at.

A model with recurrent layers commits up to each multiple of `commit_every` tokens, and what is left at the end of a turn: wherever
it commits, the manager keeps a snapshot of the state, and a later request can begin there. In between, tokens are computed but not
committed.

A turn that asks for beams has its first `BEAM_TOKENS` tokens chosen by beam search: the cache is widened after the prompt, each
step computes a token of every beam, and where a hypothesis goes on from another beam's, the engine copies that beam's pages and
states over its own: the manager does not reorder beams. Then the winner's tokens are committed from the beam that computed them,
the cache is narrowed, and the answer goes on from the winner's pages and states.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kv_cache_manager_v2 import BeamIndex, EmulatedDriver, KVCache, KVCacheManager, OutOfPagesError, ReuseScope, Stream
from tiny_llm.beams import BeamSearch
from tiny_llm.model import Chunk, FloatArray, TinyLlama
from tiny_llm.paged import IndexBuffers, PagedMemory, PagedView
from tiny_llm.workload import Conversation

BEAM_TOKENS: Final = 12  # how much of an answer beam search chooses


@dataclass
class ConversationStats:
    """What one conversation cost, in tokens."""

    turns: int = 0
    prompt: int = 0
    reused_by_level: list[int] = field(default_factory=list)
    computed: int = 0  # prompt tokens that were not reused
    generated: int = 0
    suspensions: int = 0


@dataclass(frozen=True)
class ComputedChunk:
    """One computed chunk, for the comparison: tokens from position `beg` of the conversation, and a row of logits for each.

    `branch` are the earlier tokens after the prompt that only its beam has; None outside of beam search.
    """

    conversation: int
    beg: int
    tokens: list[int]
    logits: FloatArray
    branch: tuple[int, ...] | None = None


class Request:
    """One turn of a conversation while it is served."""

    def __init__(self, conversation: Conversation, turn: int, prompt: list[int], buffers: Sequence[IndexBuffers]) -> None:
        self.conversation = conversation
        self.turn = turn
        self.tokens = prompt  # the prompt, then what is generated
        self.prompt_length = len(prompt)
        self.answer_length = conversation.answer_lengths[turn]
        self.beam_width = conversation.beam_widths[turn]
        self.buffers = buffers  # base page indices by beam and layer group; the manager writes them
        self.computed = 0  # tokens whose keys, values and states are in the pages, or will be when the stream gets there
        self.decoding = False  # the prompt is computed
        self.search: BeamSearch | None = None  # while beams are searched; `tokens` has none of theirs yet
        self.pending: list[FloatArray] = []  # logits of each chunk of the last launch, once it has run

    @property
    def finished(self) -> bool:
        return len(self.tokens) == self.prompt_length + self.answer_length


@dataclass(frozen=True)
class Work:
    """What one request computes in a step: a chunk, or a token of each beam, after its beams were reordered."""

    request: Request
    cache: KVCache
    chunks: list[Chunk]
    order: list[int]  # by beam: the beam whose pages it continues from


class Engine:
    """Serves conversations to the end. `chunks` holds everything that was computed, in order of each conversation."""

    def __init__(
        self,
        model: TinyLlama,
        manager: KVCacheManager,
        driver: EmulatedDriver,
        *,
        max_running: int,
        chunk_tokens: int,
        commit_every: int = 1,
    ) -> None:
        self._model = model
        self._manager = manager
        self._driver = driver
        self.memory = PagedMemory(manager, model.shape)
        self._prefill_stream: Stream = driver.create_stream()
        self._decode_stream: Stream = driver.create_stream()
        self._step_done = driver.create_event()
        self._max_running = max_running  # requests open at once
        self._chunk_tokens = chunk_tokens  # prompts are computed up to each multiple of this
        self._commit_every = commit_every  # generated tokens are committed up to each multiple of this, and at the end
        self._queue: deque[tuple[Conversation, int]] = deque()  # (conversation, turn) to be admitted
        self._open: list[Request] = []  # in order of admission
        self._caches: list[KVCache] = []  # of the open requests
        self._num_running = 0  # _open[:_num_running] run, the others are suspended
        self._crowded = False  # a request was suspended and none has ended since: resuming one would suspend another
        self.histories: dict[int, list[int]] = {}  # conversation -> all tokens so far
        self.chunks: list[ComputedChunk] = []
        self.stats: dict[int, ConversationStats] = {}
        self.steps = 0
        self.beam_searches = 0
        self.beam_pages_copied = 0  # pages and states that beams took over from each other

    def serve(self, conversations: Sequence[Conversation]) -> None:
        """Serve all turns of all conversations; a turn is queued when the one before it has been answered."""
        num_levels = len(self._manager.cache_tier_list)
        for conversation in conversations:
            self.histories[conversation.number] = []
            self.stats[conversation.number] = ConversationStats(reused_by_level=[0] * num_levels)
            self._queue.append((conversation, 0))
        while self._queue or self._open:
            self._admit()
            prefill, decode = self._plan_step()
            self._launch(prefill, self._prefill_stream)
            self._launch(decode, self._decode_stream)
            self._read_logits(prefill, self._prefill_stream)
            self._read_logits(decode, self._decode_stream)
            self._retire()
            self.steps += 1

    def close(self) -> None:
        """Close open caches, and destroy the streams."""
        for cache in self._caches:
            cache.close()
        self._caches.clear()
        self._open.clear()
        self._driver.synchronize()
        self._driver.destroy_event(self._step_done)
        self._driver.destroy_stream(self._prefill_stream)
        self._driver.destroy_stream(self._decode_stream)

    # --- who runs

    def _admit(self) -> None:
        """Bring suspended requests back; if there are none, take new ones."""
        while True:
            while self._num_running < len(self._open) and not (self._crowded and self._num_running):
                if not self._resume(self._num_running):
                    break
                self._num_running += 1
            if self._num_running < len(self._open) or len(self._open) == self._max_running or not self._queue:
                break
            self._open_request(*self._queue.popleft())
        if self._open and self._num_running == 0:
            raise RuntimeError(f"{len(self._open[0].tokens)} tokens do not fit the cache, even alone")

    def _open_request(self, conversation: Conversation, turn: int) -> None:
        """Look up a turn's prompt. The last token is left out of the look-up, since its logits are needed in any case."""
        history = self.histories[conversation.number]
        history.extend(conversation.messages[turn])
        max_blocks = -(-(len(history) + conversation.answer_lengths[turn]) // self._manager.tokens_per_block)
        buffers = [
            {group: np.empty(max_blocks, dtype=np.int32) for group in self.memory.groups}
            for _beam in range(conversation.beam_widths[turn])
        ]
        request = Request(conversation, turn, history, buffers)
        cache = self._manager.create_kv_cache(ReuseScope(), history[:-1], id=conversation.number * 1000 + turn)
        request.computed = cache.num_committed_tokens
        stats = self.stats[conversation.number]
        stats.turns += 1
        stats.prompt += request.prompt_length
        stats.computed += request.prompt_length - cache.num_committed_tokens
        for level, num_tokens in enumerate(cache.cached_tokens_by_level):
            stats.reused_by_level[level] += num_tokens
        self._open.append(request)
        self._caches.append(cache)

    def _resume(self, position: int) -> bool:
        """Resume one request and attach its index buffers again. False on a shortage."""
        request, cache = self._open[position], self._caches[position]
        if not cache.resume(self._decode_stream if request.decoding else self._prefill_stream):
            return False
        self._attach(request, cache, 0)
        return True

    def _attach(self, request: Request, cache: KVCache, first_beam: int) -> None:
        """Have the manager write the page indices of the beams from this one on into the request's buffers."""
        for beam in range(first_beam, cache.beam_width):
            for group, buffer in request.buffers[beam].items():
                cache.set_base_page_index_buf(BeamIndex(beam), group, buffer)

    def _grow(self, position: int, capacity: int) -> bool:
        """Allocate pages for `capacity` tokens, suspending newer requests if needed. False if this one was suspended itself."""
        cache, request = self._caches[position], self._open[position]
        while not cache.resize(capacity, request.computed):
            if not self._suspend_newest(position):
                return False
        return True

    def _widen(self, position: int, width: int) -> bool:
        """Widen a request to `width` beams, suspending newer requests if needed. False if this one was suspended itself."""
        cache, request = self._caches[position], self._open[position]
        while cache.beam_width < width:
            try:
                cache.beam_width = width
            except OutOfPagesError:
                if not self._suspend_newest(position):
                    return False
        self._attach(request, cache, 1)
        return True

    def _suspend_newest(self, position: int) -> bool:
        """Suspend the newest running request. False if it is the one at `position`, which needs the pages."""
        self._num_running -= 1
        self._caches[self._num_running].suspend()
        self._crowded = True
        request = self._open[self._num_running]
        self.stats[request.conversation.number].suspensions += 1
        if position == 0 and self._num_running == 0:
            raise RuntimeError(f"{len(request.tokens) + 1} tokens do not fit the cache, even alone")
        return self._num_running > position

    # --- a step

    def _plan_step(self) -> tuple[list[Work], list[Work]]:
        """What to compute now: a chunk of every prompt that is not done, and a token of every other running request."""
        prefill: list[Work] = []
        decode: list[Work] = []
        position = 0
        while position < self._num_running:
            request = self._open[position]
            work = self._plan_beams(position, request.search) if request.search is not None else self._plan_chunk(position)
            if work is None:
                break
            (decode if request.decoding else prefill).append(work)
            position += 1
        return prefill, decode

    def _plan_chunk(self, position: int) -> Work | None:
        """The next chunk of a prompt, or the next token. Chunks end at the same lengths in all requests, so that those that
        begin alike can begin at each other's snapshots. None if the request had to be suspended."""
        request, cache = self._open[position], self._caches[position]
        beg = request.computed
        end = min(len(request.tokens), (beg // self._chunk_tokens + 1) * self._chunk_tokens)
        if not self._grow(position, end):
            return None
        return Work(request, cache, [Chunk(self.memory.view(request.buffers, cache), beg, request.tokens[beg:end])], [])

    def _plan_beams(self, position: int, search: BeamSearch) -> Work | None:
        """The last token of every hypothesis. None if the request had to be suspended."""
        request, cache = self._open[position], self._caches[position]
        if not (self._widen(position, search.width) and self._grow(position, request.computed + 1)):
            return None
        chunks = [
            Chunk(self.memory.view(request.buffers, cache, beam), request.computed, hypothesis.tokens[-1:])
            for beam, hypothesis in enumerate(search.hypotheses)
        ]
        return Work(request, cache, chunks, search.take_order())

    def _launch(self, step: list[Work], stream: Stream) -> None:
        """Queue one forward pass over all chunks on a stream, and publish its tokens."""
        if not step:
            return

        def forward() -> None:
            for work in step:
                if work.order != list(range(len(work.order))):
                    self._reorder(work)
            logits = iter(self._model.forward([chunk for work in step for chunk in work.chunks]))
            for work in step:
                work.request.pending = [next(logits) for _chunk in work.chunks]

        self._driver.launch(stream, forward)
        for work in step:
            request = work.request
            request.computed += len(work.chunks[0].tokens)
            if request.search is None and (not request.decoding or request.computed % self._commit_every == 0):
                self._publish(request, work.cache)

    def _reorder(self, work: Work) -> None:
        """Part of a launch: the beams take over what their hypotheses go on from, from the block on in which the prompt ends."""
        views = [chunk.view for chunk in work.chunks if isinstance(chunk.view, PagedView)]
        first_block = work.request.prompt_length // self._manager.tokens_per_block
        self.beam_pages_copied += self.memory.reorder(views, work.order, first_block)

    def _publish(self, request: Request, cache: KVCache, *, is_end: bool = False) -> None:
        """Commit all that is computed: from here on others can begin with it, and here a snapshot is taken."""
        advanced = cache.resize(None, request.computed)
        assert advanced, "advancing the history needs no page"
        cache.commit(request.tokens[cache.num_committed_tokens : request.computed], is_end=is_end)

    def _read_logits(self, step: list[Work], stream: Stream) -> None:
        """Wait for a pass, keep its logits, and choose the next token of each request whose prompt is done."""
        if not step:
            return
        self._driver.record_event(self._step_done, stream)
        self._driver.synchronize_event(self._step_done)
        for work in step:
            request = work.request
            logits, request.pending = request.pending, []
            assert logits, "the forward pass has not run although its stream was waited for"
            self._keep(work, logits)
            if request.computed < len(request.tokens):
                continue
            if request.search is not None:
                self._advance_search(request, work.cache, request.search, logits)
            elif not request.decoding and request.beam_width > 1:
                self.beam_searches += 1
                request.search = BeamSearch(logits[0][-1], request.beam_width, min(BEAM_TOKENS, request.answer_length))
            else:
                self._answer(request, [int(logits[0][-1].argmax())])
            if not request.decoding:
                request.decoding = True
                work.cache.cuda_stream = self._decode_stream

    def _keep(self, work: Work, logits: Sequence[FloatArray]) -> None:
        """Remember what was computed, for the comparison."""
        request, search = work.request, work.request.search
        for beam, (chunk, rows) in enumerate(zip(work.chunks, logits, strict=True)):
            branch = search.hypotheses[beam].tokens[:-1] if search is not None else None
            self.chunks.append(ComputedChunk(request.conversation.number, chunk.beg, list(chunk.tokens), rows, branch))

    def _advance_search(self, request: Request, cache: KVCache, search: BeamSearch, logits: Sequence[FloatArray]) -> None:
        """Choose the hypotheses that go on; at the end, keep the winner and what its beam has computed."""
        search.advance([rows[-1] for rows in logits])
        if not search.done:
            return
        tokens = search.hypotheses[0].tokens  # all but the last one are computed
        winner = search.parents[0]
        advanced = cache.resize(None, request.computed)
        assert advanced, "advancing the history needs no page"
        cache.commit(tokens[:-1], beam_search_indices=[winner] * (len(tokens) - 1))
        cache.beam_width = 1  # the winner's pages and states are beam 0's now
        request.search = None
        self._answer(request, tokens)

    def _answer(self, request: Request, tokens: Sequence[int]) -> None:
        request.tokens.extend(tokens)
        self.stats[request.conversation.number].generated += len(tokens)

    def _retire(self) -> None:
        """Close finished requests, and queue the next turns. Their pages stay cached for requests with the same prefix: the next
        turn begins where this one ends."""
        for position in reversed(range(self._num_running)):
            request = self._open[position]
            if not request.finished:
                continue
            del self._open[position]
            cache = self._caches.pop(position)
            self._publish(request, cache, is_end=True)
            cache.close()
            self._num_running -= 1
            self._crowded = False
            if request.turn + 1 < len(request.conversation.messages):
                self._queue.append((request.conversation, request.turn + 1))
