"""KV-cache management for LLM inference engines."""
