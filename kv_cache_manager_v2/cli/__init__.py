"""Command-line tools (`kvcm`, `python -m kv_cache_manager_v2`); never compiled.

Rule: a tool uses the public face only, so that it shows what any program can do. A user's error is one line on standard error
and exit status 2; a check that failed is exit status 1.
"""
