"""Training on problems whose answers are programs, from a user's own table to a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.toy_runs import Toys


@pytest.mark.slow
def test_a_run_on_code_trains(toys: Toys, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    tests = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}
    rows = [{"prompt": f"Print twice the number. Case {i}.", "tests": json.dumps(tests)} for i in range(8)]
    (raw / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mapping = tmp_path / "my_code.yaml"
    mapping.write_text(f"path: {raw}\nsource: my_code\ncolumns: {{question: prompt, tests: tests}}\n")
    prepared = toys.runner("prepare", str(mapping), "--out", str(tmp_path / "set"))
    assert prepared.code == 0 and "8 rows in, 8 kept" in prepared.output, prepared.output[-3000:]
    run = toys.train_run(
        "code", data={"train": [str(tmp_path / "set")], "template": "think_code"}, train={"steps": 1}
    )
    assert run.checkpoints() and run.metrics()[0]["rewards/accuracy/mean"] == 0  # the toy policy writes no programs
    assert set(run.rollouts(1, ["verdict"])["verdict"].to_pylist()) == {"no_answer"}
