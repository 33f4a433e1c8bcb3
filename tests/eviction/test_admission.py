"""Which cached pages are written to disk: by name, learnt, or by a class of the user's own."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from kv_cache_manager_v2 import (
    AdaptiveAdmission,
    ConfigError,
    DiskAdmission,
    DiskCacheTierConfig,
    EmulatedDriver,
    EvictionPolicy,
    KVCacheManager,
    LeavingPage,
    SecondUse,
)
from kv_cache_manager_v2.eviction.admission import MIN_WRITES, TRIAL, TRIAL_EVERY
from tests.conftest import ROOT
from tests.support.models import small
from tests.support.rig import Rig, toks


def rig_with(admission: object, path: Path) -> Rig:
    """Four slots on the GPU, then the disk."""
    config = small(4, disk=(str(path), 32))
    disk = config.cache_tiers[-1]
    assert isinstance(disk, DiskCacheTierConfig)
    disk.admission = admission  # type: ignore[assignment]  # also what is no admission
    return Rig(config)


class Asked(DiskAdmission):
    """Answers as told, and remembers what it was told."""

    def __init__(self, answer: object = True) -> None:
        self.answer = answer
        self.asked: list[tuple[int, int, bool]] = []
        self.loads: list[tuple[int, int, bool]] = []

    def admits(self, page: LeavingPage) -> bool:
        assert page.nbytes > 0
        self.asked.append((page.uses, page.reused_blocks, page.complete))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return bool(self.answer)

    def loaded(self, page: LeavingPage) -> None:
        self.loads.append((page.uses, page.reused_blocks, page.complete))
        if isinstance(self.answer, BaseException):
            raise self.answer


@pytest.mark.parametrize("admission", ["all", "second_use", "adaptive", SecondUse])
def test_a_page_that_is_not_admitted_is_dropped_instead_of_written(admission: object, tmp_path: Path) -> None:
    with rig_with(admission, tmp_path) as rig:
        once, twice = toks(0, 8), toks(100, 108)
        rig.seed(once)
        rig.seed(twice)
        rig.extend([*twice, 1])
        rig.take(4).close()
        second_use = admission in ("second_use", SecondUse)
        assert (rig.probe(once), rig.probe(twice)) == (0 if second_use else 8, 8)
        assert rig.manager.movement.pages_moved(0, 1) >= 2
        assert (rig.manager.movement.pages_dropped(0) > 0) == second_use
        assert rig.extend([*twice, 2]) == 8, "and its bytes are right"


def test_pages_of_a_suspended_request_are_written_in_any_case(tmp_path: Path) -> None:
    admission = Asked(False)
    with rig_with(lambda: admission, tmp_path) as rig:
        request = rig.start()
        assert request.advance(toks(0, 12))
        request.suspend()
        rig.take(4).close()
        assert rig.manager.movement.pages_moved(0, 1) == 3
        assert request.resume()
        request.check()
        assert admission.asked == []


def test_what_an_admission_is_told(tmp_path: Path) -> None:
    """Uses count the requests; reused blocks are those of the request that computed the page."""
    admission = Asked()
    with rig_with(lambda: admission, tmp_path) as rig:
        rig.seed(toks(0, 8))
        rig.extend(toks(0, 14))  # finds two blocks, and adds one and a half
        rig.take(4).close()
        assert sorted(admission.asked) == [(1, 2, False), (1, 2, True), (2, 0, True), (2, 0, True)]
        rig.extend([*toks(0, 8), 1])
        assert admission.loads == [(3, 0, True)] * 2


def test_an_exception_of_an_admission_is_logged_and_the_page_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with rig_with(lambda: Asked(ValueError("no")), tmp_path) as rig, caplog.at_level(logging.ERROR):
        rig.seed(toks(0, 8))
        rig.take(4).close()
        assert rig.extend([*toks(0, 8), 1]) == 8
    assert "admits()" in caplog.text
    assert "loaded()" in caplog.text


@pytest.mark.parametrize("admission", ["none", None, 3, EvictionPolicy, lambda: None])
def test_what_is_no_admission_is_refused(admission: object, tmp_path: Path) -> None:
    config = small(4, disk=(str(tmp_path), 4))
    disk = config.cache_tiers[-1]
    assert isinstance(disk, DiskCacheTierConfig)
    disk.admission = admission  # type: ignore[assignment]  # the mistake that is tested
    with pytest.raises(ConfigError, match="DiskAdmission"):
        KVCacheManager(config, driver=EmulatedDriver())


def leaving(uses: int) -> LeavingPage:
    return LeavingPage(uses, 0, True, 35, 0, 4096)


def test_a_kind_that_is_never_loaded_is_refused_and_tried_again() -> None:
    """Pages used twice are loaded; those used once are not, until they are."""
    admission = AdaptiveAdmission()
    written = 0
    for _page in range(2 * MIN_WRITES):
        assert admission.admits(leaving(2))
        admission.loaded(leaving(3))
        written += admission.admits(leaving(1))
    assert written == MIN_WRITES
    tried = 0
    for _page in range(TRIAL_EVERY):
        if admission.admits(leaving(1)):
            tried += 1
            admission.loaded(leaving(2))
    assert tried >= TRIAL
    assert all(admission.admits(leaving(1)) for _page in range(TRIAL_EVERY)), "it has become worth it"


def test_the_example_of_the_docs_is_an_admission() -> None:
    text = (ROOT / "docs" / "tiers.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {"folder": "/tmp", "__name__": "example"}
    exec(code, names)
    tier = names["tier"]
    assert isinstance(tier, DiskCacheTierConfig)
    admission = tier.make_admission()
    assert admission is not None
    assert [admission.admits(LeavingPage(1, blocks, True, 35, 0, 1)) for blocks in (0, 64)] == [False, True]
