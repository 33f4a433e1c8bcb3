"""Tokens packed into bytes, so that comparing tokens is comparing bytes.

Rule: equal bytes mean equal tokens, and a byte prefix at a token boundary is a token prefix. An id is 4 bytes, little-endian, below
2**31. A multimodal digest is the word 0x80000000, which no id can be, followed by its 32 bytes.

Text has no digests: position p is at byte 4 * p, and an int32 or uint32 buffer is packed by one copy. `pack_unchecked` does not
check the range of a buffer's ids. Ids that equal cached tokens were checked when those were cached, and a match checks the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, SupportsIndex, TypeAlias

from kv_cache_manager_v2.arguments import IntBuffer

TOKEN_BYTES: Final = 4
DIGEST_MARK: Final = b"\x00\x00\x00\x80"

@dataclass(frozen=True)
class MmItemContext:
    """A multimodal item as a token: its 32-byte content digest. `uuid`, the front end's id of the item, is not compared."""

    digest: bytes
    uuid: str | None = ...

class TokenSequence:
    """An immutable run of tokens, packed."""

    data: bytes
    num_tokens: int
    digests: list[int]
    checked: bool
    uuids: dict[bytes, str] | None

    def __init__(self, data: bytes, num_tokens: int, digests: list[int], checked: bool) -> None: ...
    def byte_offset(self, position: int) -> int:
        """Byte offset in `data` of the token at a position. O(log digests), O(1) for text."""

    def slice_bytes(self, beg: int, end: int) -> bytes:
        """The packed tokens of positions beg..end-1."""

    def whole_tokens(self, num_bytes: int) -> int:
        """How many tokens lie wholly within the first `num_bytes` of `data`. O(log digests), O(1) for text."""

TokenIdExt: TypeAlias = int | bytes | MmItemContext
Tokens: TypeAlias = Sequence[SupportsIndex | bytes | MmItemContext] | IntBuffer | TokenSequence

def pack(tokens: object, text_only: bool = False) -> TokenSequence:
    """Pack a sequence of ids, digests and MmItemContext, or a one-dimensional buffer of integers. O(tokens).

    Buffers are arrays, numpy arrays, memoryviews and torch CPU tensors. Raises ConfigError with position and value for an id
    outside [0, 2**31), an element of another type (a bool is none), a digest of another length, or a digest despite `text_only`.
    """

def pack_unchecked(tokens: object, text_only: bool = False) -> TokenSequence:
    """Like `pack`, but without checking the range of a buffer's ids. The caller must do so with `check_range`, as a match does."""

def check_range(sequence: TokenSequence, beg: int) -> None:
    """Raise ConfigError if an id from position `beg` on is not in [0, 2**31). Reads one byte per token, once per sequence."""

def unpack(data: bytes) -> list[int | bytes]:
    """The tokens of packed bytes: ids, and digests as 32 bytes."""

def count_tokens(data: bytes) -> int:
    """How many tokens packed bytes hold."""

def first_tokens(data: bytes, count: int) -> bytes:
    """The first `count` tokens of packed bytes."""

def has_digest(data: bytes) -> bool:
    """Whether packed bytes hold a digest. One scan in C."""

def gen_multimodal_cache_key_tokens(
    id_offset: SupportsIndex,
    multi_modal_data_digest: bytes,
    num_tokens: SupportsIndex,
    token_offset: SupportsIndex = 0,
    uuid: str | None = None,
) -> list[int | bytes | MmItemContext]:
    """Make tokens for `num_tokens` positions of one multimodal item, starting at the item's position `token_offset`.

    Position 0 of the item is the digest (a MmItemContext if a uuid is given), position j the id `id_offset + j`. They are for cache
    look-ups only. Raises ConfigError for a digest that is not 32 bytes, num_tokens < 1, a negative offset, or ids out of range.
    """
