"""Admission: which cached pages are written to disk when their slots are needed. A page that is not admitted is dropped.

Only droppable pages are asked about. What a suspended request needs is written in any case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mypy_extensions import mypyc_attr

from kv_cache_manager_v2.arguments import check_maker, instance

MIN_WRITES: Final = 512  # pages of a kind that are written before its share of loads counts
HALF_LIFE: Final = 8192  # written pages of a kind after which its counts are halved, so that old behaviour is forgotten
WORTH: Final = 4  # a kind is refused while its share of loaded pages is below this fraction (1 / 4) of the share of all kinds
TRIAL_EVERY: Final = 4096  # of so many pages of a refused kind ...
TRIAL: Final = 256  # ... so many in a row are written, to see whether it has become worth it
MOST_USES: Final = 4  # more uses make no difference
REUSE_CLASSES: Final = 8  # 0, 1, 2..3, 4..7, ... reused blocks; 64 and more are one


class LeavingPage:
    """What is known of a cached page that leaves memory, or is loaded again."""

    def __init__(self, uses: int, reused_blocks: int, complete: bool, priority: int, life_cycle: int, nbytes: int) -> None:
        self.uses = uses  # requests that used it since it was computed, the one that computed it included; at most 255
        self.reused_blocks = reused_blocks  # blocks that this request had found in the cache, rounded down to 0 or a power of two
        self.complete = complete  # a full block, or a snapshot: no request adds to it
        self.priority = priority
        self.life_cycle = life_cycle  # layer group
        self.nbytes = nbytes


@mypyc_attr(allow_interpreted_subclasses=True)
class DiskAdmission:
    """Decides which cached pages are written to disk. This one admits all.

    One object belongs to one manager. Its methods are called with the manager locked: they must be quick, and must not call the
    manager or its caches. If one raises an Exception, the error is logged and the page is written.
    """

    def admits(self, page: LeavingPage) -> bool:
        """Whether to write a page whose slot in memory is needed. Called once for each page that has no copy on disk."""
        return True

    def loaded(self, page: LeavingPage) -> None:
        """A cached page was loaded from disk. The request that needs it counts as a use."""


@mypyc_attr(allow_interpreted_subclasses=True)
class SecondUse(DiskAdmission):
    """Admits pages that a second request has used."""

    def admits(self, page: LeavingPage) -> bool:
        return page.uses >= 2


@mypyc_attr(allow_interpreted_subclasses=True)
class AdaptiveAdmission(DiskAdmission):
    """Admits the kinds of pages that are loaded again often enough.

    Pages of one kind have as many uses, were computed after a hit of about the same length, and are all complete, or not. A kind is
    refused while the share of its written pages that are loaded is below a quarter of the share of all. O(1) for a page.
    """

    def __init__(self) -> None:
        kinds = MOST_USES * REUSE_CLASSES * 2
        self._asked = [0] * kinds
        self._written = [0.0] * kinds
        self._loaded = [0.0] * kinds
        self._all_written = 0.0
        self._all_loaded = 0.0

    def admits(self, page: LeavingPage) -> bool:
        kind = _kind(page, page.uses)
        self._asked[kind] += 1
        if not self._is_worth(kind) and self._asked[kind] % TRIAL_EVERY >= TRIAL:
            return False
        self._written[kind] += 1
        self._all_written += 1
        if self._written[kind] >= HALF_LIFE:
            self._all_written -= self._written[kind] / 2
            self._all_loaded -= self._loaded[kind] / 2
            self._written[kind] /= 2
            self._loaded[kind] /= 2
        return True

    def loaded(self, page: LeavingPage) -> None:
        kind = _kind(page, page.uses - 1)
        self._loaded[kind] += 1
        self._all_loaded += 1

    def _is_worth(self, kind: int) -> bool:
        written = self._written[kind]
        return written < MIN_WRITES or self._loaded[kind] * self._all_written * WORTH >= self._all_loaded * written


def _kind(page: LeavingPage, uses: int) -> int:
    reused = min(page.reused_blocks.bit_length(), REUSE_CLASSES - 1)
    return ((min(max(uses, 1), MOST_USES) - 1) * REUSE_CLASSES + reused) * 2 + (1 if page.complete else 0)


# By name.
ADMISSIONS: Final[dict[str, type[DiskAdmission]]] = {"all": DiskAdmission, "second_use": SecondUse, "adaptive": AdaptiveAdmission}


def check_admission(wanted: object) -> None:
    """Raise ConfigError unless the value is the name of an admission, or can be called."""
    check_maker(wanted, "admission of DiskCacheTierConfig", ADMISSIONS, DiskAdmission)


def make_admission(wanted: str | Callable[[], DiskAdmission]) -> DiskAdmission | None:
    """A new admission, by name or by calling what the user gave; None admits all. Raises ConfigError if that is something else."""
    if wanted == "all":
        return None
    make: Callable[[], object] = ADMISSIONS[wanted] if isinstance(wanted, str) else wanted
    return instance(make(), DiskAdmission, "the admission that admission() returned")
