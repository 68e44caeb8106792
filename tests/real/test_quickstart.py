"""`vlm-rl quickstart --real` from the wheel to its report, at a tiny size, as perf/gpu_parts.py runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.helpers.toy_runs import metrics_of
from vlm_rl.run.directory import RunDirectory

SCRIPT = Path(__file__).parents[2] / "perf" / "gpu_parts.py"


def test_the_quickstart_ends_in_a_report(tmp_path: Path) -> None:
    words = [sys.executable, SCRIPT, "real", "--device", "cpu", "--work", tmp_path / "work"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    page = done.stdout
    assert done.returncode == 0 and page.endswith("\npass\n"), (page + done.stderr)[-3000:]
    shares = re.findall(r"guess (\d+)%.*; equations (\d+)%.*; checked (\d+)%", page)
    assert len(shares) == 5  # after each of three steps, and of the first and the last once more
    assert all(abs(sum(map(int, row)) - 100) <= 1 for row in shares)
    assert re.search(r"sampled accuracy, 8 responses .*: [01]\.\d{3} in step 1, [01]\.\d{3} in step 3", page)
    assert re.search(r"greedy accuracy on 4 held-out problems: [01]\.\d{3} before, [01]\.\d{3} after", page)
    run = RunDirectory(tmp_path / "work" / "real")
    assert (run.path / "report.html").stat().st_size > 10_000
    assert run.rollout_steps() == [1, 2, 3] and [result.step for result in run.evals()] == [0, 3]
    assert any(float(row.get("grad_norm", 0)) > 0 for row in metrics_of(run))
    assert "Converting" not in page  # transformers' progress bar
