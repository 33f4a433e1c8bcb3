"""Command-line tools; never compiled."""
