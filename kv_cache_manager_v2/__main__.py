"""`python -m kv_cache_manager_v2`: the same as the console script `kvcm`."""

from __future__ import annotations

from kv_cache_manager_v2.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
