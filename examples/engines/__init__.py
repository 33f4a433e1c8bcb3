"""Cache managers of other engines over kv_cache_manager_v2."""
