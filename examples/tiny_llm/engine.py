"""A serving engine in small: continuous batching, chunked prefill and preemption on top of `KVCacheManager`.

Rule: the manager decides where keys and values live, the engine only who computes next. Running requests are a prefix of the open
ones in order of admission; who gets no page makes the newest running one wait, and waiting ones come back last out, first in, once
another has ended.

Prefill and decode have a stream each. A request moves from one to the other when its prompt is done; the manager makes the second
stream wait for what the first still does with the request's pages. Whatever is published by `commit` may still be in flight: who
reuses it waits on its stream, never on the host. The host waits only for the logits that it must look at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kv_cache_manager_v2 import EmulatedDriver, KVCache, KVCacheManager, ReuseScope
from kv_cache_manager_v2.ids import DEFAULT_BEAM_INDEX, LayerGroupId, Stream
from tiny_llm.model import Chunk, FloatArray, TinyLlama
from tiny_llm.paged import IndexArray, PagedMemory
from tiny_llm.workload import Conversation


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
    """One computed chunk, for the comparison: tokens from position `beg` of the conversation, and a row of logits for each."""

    conversation: int
    beg: int
    tokens: list[int]
    logits: FloatArray


class Request:
    """One turn of a conversation while it is served."""

    def __init__(self, conversation: Conversation, turn: int, prompt: list[int], buffers: dict[LayerGroupId, IndexArray]) -> None:
        self.conversation = conversation
        self.turn = turn
        self.tokens = prompt  # the prompt, then what is generated
        self.prompt_length = len(prompt)
        self.answer_length = conversation.answer_lengths[turn]
        self.buffers = buffers  # base page indices by layer group; the manager writes them
        self.decoding = False  # the prompt is computed
        self.pending: FloatArray | None = None  # logits of the last launch, once it has run

    @property
    def finished(self) -> bool:
        return len(self.tokens) == self.prompt_length + self.answer_length


class Engine:
    """Serves conversations to the end. `chunks` holds everything that was computed, in order of each conversation."""

    def __init__(
        self, model: TinyLlama, manager: KVCacheManager, driver: EmulatedDriver, *, max_running: int, chunk_tokens: int
    ) -> None:
        self._model = model
        self._manager = manager
        self._driver = driver
        self.memory = PagedMemory(manager, model.shape)
        self._prefill_stream: Stream = driver.create_stream()
        self._decode_stream: Stream = driver.create_stream()
        self._step_done = driver.create_event()
        self._max_running = max_running  # requests open at once
        self._chunk_tokens = chunk_tokens  # most prompt tokens of one request in a step
        self._queue: deque[tuple[Conversation, int]] = deque()  # (conversation, turn) to be admitted
        self._open: list[Request] = []  # in order of admission
        self._caches: list[KVCache] = []  # of the open requests
        self._num_running = 0  # _open[:_num_running] run, the others are suspended
        self._crowded = False  # somebody was suspended, and nobody has ended since: resuming would only suspend again
        self.histories: dict[int, list[int]] = {}  # conversation -> all tokens so far
        self.chunks: list[ComputedChunk] = []
        self.stats: dict[int, ConversationStats] = {}
        self.steps = 0

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
        """Give up what is open, and the streams."""
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
        buffers = {group: np.empty(max_blocks, dtype=np.int32) for group in self.memory.groups}
        request = Request(conversation, turn, history, buffers)
        cache = self._manager.create_kv_cache(ReuseScope(), history[:-1], id=conversation.number * 1000 + turn)
        stats = self.stats[conversation.number]
        stats.turns += 1
        stats.prompt += request.prompt_length
        stats.computed += request.prompt_length - cache.num_committed_tokens
        for level, num_tokens in enumerate(cache.cached_tokens_by_level):
            stats.reused_by_level[level] += num_tokens
        self._open.append(request)
        self._caches.append(cache)

    def _resume(self, position: int) -> bool:
        """Bring one request's pages to the GPU and attach its index buffers again; False if there is no room."""
        request, cache = self._open[position], self._caches[position]
        if not cache.resume(self._decode_stream if request.decoding else self._prefill_stream):
            return False
        for group, buffer in request.buffers.items():
            cache.set_base_page_index_buf(DEFAULT_BEAM_INDEX, group, buffer)
        return True

    def _grow(self, position: int, capacity: int) -> bool:
        """Room for `capacity` tokens, at the cost of newer requests; False if this one was suspended itself."""
        cache = self._caches[position]
        while not cache.resize(capacity, cache.num_committed_tokens):
            self._num_running -= 1
            self._caches[self._num_running].suspend()
            self._crowded = True
            self.stats[self._open[self._num_running].conversation.number].suspensions += 1
            if position == 0 and self._num_running == 0:
                raise RuntimeError(f"{capacity} tokens do not fit the cache, even alone")
            if self._num_running == position:
                return False
        return True

    # --- a step

    def _plan_step(self) -> tuple[list[tuple[Request, Chunk]], list[tuple[Request, Chunk]]]:
        """What to compute now: a chunk of every prompt that is not done, and a token of every other running request."""
        prefill: list[tuple[Request, Chunk]] = []
        decode: list[tuple[Request, Chunk]] = []
        position = 0
        while position < self._num_running:
            request, cache = self._open[position], self._caches[position]
            beg = cache.num_committed_tokens
            end = min(len(request.tokens), beg + self._chunk_tokens)
            if not self._grow(position, end):
                break
            tokens = request.tokens[beg:end]
            chunk = Chunk(self.memory.view(request.buffers, cache), beg, tokens)
            (decode if request.decoding else prefill).append((request, chunk))
            position += 1
        return prefill, decode

    def _launch(self, work: list[tuple[Request, Chunk]], stream: Stream) -> None:
        """Queue one forward pass over all chunks on a stream, and publish its tokens."""
        if not work:
            return
        chunks = [chunk for _request, chunk in work]
        requests = [request for request, _chunk in work]

        def forward() -> None:
            for request, logits in zip(requests, self._model.forward(chunks), strict=True):
                request.pending = logits

        self._driver.launch(stream, forward)
        for request, chunk in work:
            self._cache_of(request).commit(list(chunk.tokens))

    def _read_logits(self, work: list[tuple[Request, Chunk]], stream: Stream) -> None:
        """Wait for a pass, keep its logits, and choose the next token of each request whose prompt is done."""
        if not work:
            return
        self._driver.record_event(self._step_done, stream)
        self._driver.synchronize_event(self._step_done)
        for request, chunk in work:
            logits, request.pending = request.pending, None
            assert logits is not None, "the forward pass has not run although its stream was waited for"
            self.chunks.append(ComputedChunk(request.conversation.number, chunk.beg, list(chunk.tokens), logits))
            if chunk.beg + len(chunk.tokens) < len(request.tokens):
                continue
            request.tokens.append(int(logits[-1].argmax()))
            self.stats[request.conversation.number].generated += 1
            if not request.decoding:
                request.decoding = True
                self._cache_of(request).cuda_stream = self._decode_stream

    def _retire(self) -> None:
        """Close finished requests, and queue the next turns. Their pages stay in the cache for whoever begins alike."""
        for position in reversed(range(self._num_running)):
            request = self._open[position]
            if not request.finished:
                continue
            del self._open[position]
            self._caches.pop(position).close()
            self._num_running -= 1
            self._crowded = False
            if request.turn + 1 < len(request.conversation.messages):
                self._queue.append((request.conversation, request.turn + 1))

    def _cache_of(self, request: Request) -> KVCache:
        return self._caches[self._open.index(request)]
