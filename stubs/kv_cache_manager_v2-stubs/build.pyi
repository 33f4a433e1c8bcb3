from typing import Final, NamedTuple

VERSION: Final[str]
COMPILED: Final[bool]

class BuildInfo(NamedTuple):
    version: str
    compiled: bool
    drivers: tuple[str, ...]

def cuda_problem() -> str: ...
def build_info() -> BuildInfo: ...
