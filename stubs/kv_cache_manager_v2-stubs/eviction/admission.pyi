"""Admission: which cached pages are written to disk when their slots are needed. A page that is not admitted is dropped.

Only droppable pages are asked about. What a suspended request needs is written in any case.
"""

from collections.abc import Callable
from typing import Final

MIN_WRITES: Final = 512
HALF_LIFE: Final = 8192
WORTH: Final = 4
TRIAL_EVERY: Final = 4096
TRIAL: Final = 256
MOST_USES: Final = 4
REUSE_CLASSES: Final = 8

class LeavingPage:
    """What is known of a cached page that leaves memory, or is loaded again."""

    uses: int
    reused_blocks: int
    complete: bool
    priority: int
    life_cycle: int
    nbytes: int

    def __init__(self, uses: int, reused_blocks: int, complete: bool, priority: int, life_cycle: int, nbytes: int) -> None: ...

class DiskAdmission:
    """Decides which cached pages are written to disk. This one admits all.

    One object belongs to one manager. Its methods are called with the manager locked: they must be quick, and must not call the
    manager or its caches. If one raises an Exception, the error is logged and the page is written.
    """

    def admits(self, page: LeavingPage) -> bool:
        """Whether to write a page whose slot in memory is needed. Called once for each page that has no copy on disk."""

    def loaded(self, page: LeavingPage) -> None:
        """A cached page was loaded from disk. The request that needs it counts as a use."""

class SecondUse(DiskAdmission):
    """Admits pages that a second request has used."""

    def admits(self, page: LeavingPage) -> bool: ...

class AdaptiveAdmission(DiskAdmission):
    """Admits the kinds of pages that are loaded again often enough.

    Pages of one kind have as many uses, were computed after a hit of about the same length, and are all complete, or not. A kind is
    refused while the share of its written pages that are loaded is below a quarter of the share of all. O(1) for a page.
    """

    def __init__(self) -> None: ...
    def admits(self, page: LeavingPage) -> bool: ...
    def loaded(self, page: LeavingPage) -> None: ...

ADMISSIONS: Final[dict[str, type[DiskAdmission]]]

def check_admission(wanted: object) -> None:
    """Raise ConfigError unless the value is the name of an admission, or can be called."""

def make_admission(wanted: str | Callable[[], DiskAdmission]) -> DiskAdmission | None:
    """A new admission, by name or by calling what the user gave; None admits all. Raises ConfigError if that is something else."""
