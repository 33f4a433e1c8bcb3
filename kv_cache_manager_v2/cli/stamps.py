"""Proof that a reused page holds what its tokens need: pages are stamped when they are computed and compared when they are reused.

Rule: stamps are written and read in the stream's order, as a kernel would, so a page that is handed on too early, moved wrongly or
matched wrongly shows. Token t of a block has the 4 bytes at 4 * t of its page: its fingerprint, which depends on all tokens before.
A recurrent state has the fingerprint of the last token that went into it: it is another one at every length.
"""

from __future__ import annotations

from typing import Final

from kv_cache_manager_v2 import EmulatedDriver, KVCache, KVCacheManager
from kv_cache_manager_v2.cli.contents import FINGERPRINT_BYTES
from kv_cache_manager_v2.cli.layers import ROLE, LayerKind, Layers
from kv_cache_manager_v2.ids import BAD_PAGE_INDEX, Stream

MAX_MISMATCHES: Final = 20  # how many are described

Piece = tuple[str, int, bytes]  # what it is, in words; address; the bytes that are to be there


class PageStamps:
    """Writes and checks the pages of one manager, whose layers are those of `layers`."""

    def __init__(self, manager: KVCacheManager, driver: EmulatedDriver, stream: Stream, layers: Layers) -> None:
        self._driver = driver
        self._stream = stream
        self._lanes = [_Lane(manager, kind) for kind in layers.kinds if not kind.recurrent]
        self._states = [_State(manager, kind) for kind in layers.kinds if kind.recurrent]
        self.pages_checked = 0  # comparisons that have run
        self.num_mismatches = 0
        self.mismatches: list[str] = []  # the first MAX_MISMATCHES of them

    def write(self, cache: KVCache, fingerprints: bytes, beg: int, end: int) -> None:
        """Stamp tokens [beg, end) of a running request, whose first tokens have these fingerprints, and its state at `end`."""
        pieces = self._pieces(cache, fingerprints, beg, end)
        if pieces:
            self._driver.launch(self._stream, lambda: self._write(pieces))

    def check(self, cache: KVCache, request: int, fingerprints: bytes, num_tokens: int) -> None:
        """Compare what is left of the first `num_tokens`, all computed, of a running request, named `request` in a message."""
        pieces = self._pieces(cache, fingerprints, 0, num_tokens)
        if pieces:
            self._driver.launch(self._stream, lambda: self._check(pieces, request))

    def _pieces(self, cache: KVCache, fingerprints: bytes, beg: int, end: int) -> list[Piece]:
        """Each block's share of tokens [beg, end), and the state at `end`."""
        if beg >= end:
            return []
        pieces: list[Piece] = []
        for lane in self._lanes:
            pieces += lane.pieces(cache, fingerprints, beg, end)
        for state in self._states:
            pieces.append(state.piece(cache, fingerprints, end))
        return pieces

    def _write(self, pieces: list[Piece]) -> None:
        for _what, address, stamp in pieces:
            self._driver.write_bytes(address, stamp)

    def _check(self, pieces: list[Piece], request: int) -> None:
        for what, address, stamp in pieces:
            self.pages_checked += 1
            found = self._driver.read_bytes(address, len(stamp))
            if found == stamp:
                continue
            self.num_mismatches += 1
            if len(self.mismatches) < MAX_MISMATCHES:
                token = next(at for at in range(len(stamp)) if found[at] != stamp[at]) // FINGERPRINT_BYTES
                self.mismatches.append(
                    f"request {request}, {what}: token {token} of {len(stamp) // FINGERPRINT_BYTES} is another's"
                )


class _Lane:
    """Where the pages of an attention layer lie."""

    def __init__(self, manager: KVCacheManager, kind: LayerKind) -> None:
        self._kind = kind
        self._group = manager.get_layer_group_id(kind.layer)
        self._base = manager.get_mem_pool_base_address(kind.layer, ROLE)
        self._stride = manager.get_page_stride(kind.layer, ROLE)
        self._convert = manager.get_page_index_converter(kind.layer, ROLE)
        self._tokens_per_block = manager.tokens_per_block
        self._prefix = "" if kind.name == "full" else f"{kind.name} layer, "

    def pieces(self, cache: KVCache, fingerprints: bytes, beg: int, end: int) -> list[Piece]:
        """Each block's share of tokens [beg, end), without the blocks that left the window."""
        size = self._tokens_per_block
        first = beg // size
        last = -(-end // size)
        base_indices = cache.get_base_page_indices(self._group)
        indices = self._convert(base_indices[first:last])
        stale_beg, stale_end = self._kind.stale(cache.history_length, size)
        pieces: list[Piece] = []
        for ordinal, index in zip(range(first, last), indices, strict=True):
            if stale_beg <= ordinal < stale_end:
                continue
            assert index != BAD_PAGE_INDEX, f"block {ordinal} of a running request has no page for a layer that needs it"
            lo = max(beg, ordinal * size)
            hi = min(end, (ordinal + 1) * size)
            address = self._base + index * self._stride + (lo - ordinal * size) * FINGERPRINT_BYTES
            stamp = fingerprints[lo * FINGERPRINT_BYTES : hi * FINGERPRINT_BYTES]
            pieces.append((f"{self._prefix}block {ordinal}", address, stamp))
        return pieces


class _State:
    """Where the states of a recurrent layer lie."""

    def __init__(self, manager: KVCacheManager, kind: LayerKind) -> None:
        self._name = kind.name
        self._group = manager.get_layer_group_id(kind.layer)
        self._base = manager.get_mem_pool_base_address(kind.layer, ROLE)
        self._stride = manager.get_page_stride(kind.layer, ROLE)
        self._convert = manager.get_page_index_converter(kind.layer, ROLE)

    def piece(self, cache: KVCache, fingerprints: bytes, num_tokens: int) -> Piece:
        """The state after the first `num_tokens`."""
        slot = cache.get_ssm_block_base_index(self._group)
        assert slot != BAD_PAGE_INDEX, "a running request has no state"
        (index,) = self._convert([slot])
        end = num_tokens * FINGERPRINT_BYTES
        return f"{self._name} state at {num_tokens}", self._base + index * self._stride, fingerprints[end - FINGERPRINT_BYTES : end]
