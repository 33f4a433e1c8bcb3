"""Which build of the package is running, and on which devices it can run."""

from __future__ import annotations

import importlib
from typing import Final, NamedTuple

VERSION: Final = "0.1.0"
COMPILED: Final[bool] = not __file__.endswith(".py")


class BuildInfo(NamedTuple):
    """The result of `build_info`."""

    version: str
    compiled: bool  # by mypyc; False when interpreted
    drivers: tuple[str, ...]  # available device drivers: "emulated" always, "cuda" if a GPU can be used


def cuda_problem() -> str:
    """Why no CUDA device can be used; empty if one can. Initialises the CUDA driver if it is installed."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        return f"the cuda-bindings package cannot be imported ({error})"
    try:
        status = int(driver.cuInit(0)[0])
        if status != 0:
            return f"cuInit failed with CUDA error {status}"
        status, count = driver.cuDeviceGetCount()
        if int(status) != 0:
            return f"cuDeviceGetCount failed with CUDA error {int(status)}"
        return "" if int(count) > 0 else "the CUDA driver sees no device"
    except Exception as error:  # the bindings raise an error of their own class when the driver library is missing
        return f"the CUDA driver cannot be loaded ({error})"


def build_info() -> BuildInfo:
    """The version, the build and the available device drivers. Takes milliseconds, since every call looks for a GPU."""
    drivers = ("emulated",) if cuda_problem() else ("emulated", "cuda")
    return BuildInfo(VERSION, COMPILED, drivers)
