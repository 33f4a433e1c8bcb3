"""Which build of the package this process runs. It is chosen once, before any other module of the package is imported.

A compiled wheel has the sources beside the compiled modules. KVCM_BACKEND selects what is imported: "compiled", "interpreted", or
"auto" (the default), which means compiled if that can be loaded. The reference's variable, TLLM_KV_CACHE_MANAGER_V2_BACKEND, is
read if KVCM_BACKEND is not set. Its values "cpp" and "python" mean compiled and interpreted. A process never has both builds. This
file and the package's `__init__` are never compiled.
"""

from typing import Final

PACKAGE: Final = "kv_cache_manager_v2"
LIBRARY: Final[str]
VARIABLES: Final[tuple[str, ...]] = ("KVCM_BACKEND", "TLLM_KV_CACHE_MANAGER_V2_BACKEND")
COMPILED: Final = "compiled"
INTERPRETED: Final = "interpreted"
AUTO: Final = "auto"
VALUES: Final[dict[str, str]]
BACKEND: Final[str]
