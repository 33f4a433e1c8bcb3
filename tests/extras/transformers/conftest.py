"""These tests need torch and transformers, and are not collected without them. Model families are drawn here.

Three families, one with each kind of layer, run always; all run with KVCM_FAMILIES=all (`make test-engines`).
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

PRESENT = find_spec("torch") is not None and find_spec("transformers") is not None
collect_ignore_glob = [] if PRESENT else ["test_*.py"]

USUAL = ("gemma3", "qwen3_next", "falcon_h1")  # windows; linear attention; attention and recurrence in one layer
OTHERS = ("llama", "gemma2", "granite", "lfm2", "jamba")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", (*USUAL, *OTHERS) if os.environ.get("KVCM_FAMILIES") == "all" else USUAL)
