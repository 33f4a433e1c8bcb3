"""Which build of the package is running, and on which devices it can run."""

from typing import Final, NamedTuple

VERSION: Final = "0.1.0"
COMPILED: Final[bool]

class BuildInfo(NamedTuple):
    """The result of `build_info`."""

    version: str
    compiled: bool
    drivers: tuple[str, ...]

def cuda_problem() -> str:
    """Why no CUDA device can be used; empty if one can. Initialises the CUDA driver if it is installed."""

def build_info() -> BuildInfo:
    """The version, the build and the available device drivers. Takes milliseconds, since every call looks for a GPU."""
