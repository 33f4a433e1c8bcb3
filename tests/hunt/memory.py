"""The engine's side of the pages: fingerprints, where they lie, and the kernels that write and compare them.

Rule: the bytes of a position follow from the scope, all tokens up to it and the layer group, and from nothing else. A page carries
them twice, at its beginning and at its end, in every buffer. A kernel that reads wrong bytes writes wrong bytes, as a model would.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from kv_cache_manager_v2 import BAD_PAGE_INDEX, KVCacheManager, PageIndexConverter, PageIndexMode
from tests.hunt.setups import WORD, Group

SPOILT: Final = 0xEE
MASK: Final = (1 << 56) - 1

Piece: TypeAlias = "tuple[memoryview, int, bytes]"  # memory, offset, bytes


def chained(chain: int, token: int) -> int:
    """The fingerprint of a position from the one before it."""
    return hash((chain, token)) & MASK


class Text:
    """Tokens and their fingerprints, by layer group."""

    def __init__(self, num_groups: int, root: int) -> None:
        self.root = root
        self.tokens: list[int] = []
        self.chains: list[int] = []
        self.words: list[bytearray] = [bytearray() for _ in range(num_groups)]

    def extend(self, tokens: Sequence[int]) -> None:
        chain = self.chains[-1] if self.chains else self.root
        chains = self.chains
        words = self.words
        for token in tokens:
            chain = hash((chain, token)) & MASK
            chains.append(chain)
            shifted = chain << 8
            for group, text in enumerate(words):
                text += (shifted | group).to_bytes(WORD, "little")
        self.tokens.extend(tokens)

    def cut(self, length: int) -> None:
        """Forget what follows the first tokens."""
        if length < len(self.tokens):
            del self.tokens[length:]
            del self.chains[length:]
            for text in self.words:
                del text[length * WORD :]

    def copy(self, length: int) -> Text:
        twin = Text(0, self.root)
        twin.tokens = self.tokens[:length]
        twin.chains = self.chains[:length]
        twin.words = [text[: length * WORD] for text in self.words]
        return twin

    def state(self, length: int, group: int) -> bytes:
        """The recurrent state after so many tokens."""
        chain = self.chains[length - 1] if length else self.root
        return ((chain << 8) | group).to_bytes(WORD, "little") * 4


class Buffer:
    """One buffer of one layer: page index to memory."""

    def __init__(self, view: memoryview, per_base: int, size: int, base: int, stride: int, converter: PageIndexConverter) -> None:
        self.view = view  # from the buffer's base address to the end of its pool
        self.per_base = per_base  # bytes from one base page index to the next
        self.size = size
        self.base = base
        self.stride = stride
        self.converter = converter


class GroupMemory:
    """The buffers of a layer group, by layer."""

    def __init__(self, index: int, group: Group, layers: list[list[Buffer]], pool: memoryview) -> None:
        self.index = index
        self.group = group
        self.layers = layers
        self.buffers = [(b.view, b.per_base, b.size) for layer in layers for b in layer]
        self.pool = pool  # all of it, for the PER_LAYER way of counting
        self.addresses = {id(pool): min(b.base for layer in layers for b in layer)}  # of what the views show
        self.addresses.update({id(b.view): b.base for layer in layers for b in layer})


def map_memory(manager: KVCacheManager, groups: list[Group], scratch: bool) -> list[GroupMemory]:
    """Views of all pages; to be made again when the GPU's quota or shares change."""
    found: list[GroupMemory] = []
    first = 0
    for group in groups:
        layers: list[list[Buffer]] = []
        index = int(manager.get_layer_group_id(first))
        for layer in range(first, first + group.layers):
            layers.append([_buffer(manager, layer, f"role {role}", scratch) for role in range(group.roles)])
        start = min(b.base for layer in layers for b in layer)
        length = max(b.base + len(b.view) for layer in layers for b in layer) - start
        found.append(GroupMemory(index, group, layers, _view(start, length)))
        first += group.layers
    return found


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def _buffer(manager: KVCacheManager, layer: int, role: str, scratch: bool) -> Buffer:
    base = manager.get_mem_pool_base_address(layer, role, PageIndexMode.SHARED)
    stride = manager.get_page_stride(layer, role)
    converter = manager.get_page_index_converter(layer, role)
    bound = manager.get_page_index_upper_bound(layer, role)
    per_base = converter([1], PageIndexMode.SHARED)[0] * stride
    return Buffer(_view(base, stride * bound), per_base, stride, base, stride, converter)


class Mismatch:
    """Bytes that a kernel read and that were not right."""

    def __init__(self, what: str, wanted: bytes, found: bytes) -> None:
        self.what = what
        self.wanted = wanted
        self.found = found

    def __repr__(self) -> str:
        return f"{self.what}: wanted {self.wanted.hex()}, found {self.found.hex()}"


class Step:
    """A kernel: for each phase compares what it reads, then writes, then compares what it wrote."""

    def __init__(self, what: str, tell: Callable[[Mismatch], None]) -> None:
        self.what = what
        self.tell = tell
        self.phases: list[tuple[list[Piece], list[Piece], list[Piece]]] = []

    def __call__(self) -> None:
        good = True
        for reads, writes, again in self.phases:
            good = self._compare(reads, "") and good
            if good:
                for view, offset, data in writes:
                    view[offset : offset + len(data)] = data
                if again:
                    good = self._compare(again, " again")
            else:
                for view, offset, data in writes:
                    view[offset : offset + len(data)] = bytes([SPOILT]) * len(data)

    def _compare(self, pieces: list[Piece], suffix: str) -> bool:
        for view, offset, want in pieces:
            if view[offset : offset + len(want)] != want:
                found = bytes(view[offset : offset + len(want)])
                self.tell(Mismatch(f"{self.what}{suffix} at offset {offset}", want, found))
                return False
        return True


def pieces(memory: GroupMemory, row: Sequence[int], words: bytes | bytearray, beg: int, end: int, tpb: int) -> list[Piece]:
    """Where the positions beg..end lie, and their bytes; blocks without a page are left out."""
    found: list[Piece] = []
    width = WORD * tpb
    block = beg // tpb
    while beg < end:
        first = block * tpb
        stop = min(end, first + tpb)
        index = row[block]
        if index != BAD_PAGE_INDEX:
            data = bytes(words[beg * WORD : stop * WORD])
            inner = (beg - first) * WORD
            for view, per_base, size in memory.buffers:
                at = index * per_base + inner
                found.append((view, at, data))
                found.append((view, at + size - width, data))
        beg = stop
        block += 1
    return found
