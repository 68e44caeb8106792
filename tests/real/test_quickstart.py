"""`vlm-rl quickstart --real` from the wheel to its report, at a tiny size."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.helpers.toy_runs import metrics_of
from vlm_rl.run.directory import RunDirectory

SMALL = """
import sys
from pathlib import Path
from vlm_rl.commands.real_quickstart import RealSizes, real_quickstart

sizes = RealSizes(traces=16, train=8, heldout=4, cold_steps=2, cold_batch=4, steps=3, prompts=1, max_tokens=48)
real_quickstart(Path(sys.argv[1]), seed=0, sampler="auto", algorithm="grpo", on_cpu=True, sizes=sizes)
"""


def test_the_quickstart_ends_in_a_report(tmp_path: Path) -> None:
    out = tmp_path / "quickstart"
    done = subprocess.run([sys.executable, "-c", SMALL, out], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    page = done.stdout
    shares = re.findall(r"guess (\d+)%.*; equations (\d+)%.*; checked (\d+)%", page)
    assert len(shares) == 5  # after each of three steps, and of the first and the last once more
    assert all(abs(sum(map(int, row)) - 100) <= 1 for row in shares)
    assert re.search(r"sampled accuracy, 8 responses .*: [01]\.\d{3} in step 1, [01]\.\d{3} in step 3", page)
    assert re.search(r"greedy accuracy on 4 held-out problems: [01]\.\d{3} before, [01]\.\d{3} after", page)
    assert (out / "report.html").stat().st_size > 10_000
    run = RunDirectory(out)
    assert run.rollout_steps() == [1, 2, 3] and [result.step for result in run.evals()] == [0, 3]
    assert any(float(row.get("grad_norm", 0)) > 0 for row in metrics_of(run))
    assert "Converting" not in done.stderr  # transformers' progress bar
