"""The README's lines for transformers run as pasted, and the example shows what it is for."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.torch


def test_the_lines_of_the_readme_print_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Pasted as they stand."""
    text = (ROOT / "README.md").read_text()
    found = re.search(r"### transformers, six lines\n.*?```python\n(.*?)```\n\nIt prints\n\n    ([^\n]*)\n", text, re.DOTALL)
    assert found is not None
    code, printed = found.groups()
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == f"{printed}\n"


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("KVCM_FAMILIES") != "all", reason="a minute on a busy machine: `make test-engines` runs it")
def test_the_example_reuses_from_every_tier_and_compares_every_answer() -> None:
    """As a user runs it."""
    command = [sys.executable, str(ROOT / "examples" / "serve_transformers.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "36 of 36 answers are equal" in done.stdout
    rows = [[int(cell.replace(",", "")) for cell in line.split()] for line in done.stdout.splitlines()[1:4]]
    totals = [sum(column) for column in zip(*rows, strict=True)]
    assert min(totals) > 0, "the example no longer shows what it is for"
    assert totals[1] == sum(totals[2:6])  # prompt tokens: from each tier, and computed
