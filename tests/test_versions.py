"""What breaks under a newer package is told by family and column (tests/versions.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.versions import Outcome, Plan, read_results, report

# A test of the table in docs/models.md whose families have different fates, and a file that cannot be imported.
FAMILIES = """
import pytest

@pytest.mark.parametrize("model_type", ["llama", "qwen3_vl", "gemma2", "qwen3_5"])
def test_packed_rows_equal_the_unmodified_model(model_type):
    if model_type == "qwen3_5":
        raise AttributeError("no states")
    assert model_type == "llama", "other log-probs"
"""
VISION = "from transformers import AWordThatIsGone\n"


def test_what_broke_is_in_the_table_by_column_and_family(tmp_path: Path) -> None:
    files = {"tests/learner/test_families.py": FAMILIES, "tests/data/test_vision.py": VISION}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "transformers.py").write_text("")  # a release without that word
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "--junitxml", "out.xml"]
    subprocess.run([*command, "--continue-on-collection-errors"], cwd=tmp_path, capture_output=True, check=False)

    outcome = read_results(tmp_path / "out.xml")
    assert outcome.ran == 5
    pinned = {"transformers": "5.19.0", "tokenizers": "0.23.3"}
    plan = Plan({"transformers": "5.24.0"}, {**pinned, "transformers": "5.24.0"})
    said = " ".join(report(plan, pinned, {"together": outcome}).split())
    assert "transformers 5.19.0 5.24.0" in said
    assert "together: 4 of 5 tests broke" in said
    assert "learner qwen3_vl, gemma2 AssertionError: other log-probs" in said
    assert "learner qwen3_5 AttributeError: no states" in said
    assert "prompts tests/data/test_vision.py ImportError: cannot import name 'AWordThatIsGone'" in said
    assert "may move up" not in said
    green = report(plan, pinned, {"together": Outcome(5, [])})
    assert green.endswith("constraints.txt may move up: transformers==5.24.0")
