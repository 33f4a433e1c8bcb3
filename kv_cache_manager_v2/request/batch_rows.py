"""Rows of a batch table: one array of page indices per layer group, with a row for each request.

The row of a request is its page-index row (`PageIndexRow`), so pages are written where the engine's kernels read them. Suspending
leaves the row in place with BAD entries, and resuming fills it again.
"""

from __future__ import annotations

from kv_cache_manager_v2.errors import ConfigError
from kv_cache_manager_v2.ids import BAD_PAGE_INDEX
from kv_cache_manager_v2.request.page_index_row import TableEntries, bad_run
from kv_cache_manager_v2.request.request import ACTIVE, Request


class BatchRows:
    """The rows of all layer groups, in memory of the caller. Adding and removing a request is O(its blocks)."""

    def __init__(
        self, views: list[memoryview[int]], num_rows: int, num_blocks: int, recurrent_group: int, pad: int, offset: int
    ) -> None:
        self.views = views  # by layer group: num_rows * num_blocks entries, for the recurrent group num_rows
        self.num_blocks = num_blocks
        self.recurrent_group = recurrent_group  # -1 if there is none
        self.entries: list[TableEntries] = [TableEntries(pad, offset, view.format) for view in views]
        self.owners: list[Request | None] = [None] * num_rows
        self.unused: list[int] = list(range(num_rows - 1, -1, -1))  # rows without a request; the last one is used next
        for group, view in enumerate(views):
            view[:] = memoryview(self.entries[group].shown_all(bad_run(0), len(view)))

    def add(self, request: Request) -> int:
        """Give the request a row. Raises ConfigError, with nothing changed, if it cannot have one."""
        if request.batch_rows is not None:
            raise ConfigError("this cache has a row of a batch table already; remove it there first")
        if request.num_blocks > self.num_blocks:
            raise ConfigError(f"this cache has {request.num_blocks} blocks, and a row has {self.num_blocks}; raise max_blocks")
        if not self.unused:
            raise ConfigError(f"all {len(self.owners)} rows are in use; close or remove a cache, or raise max_requests")
        row = self.unused[-1]
        views = [self.views[table.index][row * self.num_blocks : (row + 1) * self.num_blocks] for table in request.main_tables]
        self.unused.pop()
        self.owners[row] = request
        request.batch_rows = self
        request.batch_row = row
        for number, table in enumerate(request.main_tables):
            table.row.join(views[number], self.entries[table.index])
        self.publish_state(request)
        return row

    def remove(self, request: Request) -> None:
        """Free the row. The request then has index rows of its own."""
        row = request.batch_row
        for table in request.main_tables:
            table.row.leave()
        self._set_state(row, BAD_PAGE_INDEX)
        request.batch_rows = None
        request.batch_row = -1
        self.owners[row] = None
        self.unused.append(row)

    def publish_state(self, request: Request) -> None:
        """Write the slot of the live recurrent state of beam 0."""
        recurrent = request.recurrent
        if recurrent is not None:
            page = recurrent.page
            self._set_state(request.batch_row, page.slot if page is not None and request.status == ACTIVE else BAD_PAGE_INDEX)

    def _set_state(self, row: int, value: int) -> None:
        group = self.recurrent_group
        if group < 0:
            return
        entries = self.entries[group]
        shown = entries.shown(value)
        if self.views[group][row] != shown:
            self.views[group][row] = shown
            entries.version += 1

    def check_invariants(self) -> None:
        """Assert that rows and requests name each other. That entries are right is a matter of the page-index rows."""
        used = [row for row, owner in enumerate(self.owners) if owner is not None]
        assert sorted([*used, *self.unused]) == list(range(len(self.owners)))
        for row, owner in enumerate(self.owners):
            if owner is None:
                continue
            assert owner.batch_rows is self
            assert owner.batch_row == row
            for table in owner.main_tables:
                assert table.row.table is self.entries[table.index]
                table.row.check_mirror()
            if owner.recurrent is not None:
                live = owner.recurrent.page if owner.status == ACTIVE else None
                shown = self.entries[self.recurrent_group].shown(BAD_PAGE_INDEX if live is None else live.slot)
                assert self.views[self.recurrent_group][row] == shown
