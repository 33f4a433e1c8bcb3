"""The new pages of one call, from the moment that they are taken until a request has them.

Rule: a call that needs pages reserves them here, queues its device work, and then installs them by plain assignments. If anything
is raised before that, the reservation is released and nothing else has changed. The slots of a released reservation are free for
others only once the stream is past what was queued on them.
"""

from __future__ import annotations

import logging
from types import TracebackType
from typing import TYPE_CHECKING, Final

from kv_cache_manager_v2.ids import NULL_POINT, Point, Stream
from kv_cache_manager_v2.storage.page import Page
from kv_cache_manager_v2.storage.planner import Shortage

if TYPE_CHECKING:
    from kv_cache_manager_v2.request.manager_state import ManagerState

_log: Final = logging.getLogger(__name__)


class Reservation:
    """Locked pages without a request. As a context it spans the device phase: it is released if an exception leaves it."""

    def __init__(self, shared: ManagerState, stream: Stream) -> None:
        self.shared = shared
        self.stream = stream
        self.pages: list[Page] = []  # in the order in which they will be installed
        # without lists where a decode step needs none: they would be a tenth of its time when it takes a block
        self.reusable: list[Page] | None = None  # locked pages of blocks that become stale, which only this request uses
        self.reused: list[Page] | None = None  # those of them that are among `pages`
        self.sources: list[Page] | None = None  # pages that the stream copies from
        self.copying = False  # whether a copy into `pages` may be queued
        self._installed = 0

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.release()

    # --- reserve

    def make_free(self, need: list[int], load: list[Page]) -> Shortage | None:
        """Make need[g] GPU slots of each pool group free, and bring pages that the request holds to the GPU.

        On a Shortage nothing has changed. Costs what `Hierarchy.acquire` costs.
        """
        return self.shared.hierarchy.acquire(need, load)

    def reserve(self, life_cycle: int, pool_group: int, priority: int) -> Page:
        """Take a page to be used again, or a free GPU slot; there is one, since the caller has made them free."""
        page = self._reuse(pool_group) if self.reusable is not None else None
        if page is None:
            page = self.shared.hierarchy.new_page(life_cycle, priority)
        self.pages.append(page)
        return page

    def _reuse(self, pool_group: int) -> Page | None:
        """A page to be used again, if there is one of the pool group."""
        reusable = self.reusable
        assert reusable is not None
        for index, page in enumerate(reusable):
            if page.pool_group == pool_group:
                del reusable[index]
                if self.reused is None:
                    self.reused = []
                self.reused.append(page)
                return page
        return None

    # --- device

    def wait(self) -> None:
        """The stream waits until the last users of all slots are done."""
        waited = NULL_POINT
        for page in self.pages:
            if page.ready != waited:
                waited = page.ready
                self.shared.timeline.wait(self.stream, waited)

    def copy(self, source: Page, destination: Page) -> None:
        """Queue a copy from a page on the GPU, whose bytes the stream has been made to wait for, into a reserved one."""
        self.copying = True
        if self.sources is None:
            self.sources = []
        self.sources.append(source)
        self.shared.hierarchy.copy_into(source, destination, self.stream)

    # --- install, or release

    def next(self, life_cycle: int, priority: int) -> Page:
        """The next page in the order of `reserve`, for good."""
        page = self.pages[self._installed]
        self._installed += 1
        page.life_cycle = life_cycle
        page.priority = priority
        return page

    def release(self) -> None:
        """Free the slots once the stream is past what was queued. If the device refuses to say when that is, they stay taken, and
        the next call tries again."""
        hierarchy = self.shared.hierarchy
        point = NULL_POINT
        if self.copying:
            try:
                point = self._end_of_copies()
            except BaseException as error:
                _log.warning("%d slots stay unusable until the device answers: %s", len(self.pages), error)
                self.shared.unreleased.append(self)
                return
            for source in self.sources or ():
                hierarchy.merge_ready(source, point)
        for page in self.pages:
            if self.reused is None or page not in self.reused:
                hierarchy.unlock(page, point)
        self.pages = []

    def _end_of_copies(self) -> Point:
        try:
            return self.shared.timeline.record(self.stream)
        except BaseException:
            self.shared.driver.synchronize()
            return NULL_POINT


def release_again(shared: ManagerState) -> None:
    """Ask the device again about reservations whose release it refused."""
    unreleased = shared.unreleased
    shared.unreleased = []
    for reservation in unreleased:
        reservation.release()
