"""A progress bar. It is drawn only on a terminal, and only if the `cli` extra is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the number of finished items and draws the bar on standard error, or does nothing."""
    if not sys.stderr.isatty():
        yield _ignore
        return
    try:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
    except ImportError:
        yield _ignore
        return
    columns = (*Progress.get_default_columns()[:-1], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=5) as progress:
        task = progress.add_task(label, total=total)
        yield lambda done: progress.update(task, completed=done)


def _ignore(_done: int) -> None:
    """Used where no bar can be drawn."""
