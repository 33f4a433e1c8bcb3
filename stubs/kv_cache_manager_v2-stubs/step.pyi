"""One step of an engine as one object: pages before it, token slots and rows in it, commits after it."""

from collections.abc import Sequence
from types import TracebackType
from typing import SupportsIndex

from kv_cache_manager_v2.arguments import IntBuffer, Integers
from kv_cache_manager_v2.batch_tables import PlainBatchTables
from kv_cache_manager_v2.ids import PageIndexMode
from kv_cache_manager_v2.kv_cache import KVCache
from kv_cache_manager_v2.layout.page_index import PageIndexConverter
from kv_cache_manager_v2.make_room import MakeRoom
from kv_cache_manager_v2.manager_statistics import ManagerStatistics
from kv_cache_manager_v2.request.request import Request
from kv_cache_manager_v2.reuse.tokens import Tokens
from kv_cache_manager_v2.token_slots import TokenSlots

class Step:
    """The step of a batch of caches. `KVCacheManager.step` makes it; a `with` block begins and ends it.

    At its beginning each cache gets pages for its new tokens, which follow its history. At its end, tokens are committed or
    histories advanced, as the block asked, unless it raised. A step equals the loops over `resize` and `commit` in lengths, pages,
    statistics and events. `commit_ahead` commits before the step is queued, so that others can match the tokens.
    """

    def __init__(
        self,
        caches: list[KVCache],
        requests: list[Request],
        counts: list[object],
        tokens: list[object] | None,
        policy: MakeRoom | None,
    ) -> None:
        """Internal. `KVCacheManager.step` makes steps."""

    def __reduce__(self) -> str: ...
    def __enter__(self) -> Step: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Commit, or advance histories. After an exception in the block neither: lengths stay as the step began.

        Tokens that were committed ahead, and that no history covers because of an exception here or in the block, are taken back.
        """

    @property
    def caches(self) -> list[KVCache]:
        """The caches that have pages for the step, in the order given. All results of the step are in this order."""

    @property
    def positions(self) -> list[int]:
        """The position of each of `caches` in the list that was passed to `KVCacheManager.step`."""

    @property
    def short(self) -> list[KVCache]:
        """The caches that got no pages. Nothing in them has changed except `last_shortage`, which says what is missing."""

    @property
    def suspended(self) -> list[KVCache]:
        """The caches of the step that the make-room policy suspended or closed. Some may have got their new capacity before."""

    def slots_to_write(
        self,
        layer_group_id: SupportsIndex,
        converter: PageIndexConverter | None = None,
        index_mode: PageIndexMode | SupportsIndex | None = None,
        out: IntBuffer | None = None,
        offsets: IntBuffer | None = None,
    ) -> TokenSlots:
        """Where the new tokens of each cache are written: see `kv_cache_manager_v2.slots_to_write`."""

    def slots_to_read(
        self,
        layer_group_id: SupportsIndex,
        converter: PageIndexConverter | None = None,
        index_mode: PageIndexMode | SupportsIndex | None = None,
        out: IntBuffer | None = None,
        offsets: IntBuffer | None = None,
    ) -> TokenSlots:
        """Where the tokens lie that the new tokens of each cache read: see `kv_cache_manager_v2.slots_to_read`."""

    def rows(self, tables: PlainBatchTables, out: IntBuffer | None = None) -> IntBuffer:
        """The row of each cache in batch tables: see `PlainBatchTables.rows`."""

    def commit(self, tokens: Sequence[SupportsIndex | Tokens] | IntBuffer) -> None:
        """Commit these tokens when the block ends: an id, or a sequence of tokens, for each of `caches`. The last call counts.

        Raises ConfigError for another number of items. Invalid tokens raise the errors of `KVCache.commit` at the end.
        """

    def commit_ahead(self, tokens: Sequence[SupportsIndex | Tokens] | IntBuffer) -> None:
        """Commit these tokens now, ahead of their computation: an id, or a sequence of tokens, for each of `caches`.

        Queue the step afterwards. At its end histories advance over all committed tokens, unless `advance` or `commit` was called
        for other lengths. After an exception in the block the tokens are taken back. Raises the errors of `KVCache.commit_ahead`,
        after earlier caches are committed.
        """

    def advance(self, num_tokens: Integers | None = None) -> None:
        """Advance the history of each of `caches` by this many tokens when the block ends, without a commit. None: all new tokens.

        For requests whose tokens are not to be reused. Raises ConfigError for another number of items, and for more tokens than are
        new.
        """

class ManagerSteps(ManagerStatistics):
    """The part of `KVCacheManager` that makes steps."""

    def step(
        self,
        caches: Sequence[KVCache],
        num_new_tokens: SupportsIndex | Integers,
        tokens: Sequence[SupportsIndex | Tokens] | IntBuffer | None = None,
        make_room: MakeRoom | None = None,
    ) -> Step:
        """One step of a batch, as a `with` block. It begins with `resize(history + num_new_tokens)` for each cache, in this order.

        `num_new_tokens` is one number for all caches, or a sequence with one for each. A cache with a shortage is left out, after
        `make_room` was asked: see `Step.short`. `tokens` are committed at the end, an id or a sequence of tokens for each cache;
        or call `commit` of the step inside the block. After an exception in the block nothing is committed. All caches must be
        ACTIVE: a suspended one needs `resume` before the step.

        Entering raises the errors of `resize`, after earlier caches are resized; leaving raises those of `commit`.
        """
