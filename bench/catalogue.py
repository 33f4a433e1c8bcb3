"""Every operation of the table: its title, what does it, and on which setting.

Rule: a title is unique and says what is measured; titles are the keys of the results, so a renamed one starts a new history.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from bench import places, prompts, scrapes, steps
from bench.setting import Setting, has_events
from bench.work import Work


class Operation(NamedTuple):
    """A row of the table."""

    title: str
    work: type[Work]
    fields: dict[str, object]  # what differs from the default setting
    shrunk: dict[str, object]  # what else differs in a quick run

    def setting(self, quick: bool) -> Setting:
        return Setting.of({**self.fields, **self.shrunk} if quick else self.fields)


_SHORT: Final[dict[str, object]] = {"prompt": 1024}
_FEW: Final[dict[str, object]] = {"requests": 50}


def _rows() -> list[Operation]:
    rows: list[Operation] = []

    def row(title: str, work: type[Work], shrunk: dict[str, object], **fields: object) -> None:
        rows.append(Operation(title, work, fields, shrunk))

    for layers, suffix in (("full", ""), ("window", ", full + window"), ("ssm", ", full + SSM")):
        row(f"probe{suffix}", prompts.Probe, _SHORT, layers=layers)
        row(f"create, resume, close{suffix}", prompts.Admit, _SHORT, layers=layers)
        row(f"resize cold{suffix}", prompts.ResizeCold, _SHORT, layers=layers)
        row(f"commit cold{suffix}", prompts.CommitCold, _SHORT, layers=layers)
        row(f"close committed{suffix}", prompts.CloseCommitted, _SHORT, layers=layers)
        row(f"suspend, resume{suffix}", prompts.SuspendResume, _SHORT, layers=layers)
    row("resize and commit cold", prompts.ComputeCold, _SHORT)
    for kind in ("list", "numpy"):
        row(f"probe, {kind}", prompts.Probe, _SHORT, tokens_as=kind)
        row(f"create, resume, close, {kind}", prompts.Admit, _SHORT, tokens_as=kind)
    row("resume 256 pages from host", prompts.ResumeFromHost, _SHORT, tiers=2)
    for layers, suffix in (("full", ""), ("window", ", full + window")):
        row(f"decode step, calls{suffix}", steps.DecodeCalls, _FEW, layers=layers)
        row(f"decode step, batch{suffix}", steps.DecodeBatch, _FEW, layers=layers)
        row(f"decode step, step(){suffix}", steps.DecodeStep, _FEW, layers=layers)
    row("decode step, batch, index matrix", steps.DecodeMatrix, _FEW)
    row("decode step, calls, statistics off", steps.DecodeCalls, _FEW, statistics=False)
    row("decode step, calls, statistics committed", steps.DecodeStatistics, _FEW)
    row("evict a page, 8,000 leaves", places.Evict, {"cached": 500}, cached=8000)
    row("evict a page, 8,000 leaves, statistics off", places.Evict, {"cached": 500}, cached=8000, statistics=False)
    row("evict a page, 1,000,000 leaves", places.Evict, {"cached": 2000}, cached=1_000_000)
    row("push a page down", places.PushDown, {}, tiers=2)
    row("push a page down to its copy", places.ReturnToCopies, {}, tiers=2)
    row("partial match, 10,000 siblings", places.PartialMatch, {"siblings": 200})
    row("insert beside 10,000 siblings", places.InsertSibling, {"siblings": 200})
    if has_events():
        row("commit cold, events pending", prompts.CommitWithEvents, _SHORT, events=True)
        row("commit cold, flush, drain", prompts.CommitFlushDrain, _SHORT, events=True)
    row("read the statistics, 1,000,000 blocks", scrapes.ReadStatistics, {"cached": 2000}, cached=1_000_000, tiers=2)
    if scrapes.has_metrics():
        row("scrape the metrics, 1,000,000 blocks", scrapes.Scrape, {"cached": 2000}, cached=1_000_000, tiers=2)
    row("full collection, 1,000,000 blocks", steps.Collection, {"cached": 5000}, cached=1_000_000)
    row("full collection, 1,000,000 blocks, frozen", steps.CollectionFrozen, {"cached": 5000}, cached=1_000_000)
    shrunk: dict[str, object] = {"cached": 5000, "requests": 10}
    row("decode step p99.9, collector on, 5,000,000 blocks", steps.DecodeCollected, shrunk, cached=5_000_000)
    return rows


OPERATIONS: Final = {row.title: row for row in _rows()}
