"""A Llama-style decoder in numpy: grouped-query attention, rotary positions, RMSNorm, SwiGLU, float32, seeded random weights.
Some layers may be a gated linear recurrence in place of attention: what they know of the past is one matrix per head.

Rule: a token's result does not depend, to the bit, on what else is computed in the same call. Every row goes through matrix
products of one shape of its own (a stack of 1 x n products), and attends to exactly the keys that it may see; a recurrence takes
one token after the other. So prefill may be chunked and decode batched in any way, and two runs agree exactly if and only if their
keys, values and states do.

The model sees keys, values and states only through a `KVView`: it says "store these" and "give me those".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
MEMORY_BIAS = np.float32(3)  # a state keeps about 95 % when a token is added: a token is felt for a hundred more


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the model. `windows[layer]` is the number of tokens that a layer's query sees, itself included; None is all.

    `recurrent` names the layers that are recurrences; they have no window.
    """

    vocabulary: int = 256  # tokens are the bytes of UTF-8 text
    width: int = 128
    query_heads: int = 8
    kv_heads: int = 2
    head_size: int = 16
    hidden: int = 256
    windows: tuple[int | None, ...] = (None, None, 64, None, None)
    recurrent: frozenset[int] = frozenset()
    rope_base: float = 10_000.0
    max_tokens: int = 4096  # longest sequence

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Of a recurrent layer's state: a matrix of keys by values for each head."""
        return self.kv_heads, self.head_size, self.head_size


# recurrences, full attention and a window; with 16 tokens a block all three kinds have pages of one size and share them
HYBRID_SHAPE = ModelShape(kv_heads=4, windows=(None, None, None, 64), recurrent=frozenset((0, 2)))


class KVView(ABC):
    """One sequence's keys, values and states, however they are kept. Arrays are (tokens, kv_heads, head_size)."""

    @abstractmethod
    def store(self, layer: int, beg: int, keys: FloatArray, values: FloatArray) -> None:
        """Keep keys and values of the tokens from position `beg` on."""

    @abstractmethod
    def load(self, layer: int, beg: int, end: int) -> tuple[FloatArray, FloatArray]:
        """Keys and values of tokens [beg, end), contiguous."""

    @abstractmethod
    def store_state(self, layer: int, state: FloatArray) -> None:
        """Store a recurrent layer's state, replacing the previous one."""

    @abstractmethod
    def load_state(self, layer: int) -> FloatArray:
        """A recurrent layer's state after the last computed token. Not called before the first token."""


