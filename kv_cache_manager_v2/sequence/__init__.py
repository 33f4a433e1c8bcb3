"""One request's cache."""
