"""Generates the tokens of a trace, which names blocks by id only.

A token is a function of (id, position, seed) alone, and no two (id, position) pairs of one run share a token. So two blocks share
their first token exactly if they have the same id, and a partial block is the beginning of the block with its id. Tokens of outputs
come from the other end of the range and never repeat.

Ids are numbered in order of first appearance. Block number n has the tokens n * block_size + position + seed, modulo 2**31.

The *fingerprint* of a token is 4 bytes that depend on it and on every token before it, as its keys and values do.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kv_cache_manager_v2.ids import TOKEN_ID_LIMIT

try:
    import numpy as np
except ImportError:  # optional: without it, tokens are generated a few times slower
    HAVE_NUMPY = False
else:
    HAVE_NUMPY = True

if TYPE_CHECKING:
    import numpy.typing as npt

    TokenBuffer = array[int] | npt.NDArray[np.int32]

FINGERPRINT_BYTES: Final = 4
MASK_31: Final = TOKEN_ID_LIMIT - 1
MASK_32: Final = (1 << 32) - 1
SEED_STRIDE: Final = 0x9E3779B1  # odd and large: neighbouring seeds give unrelated tokens
POSITION_STRIDE: Final = 0x85EBCA6B  # odd: the same token at two positions has two fingerprints
MIX_FACTOR: Final = 0xC2B2AE35  # odd multiplier of the murmur finaliser


class TokenRangeError(Exception):
    """A trace has more distinct tokens than there are token ids."""


class TokenSource(ABC):
    """Makes the tokens of prompts and outputs, and their fingerprints. All subclasses give the same results."""

    def __init__(self, block_size: int, seed: int) -> None:
        self._block_size = block_size  # tokens per block of the trace
        self._offset = seed * SEED_STRIDE  # added to every token
        self._number_of: dict[int, int] = {}  # block id -> number, in order of first appearance
        self._generated = 0  # tokens of outputs so far

    def prompt(self, block_ids: Sequence[int], num_tokens: int) -> TokenBuffer:
        """The first `num_tokens` tokens of the blocks, as an int32 buffer. Tokens after the last id occur nowhere else."""
        number_of = self._number_of
        block_size = self._block_size
        firsts = [number_of.setdefault(block_id, len(number_of)) * block_size + self._offset for block_id in block_ids]
        self._check_range()
        named = min(num_tokens, len(firsts) * block_size)
        tokens = self._prompt(firsts, named)
        return tokens if named == num_tokens else self.joined([tokens, self.output(num_tokens - named)])

    def output(self, num_tokens: int) -> TokenBuffer:
        """Tokens that occur nowhere else in this run, as an int32 buffer."""
        beg = self._offset - self._generated - num_tokens
        self._generated += num_tokens
        self._check_range()
        return self._run(beg, num_tokens)

    def _check_range(self) -> None:
        used = len(self._number_of) * self._block_size + self._generated
        if used > TOKEN_ID_LIMIT:
            raise TokenRangeError(
                f"the trace has more than {TOKEN_ID_LIMIT} distinct tokens ({len(self._number_of)} distinct blocks of "
                f"{self._block_size}); replay less of it with --max-records"
            )

    @abstractmethod
    def _prompt(self, firsts: list[int], num_tokens: int) -> TokenBuffer:
        """Blocks of consecutive tokens from each of `firsts`, modulo 2**31, cut to `num_tokens`."""

    @abstractmethod
    def _run(self, beg: int, num_tokens: int) -> TokenBuffer:
        """`num_tokens` consecutive tokens from `beg`, modulo 2**31."""

    @abstractmethod
    def joined(self, parts: Sequence[TokenBuffer]) -> TokenBuffer:
        """The concatenated parts."""

    @abstractmethod
    def fingerprints(self, tokens: TokenBuffer) -> bytes:
        """The fingerprints of consecutive tokens from the start of a prompt, FINGERPRINT_BYTES each, in native byte order."""


class ArrayTokenSource(TokenSource):
    """Uses only the standard library."""

    def _prompt(self, firsts: list[int], num_tokens: int) -> array[int]:
        tokens: array[int] = array("i")
        for first in firsts:
            tokens.extend(self._run(first, self._block_size))
        return tokens[:num_tokens]

    def _run(self, beg: int, num_tokens: int) -> array[int]:
        beg &= MASK_31
        if beg + num_tokens <= TOKEN_ID_LIMIT:
            return array("i", range(beg, beg + num_tokens))
        return array("i", [(beg + step) & MASK_31 for step in range(num_tokens)])

    def joined(self, parts: Sequence[TokenBuffer]) -> array[int]:
        tokens: array[int] = array("i")
        for part in parts:
            tokens.frombytes(part.tobytes())
        return tokens

    def fingerprints(self, tokens: TokenBuffer) -> bytes:
        mixed = [_mixed(token, position) for position, token in enumerate(tokens)]
        return array("I", [total & MASK_32 for total in itertools.accumulate(mixed)]).tobytes()


def _mixed(token: int, position: int) -> int:
    """A 32-bit hash of a token and its position."""
    value = (token + (position + 1) * POSITION_STRIDE) & MASK_32
    value = ((value ^ (value >> 16)) * MIX_FACTOR) & MASK_32
    return value ^ (value >> 13)


class NumpyTokenSource(TokenSource):
    """Uses numpy: a few operations per request."""

    def __init__(self, block_size: int, seed: int) -> None:
        super().__init__(block_size, seed)
        self._steps = np.arange(block_size, dtype=np.int64)

    def _prompt(self, firsts: list[int], num_tokens: int) -> npt.NDArray[np.int32]:
        starts = np.array([first & MASK_31 for first in firsts], dtype=np.int64)
        tokens = (starts[:, None] + self._steps) & MASK_31
        return tokens.astype(np.int32).reshape(-1)[:num_tokens]

    def _run(self, beg: int, num_tokens: int) -> npt.NDArray[np.int32]:
        return ((np.arange(num_tokens, dtype=np.int64) + (beg & MASK_31)) & MASK_31).astype(np.int32)

    def joined(self, parts: Sequence[TokenBuffer]) -> npt.NDArray[np.int32]:
        return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])

    def fingerprints(self, tokens: TokenBuffer) -> bytes:
        positions = np.arange(1, len(tokens) + 1, dtype=np.uint32)
        value = np.asarray(tokens).astype(np.uint32) + positions * np.uint32(POSITION_STRIDE)
        value = (value ^ (value >> np.uint32(16))) * np.uint32(MIX_FACTOR)
        return np.cumsum(value ^ (value >> np.uint32(13)), dtype=np.uint32).tobytes()


def token_source(block_size: int, seed: int) -> TokenSource:
    """The fastest token source available."""
    assert array("i").itemsize == array("I").itemsize == FINGERPRINT_BYTES
    return NumpyTokenSource(block_size, seed) if HAVE_NUMPY else ArrayTokenSource(block_size, seed)