@dataclass(frozen=True)
class Chunk:
    """Some consecutive tokens of one sequence, to be computed in one step."""

    view: KVView
    beg: int  # position of the first token
    tokens: Sequence[int]


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer, each (inputs, outputs)."""

    attention_norm: FloatArray
    query: FloatArray
    key: FloatArray
    value: FloatArray
    output: FloatArray
    mlp_norm: FloatArray
    gate: FloatArray
    up: FloatArray
    down: FloatArray
    memory: FloatArray | None  # of a recurrence: how much of each head's state stays when a token is added


class TinyLlama:
    """The model. Its weights follow from the seed alone."""

    def __init__(self, shape: ModelShape, seed: int) -> None:
        self.shape = shape
        random = np.random.default_rng(seed)
        query_size = shape.query_heads * shape.head_size
        kv_size = shape.kv_heads * shape.head_size

        def weights(inputs: int, outputs: int) -> FloatArray:
            return (random.standard_normal((inputs, outputs), dtype=np.float32) / np.float32(np.sqrt(inputs))).astype(np.float32)

        def norm() -> FloatArray:
            return (1 + 0.1 * random.standard_normal(shape.width, dtype=np.float32)).astype(np.float32)

        self._embedding = random.standard_normal((shape.vocabulary, shape.width), dtype=np.float32)
        self._layers = [
            LayerWeights(
                attention_norm=norm(),
                query=weights(shape.width, query_size),
                key=weights(shape.width, kv_size),
                value=weights(shape.width, kv_size),
                output=weights(query_size, shape.width),
                mlp_norm=norm(),
                gate=weights(shape.width, shape.hidden),
                up=weights(shape.width, shape.hidden),
                down=weights(shape.hidden, shape.width),
                memory=weights(shape.width, shape.kv_heads) if layer in shape.recurrent else None,
            )
            for layer in range(shape.num_layers)
        ]
        self._final_norm = norm()
        self._head = weights(shape.width, shape.vocabulary)
        half = shape.head_size // 2
        frequencies = (shape.rope_base ** (-np.arange(half, dtype=np.float32) / half)).astype(np.float32)
        angles = np.arange(shape.max_tokens, dtype=np.float32)[:, None, None] * frequencies
        self._cos: FloatArray = np.cos(angles)  # rotary angles: (position, 1, head_size / 2)
        self._sin: FloatArray = np.sin(angles)

    def forward(self, chunks: Sequence[Chunk]) -> list[FloatArray]:
        """Logits of every token of every chunk: one (tokens, vocabulary) array a chunk.

        All chunks go through the layers together; only attention and recurrences look at one sequence at a time.
        """
        shape = self.shape
        tokens = np.concatenate([np.asarray(chunk.tokens, dtype=np.int64) for chunk in chunks])
        positions = np.concatenate([np.arange(chunk.beg, chunk.beg + len(chunk.tokens)) for chunk in chunks])
        bounds = np.cumsum([0] + [len(chunk.tokens) for chunk in chunks])
        cos, sin = self._cos[positions], self._sin[positions]
        stream = self._embedding[tokens]
        for number, layer in enumerate(self._layers):
            normed = rms_norm(stream, layer.attention_norm)
            queries = rows_times(normed, layer.query).reshape(-1, shape.query_heads, shape.head_size)
            keys = rows_times(normed, layer.key).reshape(-1, shape.kv_heads, shape.head_size)
            values = rows_times(normed, layer.value).reshape(-1, shape.kv_heads, shape.head_size)
            attended = np.empty_like(queries)
            if layer.memory is None:
                queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
                for chunk, (beg, end) in zip(chunks, pairwise(bounds), strict=True):
                    chunk.view.store(number, chunk.beg, keys[beg:end], values[beg:end])
                    self._attend(number, chunk, queries[beg:end], attended[beg:end])
            else:
                kept = 1 / (1 + np.exp(-rows_times(normed, layer.memory) - MEMORY_BIAS))
                for chunk, (beg, end) in zip(chunks, pairwise(bounds), strict=True):
                    self._recur(number, chunk, (queries[beg:end], keys[beg:end], values[beg:end], kept[beg:end]), attended[beg:end])
            stream = stream + rows_times(attended.reshape(len(tokens), -1), layer.output)
            normed = rms_norm(stream, layer.mlp_norm)
            gate = rows_times(normed, layer.gate)
            stream = stream + rows_times(gate / (1 + np.exp(-gate)) * rows_times(normed, layer.up), layer.down)
        logits = rows_times(rms_norm(stream, self._final_norm), self._head)
        return [logits[beg:end] for beg, end in pairwise(bounds)]

    def _attend(self, layer: int, chunk: Chunk, queries: FloatArray, out: FloatArray) -> None:
        """Attention of one chunk's queries over the keys that each may see, itself the last."""
        shape = self.shape
        window = shape.windows[layer]
        end = chunk.beg + len(chunk.tokens)
        first = 0 if window is None else max(0, chunk.beg + 1 - window)
        keys, values = chunk.view.load(layer, first, end)
        keys = keys.transpose(1, 2, 0)  # (kv_heads, head_size, tokens)
        values = values.transpose(1, 0, 2)  # (kv_heads, tokens, head_size)
        grouped = queries.reshape(-1, shape.kv_heads, shape.query_heads // shape.kv_heads, shape.head_size)
        grouped = grouped * np.float32(shape.head_size**-0.5)
        for row in range(len(chunk.tokens)):
            position = chunk.beg + row
            hi = position + 1 - first
            lo = 0 if window is None else max(0, position + 1 - window) - first
            scores = grouped[row] @ keys[:, :, lo:hi]
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            scores /= scores.sum(axis=-1, keepdims=True)
            out[row] = (scores @ values[:, lo:hi]).reshape(shape.query_heads, shape.head_size)

    def _recur(
        self, layer: int, chunk: Chunk, inputs: tuple[FloatArray, FloatArray, FloatArray, FloatArray], out: FloatArray
    ) -> None:
        """One chunk through a recurrence: state = kept * state + key (x) value, and a query reads the state that has its token."""
        shape = self.shape
        queries, keys, values, kept = inputs
        state = np.zeros(shape.state_shape, dtype=np.float32) if chunk.beg == 0 else chunk.view.load_state(layer)
        grouped = queries.reshape(-1, shape.kv_heads, shape.query_heads // shape.kv_heads, shape.head_size)
        grouped = grouped * np.float32(shape.head_size**-0.5)
        for row in range(len(chunk.tokens)):
            state = kept[row, :, None, None] * state + keys[row, :, :, None] * values[row, :, None, :]
            out[row] = (grouped[row] @ state).reshape(shape.query_heads, shape.head_size)
        chunk.view.store_state(layer, state)


def rows_times(rows: FloatArray, weights: FloatArray) -> FloatArray:
    """rows @ weights, each row a product of its own, so that its bits do not depend on how many rows there are."""
    product: FloatArray = (rows[:, None, :] @ weights)[:, 0, :]
    return product


def rms_norm(rows: FloatArray, scale: FloatArray) -> FloatArray:
    """Each row divided by its root mean square, then scaled."""
    mean_square = np.mean(rows * rows, axis=-1, keepdims=True, dtype=np.float32)
    return np.asarray(rows / np.sqrt(mean_square + np.float32(1e-5)) * scale, dtype=np.float32)


def rotate(heads: FloatArray, cos: FloatArray, sin: FloatArray) -> FloatArray:
    """Rotary position embedding of (tokens, heads, head_size), the two halves of a head being the two coordinates."""
    half = heads.shape[-1] // 2
    left, right = heads[..., :half], heads[..., half:]
    return np.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)
