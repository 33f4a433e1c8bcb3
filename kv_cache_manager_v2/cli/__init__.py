"""Command-line tools (`kvcm`, `python -m kv_cache_manager_v2`). Never compiled.

A tool uses only the public interface, as any program could. A user's error is one line on standard error and exit status 2. A
failed check is exit status 1.
"""
