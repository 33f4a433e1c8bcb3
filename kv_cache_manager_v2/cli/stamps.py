"""Proof that a reused page holds what its tokens need: pages are stamped when they are computed and compared when they are reused.

Rule: stamps are written and read in the stream's order, as a kernel would, so a page that is handed on too early, moved wrongly or
matched wrongly shows. Token t of a block has the 4 bytes at 4 * t of its page: its fingerprint, which depends on all tokens before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

from kv_cache_manager_v2 import EmulatedDriver, KVCache, KVCacheManager
from kv_cache_manager_v2.cli.capacity import LAYER, ROLE
from kv_cache_manager_v2.cli.contents import FINGERPRINT_BYTES
from kv_cache_manager_v2.ids import BAD_PAGE_INDEX, Stream

MAX_MISMATCHES: Final = 20  # how many are described


class PageStamps:
    """Writes and checks the pages of one manager's only layer."""

    def __init__(self, manager: KVCacheManager, driver: EmulatedDriver, stream: Stream) -> None:
        self._driver = driver
        self._stream = stream
        self._group = manager.get_layer_group_id(LAYER)
        self._base = manager.get_mem_pool_base_address(LAYER, ROLE)
        self._stride = manager.get_page_stride(LAYER, ROLE)
        self._convert = manager.get_page_index_converter(LAYER, ROLE)
        self._tokens_per_block = manager.tokens_per_block
        self.pages_checked = 0  # comparisons that have run
        self.num_mismatches = 0
        self.mismatches: list[str] = []  # the first MAX_MISMATCHES of them

    def write(self, cache: KVCache, fingerprints: bytes, beg: int, end: int) -> None:
        """Stamp tokens [beg, end) of a running request, whose first tokens have these fingerprints."""
        pieces = self._pieces(cache, fingerprints, beg, end)
        if pieces:
            self._driver.launch(self._stream, lambda: self._write(pieces))

    def check(self, cache: KVCache, request: int, fingerprints: bytes, num_tokens: int) -> None:
        """Compare the first `num_tokens` of a running request. `request` is its name in a message."""
        pieces = self._pieces(cache, fingerprints, 0, num_tokens)
        if pieces:
            self._driver.launch(self._stream, lambda: self._check(pieces, request))

    def _pieces(self, cache: KVCache, fingerprints: bytes, beg: int, end: int) -> list[tuple[int, bytes]]:
        """(address, bytes) of each block's share of tokens [beg, end)."""
        if beg >= end:
            return []
        size = self._tokens_per_block
        first = beg // size
        last = -(-end // size)
        base_indices = cast("Sequence[int]", cache.get_base_page_indices(self._group))
        indices = self._convert(base_indices[first:last])
        pieces: list[tuple[int, bytes]] = []
        for ordinal, index in zip(range(first, last), indices, strict=True):
            assert index != BAD_PAGE_INDEX, f"block {ordinal} of a running request without a window has no page"
            lo = max(beg, ordinal * size)
            hi = min(end, (ordinal + 1) * size)
            address = self._base + index * self._stride + (lo - ordinal * size) * FINGERPRINT_BYTES
            pieces.append((address, fingerprints[lo * FINGERPRINT_BYTES : hi * FINGERPRINT_BYTES]))
        return pieces

    def _write(self, pieces: list[tuple[int, bytes]]) -> None:
        for address, stamp in pieces:
            self._driver.write_bytes(address, stamp)

    def _check(self, pieces: list[tuple[int, bytes]], request: int) -> None:
        for ordinal, (address, stamp) in enumerate(pieces):
            self.pages_checked += 1
            found = self._driver.read_bytes(address, len(stamp))
            if found == stamp:
                continue
            self.num_mismatches += 1
            if len(self.mismatches) < MAX_MISMATCHES:
                token = next(at for at in range(len(stamp)) if found[at] != stamp[at]) // FINGERPRINT_BYTES
                self.mismatches.append(
                    f"request {request}, block {ordinal}: token {token} of {len(stamp) // FINGERPRINT_BYTES} is another's"
                )
