"""Verifies that reused pages have the right contents: stamps are written when pages are computed, and compared at each reuse.

Stamps are written and read in stream order, as by a kernel. So a page that is freed too early, moved wrongly or matched wrongly is
found. The stamp of token t of a block is its fingerprint, which depends on all earlier tokens, at byte 4 * t of the page. The stamp
of a recurrent state is the fingerprint of its last token, which differs at every length.
"""

from __future__ import annotations

from typing import Final

from kv_cache_manager_v2 import EmulatedDriver, KVCache, KVCacheManager
from kv_cache_manager_v2.cli.contents import FINGERPRINT_BYTES
from kv_cache_manager_v2.cli.layers import ROLE, LayerKind, Layers
from kv_cache_manager_v2.ids import BAD_PAGE_INDEX, Stream

MAX_MISMATCHES: Final = 20  # most mismatches that are described

Stamp = tuple[str, int, bytes]  # description, address, expected bytes


class PageStamps:
    """Writes and compares the stamps of one manager's pages."""

    def __init__(self, manager: KVCacheManager, driver: EmulatedDriver, stream: Stream, layers: Layers) -> None:
        self._driver = driver
        self._stream = stream
        self._attention = [_AttentionStamps(manager, kind) for kind in layers.kinds if not kind.recurrent]
        self._states = [_StateStamps(manager, kind) for kind in layers.kinds if kind.recurrent]
        self.pages_checked = 0  # comparisons so far
        self.num_mismatches = 0
        self.mismatches: list[str] = []  # the first MAX_MISMATCHES of them

    def write(self, cache: KVCache, fingerprints: bytes, beg: int, end: int) -> None:
        """Queue the writing of stamps for tokens [beg, end) of a running request, and for its state at `end`.

        `fingerprints` are those of the request's tokens from the first one on.
        """
        stamps = self._stamps_of(cache, fingerprints, beg, end)
        if stamps:
            self._driver.launch(self._stream, lambda: self._write(stamps))

    def check(self, cache: KVCache, request: int, fingerprints: bytes, num_tokens: int) -> None:
        """Queue a comparison of all pages that a running request still has for its first `num_tokens` tokens."""
        stamps = self._stamps_of(cache, fingerprints, 0, num_tokens)
        if stamps:
            self._driver.launch(self._stream, lambda: self._check(stamps, request))

    def _stamps_of(self, cache: KVCache, fingerprints: bytes, beg: int, end: int) -> list[Stamp]:
        """The stamps of tokens [beg, end), one per block, and of the state at `end`."""
        if beg >= end:
            return []
        stamps: list[Stamp] = []
        for layer in self._attention:
            stamps += layer.stamps(cache, fingerprints, beg, end)
        for state in self._states:
            stamps.append(state.stamp(cache, fingerprints, end))
        return stamps

    def _write(self, stamps: list[Stamp]) -> None:
        for _what, address, stamp in stamps:
            self._driver.write_bytes(address, stamp)

    def _check(self, stamps: list[Stamp], request: int) -> None:
        for what, address, stamp in stamps:
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


class _AttentionStamps:
    """The stamps of an attention layer's pages."""

    def __init__(self, manager: KVCacheManager, kind: LayerKind) -> None:
        self._kind = kind
        self._group = manager.get_layer_group_id(kind.layer)
        self._base = manager.get_mem_pool_base_address(kind.layer, ROLE)
        self._stride = manager.get_page_stride(kind.layer, ROLE)
        self._convert = manager.get_page_index_converter(kind.layer, ROLE)
        self._tokens_per_block = manager.tokens_per_block
        self._prefix = "" if kind.name == "full" else f"{kind.name} layer, "

    def stamps(self, cache: KVCache, fingerprints: bytes, beg: int, end: int) -> list[Stamp]:
        """The stamps of tokens [beg, end), one per block, without blocks outside the window."""
        size = self._tokens_per_block
        first = beg // size
        last = -(-end // size)
        base_indices = cache.get_base_page_indices(self._group)
        indices = self._convert(base_indices[first:last])
        stale_beg, stale_end = self._kind.stale(cache.history_length, size)
        stamps: list[Stamp] = []
        for ordinal, index in zip(range(first, last), indices, strict=True):
            if stale_beg <= ordinal < stale_end:
                continue
            assert index != BAD_PAGE_INDEX, f"block {ordinal} of a running request has no page for a layer that needs it"
            lo = max(beg, ordinal * size)
            hi = min(end, (ordinal + 1) * size)
            address = self._base + index * self._stride + (lo - ordinal * size) * FINGERPRINT_BYTES
            stamp = fingerprints[lo * FINGERPRINT_BYTES : hi * FINGERPRINT_BYTES]
            stamps.append((f"{self._prefix}block {ordinal}", address, stamp))
        return stamps


class _StateStamps:
    """The stamps of a recurrent layer's states."""

    def __init__(self, manager: KVCacheManager, kind: LayerKind) -> None:
        self._name = kind.name
        self._group = manager.get_layer_group_id(kind.layer)
        self._base = manager.get_mem_pool_base_address(kind.layer, ROLE)
        self._stride = manager.get_page_stride(kind.layer, ROLE)
        self._convert = manager.get_page_index_converter(kind.layer, ROLE)

    def stamp(self, cache: KVCache, fingerprints: bytes, num_tokens: int) -> Stamp:
        """The stamp of the state after the first `num_tokens` tokens."""
        slot = cache.get_ssm_block_base_index(self._group)
        assert slot != BAD_PAGE_INDEX, "a running request has no state"
        (index,) = self._convert([slot])
        end = num_tokens * FINGERPRINT_BYTES
        return f"{self._name} state at {num_tokens}", self._base + index * self._stride, fingerprints[end - FINGERPRINT_BYTES : end]
