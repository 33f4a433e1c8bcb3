"""Which build of the package is running, and on which devices it could run.

Rule: facts about the installation only; nothing here touches a device unless it is asked to look for one.
"""

from typing import Final, NamedTuple

VERSION: Final = "0.1.0"
COMPILED: Final[bool] = not __file__.endswith(".py")

class BuildInfo(NamedTuple):
    """What `build_info` says."""

    version: str
    compiled: bool
    drivers: tuple[str, ...]

def cuda_problem() -> str:
    """Why no CUDA device can be used here, or the empty string. Initialises the CUDA driver if there is one."""

def build_info() -> BuildInfo:
    """Version, compiled or interpreted, and the device drivers at hand. Takes milliseconds: it looks for a GPU at every call."""
