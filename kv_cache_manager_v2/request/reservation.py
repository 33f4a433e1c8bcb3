"""The new pages of one call, from their allocation until they are installed in a request.

A call that needs pages reserves them here, queues its device work, and then installs them by plain assignments. If an exception is
raised before that, the reservation is released and nothing else has changed. The slots of a released reservation are free only once
the stream has passed the work queued on them.
"""

from __future__ import annotations

import logging
from types import TracebackType
from typing import TYPE_CHECKING, Final

from kv_cache_manager_v2.ids import NULL_POINT, Point, Stream
from kv_cache_manager_v2.storage.handover import Handovers
from kv_cache_manager_v2.storage.page import Page
from kv_cache_manager_v2.storage.planner import Shortage

if TYPE_CHECKING:
    from kv_cache_manager_v2.request.manager_state import ManagerState

_log: Final = logging.getLogger(__name__)


class Reservation:
    """Locked pages that belong to no request yet. As a context manager it spans the device phase: an exception releases it."""

    def __init__(self, shared: ManagerState, stream: Stream) -> None:
        self.shared = shared
        self.stream = stream
        self.pages: list[Page] = []  # in the order in which they will be installed
        # None instead of empty lists: making them would cost a tenth of a decode step that needs a block.
        self.reusable: list[Page] | None = None  # locked pages of blocks that become stale, if they have no other user
        self.reused: list[Page] | None = None  # pages of `reusable` that are in `pages` now
        self.sources: list[Page] | None = None  # pages that the stream copies from
        self.handovers: Handovers | None = None  # slots of locked pages that go to reserved ones
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
        """Reserve a reusable page or a free GPU slot. The caller has made sure that there is one."""
        page = self._reuse(pool_group) if self.reusable is not None else None
        if page is None:
            page = self.shared.hierarchy.new_page(life_cycle, priority)
        self.pages.append(page)
        return page

    def hand_over(self, need: list[int], given: list[Page], held_on: list[Page], point: Point) -> bool:
        """As `make_free`, using slots of pages that the request locks and is about to unlock, or to hold: see `Handovers.begin`."""
        self.handovers = Handovers(self.shared.hierarchy)
        if not self.handovers.begin(need, given, held_on, point):
            self.handovers = None
            return False
        successors = [handover.successor for handover in self.handovers.begun]
        self.reusable = successors if self.reusable is None else self.reusable + successors
        return True

    def _reuse(self, pool_group: int) -> Page | None:
        """Take a reusable page of the pool group; None if there is none."""
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
        """Make the stream wait until the last users of all slots are done."""
        waited = NULL_POINT
        for page in self.pages:
            if page.ready != waited:
                waited = page.ready
                self.shared.timeline.wait(self.stream, waited)

    def copy(self, source: Page, destination: Page) -> None:
        """Queue a copy from a page on the GPU into a reserved page. The stream already waits for the source's bytes."""
        self.copying = True
        if self.sources is None:
            self.sources = []
        self.sources.append(source)
        self.shared.hierarchy.copy_into(source, destination, self.stream)

    # --- install, or release

    def finish_handovers(self) -> None:
        """Complete the handovers: the reserved pages have the slots now, and the request's locks on the previous pages end."""
        if self.handovers is not None:
            self.handovers.finish()
            self.handovers = None

    def next(self, life_cycle: int, priority: int) -> Page:
        """Hand over the next page, in the order of `reserve`."""
        page = self.pages[self._installed]
        self._installed += 1
        page.life_cycle = life_cycle
        page.priority = priority
        return page

    def release(self) -> None:
        """Free the slots once the stream has passed the queued work.

        If the device refuses to record that point, the slots stay unusable, and the next call tries again.
        """
        hierarchy = self.shared.hierarchy
        if self.handovers is not None:
            self.handovers.cancel()
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
    """Release reservations again whose release the device has refused."""
    unreleased = shared.unreleased
    shared.unreleased = []
    for reservation in unreleased:
        reservation.release()
