"""Batch tables: the page indices of many requests as one array per layer group, kept up to date by the manager."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, SupportsIndex

from mypy_extensions import mypyc_attr

from kv_cache_manager_v2.arguments import WORD_LIMIT, IntBuffer, at_least, flag, instance, items_of, whole
from kv_cache_manager_v2.batch_calls import requests_of
from kv_cache_manager_v2.buffers import require_length, writable_integers
from kv_cache_manager_v2.device.os_memory import available_bytes, format_bytes
from kv_cache_manager_v2.errors import ConfigError, OutOfMemoryError
from kv_cache_manager_v2.ids import BAD_PAGE_INDEX, GPU_LEVEL, INT32_MAX, LayerGroupId
from kv_cache_manager_v2.kv_cache import KVCache
from kv_cache_manager_v2.manager import KVCacheManager
from kv_cache_manager_v2.request.batch_rows import BatchRows
from kv_cache_manager_v2.request.call import Call
from kv_cache_manager_v2.request.request import CLOSED, Request

_BYTES_OF_ROW: Final = 64  # what is kept about a row beside its entries
_MOST_SLOTS: Final = 1 << 30  # a pool group may grow while there are tables, but not beyond this


@mypyc_attr(allow_interpreted_subclasses=True)
class PlainBatchTables:
    """One array per layer group, with a row of base page indices for each cache that was added.

    The manager writes entries in place as pages come and go: a step copies nothing. A row stays with its cache through `suspend()`,
    when its entries are `pad_value`, and `resume()`, until `remove()` or `close()` of the cache. An array has shape
    (max_requests, max_blocks); that of the recurrent layer group (max_requests, 1), with the slot of the live state. Rows are of
    beam 0. The manager does not write to unused rows. Entries are int32, or with `int64` of 64 bits. `offset` is added to each base
    page index, and `pad_value` stands for a page that is not there: 1 and 0 for an engine whose block 0 is a null block.

    A copy to the GPU reads the rows when it runs: let it end before the next call that changes pages, or copy in that call's order.

    `arrays` has the memory of each layer group, such as pinned memory: contiguous two-dimensional buffers of these shapes, int32 or
    int64, whatever `int64` says. Raises ConfigError for others, and where entries do not fit int32. `extras.arrays.BatchTables` and
    `extras.torch.BatchTables` are these tables as numpy arrays and as tensors, which `table()` returns.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        max_requests: SupportsIndex,
        max_blocks: SupportsIndex,
        arrays: Sequence[IntBuffer] | None = None,
        pad_value: SupportsIndex = BAD_PAGE_INDEX,
        offset: SupportsIndex = 0,
        int64: bool = False,
    ) -> None:
        rows, blocks = at_least(max_requests, "max_requests", 1), at_least(max_blocks, "max_blocks", 1)
        pad, shift, wide = whole(pad_value, "pad_value"), at_least(offset, "offset", 0), flag(int64, "int64")
        widths = table_widths(manager, blocks)
        self._shared = manager.shared
        self._arrays: list[object] = []
        views: list[memoryview[int]] = []
        if arrays is None:
            _require_memory(rows * (sum(widths) * (8 if wide else 4) + _BYTES_OF_ROW))
            for width in widths:
                made = memoryview(array("q" if wide else "i", [0]) * (rows * width))
                views.append(made)
                octets = made.cast("B")
                self._arrays.append(octets.cast("q", [rows, width]) if wide else octets.cast("i", [rows, width]))
        else:
            self._arrays.extend(items_of(arrays, "arrays", "int32 or int64 buffers"))
            if len(self._arrays) != len(widths):
                raise ConfigError(f"arrays has {len(self._arrays)} buffers; this manager has {len(widths)} layer groups")
            for group, width in enumerate(widths):
                name = f"arrays[{group}]"
                view = writable_integers(self._arrays[group], name, "iq", 2)
                shape = tuple(getattr(self._arrays[group], "shape", ()))
                if shape != (rows, width):
                    raise ConfigError(f"{name} has shape {shape}; it must have shape {(rows, width)}")
                views.append(view)
        self._require_fit(views, pad, shift)
        state_group = -1 if self._shared.ssm is None else int(self._shared.ssm.index)
        self._rows = BatchRows(views, rows, blocks, state_group, pad, shift)

    def add(self, cache: KVCache) -> int:
        """Give the cache a row, and return its number. A buffer that was set for the cache is detached. O(blocks of the cache).

        Raises ConfigError, with nothing changed, for a closed cache or one of another manager, for one that has a row already or
        more than `max_blocks` blocks, and if all rows are in use.
        """
        request = self._request(cache)
        with self._shared.lock, Call(self._shared, "add()"):
            if request.status == CLOSED:
                raise ConfigError(f"cache is {cache!r}; a closed cache has no pages")
            return self._rows.add(request)

    def remove(self, cache: KVCache) -> None:
        """Free the row of a cache. The manager then keeps the cache's page indices in arrays of its own. `close()` of the cache
        does it too. O(blocks).

        Raises ConfigError if the cache has no row here.
        """
        request = self._request(cache)
        with self._shared.lock, Call(self._shared, "remove()"):
            self._row_of(request, "cache")
            self._rows.remove(request)

    def row(self, cache: KVCache) -> int:
        """The row of a cache. O(1). Raises ConfigError if it has none here."""
        return self._row_of(self._request(cache), "cache")

    def rows(self, caches: Sequence[KVCache], out: IntBuffer | None = None) -> IntBuffer:
        """The row of each cache, as an int32 array, or in the first entries of `out`: int32 or int64 memory of the caller's.

        Raises ConfigError, with nothing written, if one has none here, or if `out` is too short.
        """
        requests = requests_of(caches)
        numbers = array("i", [request.batch_row for request in requests if request.batch_rows is self._rows])
        if len(numbers) < len(requests):
            for position, request in enumerate(requests):
                self._row_of(request, f"caches[{position}]")
        if out is None:
            return numbers
        target = writable_integers(out, "out")
        require_length(target, "out", len(numbers))
        target[: len(numbers)] = memoryview(numbers if target.format == "i" else array("q", numbers))
        return out

    def table(self, layer_group_id: SupportsIndex) -> IntBuffer:
        """The array of a layer group: the one that was passed, else a two-dimensional memoryview. Never replaced by another."""
        found = self._arrays[self._group(layer_group_id)]
        return found  # type: ignore[return-value]  # a buffer, as the constructor has seen

    def version(self, layer_group_id: SupportsIndex) -> int:
        """A number that changes whenever an entry of the table of this layer group, or a row's length, changes. O(1).

        The version of one row is `cache.get_base_page_indices_version(layer_group_id)`.
        """
        return self._rows.entries[self._group(layer_group_id)].version

    @property
    def num_unused_rows(self) -> int:
        """How many more caches can be added."""
        return len(self._rows.unused)

    def _require_fit(self, views: list[memoryview[int]], pad: int, offset: int) -> None:
        """Raise ConfigError if an entry does not fit its array."""
        hierarchy = self._shared.hierarchy
        for group, view in enumerate(views):
            limit = INT32_MAX if view.format == "i" else WORD_LIMIT - 1
            last = max(hierarchy.total(GPU_LEVEL, self._shared.pool_group_of[group]), _MOST_SLOTS) - 1 + offset
            for name, value in (("pad_value", pad), ("offset", last)):
                if not -limit - 1 <= value <= limit:
                    raise ConfigError(f"{name} gives entries of {value} in layer group {group}; use int64 arrays, or a smaller one")

    def _request(self, cache: object) -> Request:
        request = instance(cache, KVCache, "cache").state
        if request.shared is not self._shared:
            raise ConfigError(f"cache is {cache!r} of another manager; each manager needs tables of its own")
        return request

    def _row_of(self, request: Request, name: str) -> int:
        if request.batch_rows is not self._rows:
            named = "" if request.request_id is None else f" (id {request.request_id})"
            raise ConfigError(f"{name}{named} has no row in these tables; add() it first")
        return request.batch_row

    def _group(self, layer_group_id: object) -> LayerGroupId:
        group = whole(layer_group_id, "layer_group_id")
        if not 0 <= group < len(self._arrays):
            raise ConfigError(f"layer_group_id is {group}; this manager has {len(self._arrays)} layer groups")
        return LayerGroupId(group)


def _require_memory(nbytes: int) -> None:
    """Raise OutOfMemoryError for tables that are larger than the memory of the machine."""
    there = available_bytes()
    most = there if there >= 0 else 1 << 40
    if nbytes > most:
        raise OutOfMemoryError(
            f"no memory for tables: max_requests and max_blocks make {format_bytes(nbytes)}; {format_bytes(most)} is available"
        )


def table_widths(manager: KVCacheManager, max_blocks: int) -> list[int]:
    """Entries of a row, by layer group: `max_blocks`, or 1 for the recurrent layer group."""
    shared = instance(manager, KVCacheManager, "manager").shared
    return [max_blocks if life_cycle.is_attention else 1 for life_cycle in shared.life_cycles]
