"""`vlm-rl paper`: the catalog, the plan, what is refused, the table, and the whole of it on toy data."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.learner.test_dry_run import CONFIGS as DRY_RUN
from tests.learner.test_dry_run import PAPERS as DRY_RUN_PAPERS
from vlm_rl.algorithms import resolve_algorithm
from vlm_rl.cli import main
from vlm_rl.papers.catalog import BASE, PAPERS, Paper
from vlm_rl.papers.command import Setup, make_paper
from vlm_rl.papers.downloads import MODELS, TRAINING_SETS
from vlm_rl.papers.steps import PlannedRun, downloads, eval_steps, plan_runs, prepare_steps, table_rows
from vlm_rl.papers.table import as_markdown, make_table
from vlm_rl.run.directory import RunDirectory

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@cache
def runs_of(name: str) -> list[PlannedRun]:
    """Return the runs of a paper; reading 37 files takes a second."""
    return plan_runs(PAPERS[name], CONFIGS)


def all_runs() -> list[tuple[Paper, PlannedRun]]:
    return [(paper, one) for name, paper in PAPERS.items() for one in runs_of(name)]


def test_all_37_rows_resolve_plan_and_dry_run(tmp_path: Path) -> None:
    """Each is a file of its own, a recipe of test_dry_run, and trains by a command; so is every file for a paper."""
    files = {one.file for _, one in all_runs()}
    assert len(all_runs()) == len(files) == 37
    dry_run = {*DRY_RUN, *(parameter.values[0] for parameter in DRY_RUN_PAPERS)}
    assert files <= dry_run
    assert {path for path in CONFIGS.glob("papers/*/*.yaml") if path.stem != "base"} <= files
    outs = {one.planned.config.out for _, one in all_runs()}
    assert len(outs) == 37
    for paper, one in all_runs():
        config = one.planned.config
        resolve_algorithm(config.algorithm)
        assert str(one.file) in one.command(8) and one.run.title.startswith(one.run.model)
        assert Path(config.model.path) == Path(MODELS[one.run.model].folder)
        assert {Path(name).name for name in config.data.train} <= {*paper.training_sets}
        assert {*paper.training_sets} <= TRAINING_SETS.keys()


def test_rows_differ_in_what_their_names_say() -> None:
    by_name = {(paper.key, one.run.title): one.planned.config for paper, one in all_runs()}
    assert by_name["luspo-vl", "Qwen2.5-VL-7B-Instruct LUSPO"].algorithm.name == "luspo"
    weighted = {key for key, config in by_name.items() if config.algorithm.hadw.enabled}
    assert weighted == {key for key in by_name if key[1].endswith("+ HA-DW")} and len(weighted) == 9
    polaris = {key for key, config in by_name.items() if config.data.train == ["data/polaris"]}
    assert polaris == {key for key in by_name if "Polaris" in key[1]} and len(polaris) == 6
    balanced = by_name["ba", "Qwen3-1.7B DAPO balanced"].algorithm
    assert resolve_algorithm(balanced).aggregation == "balanced"


def test_every_set_that_is_trained_on_or_measured_is_prepared() -> None:
    for paper in PAPERS.values():
        prepared = {step.words[step.words.index("--out") + 1] for step in prepare_steps(paper, Path("data"))}
        runs = runs_of(paper.key)
        used = {name for one in runs for name in (*one.planned.config.data.train, *one.planned.config.data.eval)}
        rows = table_rows(paper, runs, Path("out"))
        for row in rows:
            for step in eval_steps(paper, row, Path("data")):
                used |= {*step.words[step.words.index("--data") + 1 : step.words.index("--out")]}
        assert used == prepared
        assert len(rows) == len(paper.runs) + len(paper.models) and rows[0].rule == BASE
        assert len({row.results for row in rows}) == len(rows)
        raw = {step.words[step.words.index("--source") + 1] for step in prepare_steps(paper, Path("data"))}
        assert raw == {one.folder for one in downloads(paper) if one.is_data}


def test_programs_are_measured_apart_within_the_context_of_the_run() -> None:
    """A question of LiveCodeBench may take half of a context of 4,096; mathematics keeps the run's limits."""
    base, trained = table_rows(PAPERS["ba"], runs_of("ba"), Path("out"))[:2]
    mathematics, code = (step.words for step in eval_steps(PAPERS["ba"], base, Path("data")))
    assert code[-4:] == ["--max-prompt-tokens", "2048", "--max-tokens", "2048"]
    assert "data/livecodebench" in code and "data/livecodebench" not in mathematics
    assert mathematics[-6:] == ["--max-prompt-tokens", "1024", "--template", "think_box", "--max-tokens", "3072"]
    assert [step.words[-2:] for step in eval_steps(PAPERS["ba"], trained, Path("data"))] == [
        ["--max-prompt-tokens", "1024"],
        ["--max-tokens", "2048"],
    ]


def test_published_numbers_are_of_rows_and_columns_that_exist() -> None:
    """The averages are those of the paper's table, which are not stored here."""
    for paper in PAPERS.values():
        rows = {(run.model, run.rule) for run in paper.runs} | {(model, BASE) for model in paper.models}
        assert paper.published.keys() <= rows
        assert all(numbers.keys() == {c.benchmark for c in paper.columns} for numbers in paper.published.values())
        assert paper.published or paper.source.startswith("no source")
    means = {rule: sum(numbers.values()) / 6 for (_, rule), numbers in PAPERS["luspo-vl"].published.items()}
    assert means == pytest.approx({BASE: 39.2, "GRPO": 44.0, "GSPO": 43.6, "LUSPO": 45.6}, abs=0.06)
    hadw = PAPERS["hadw"]
    means = [sum(hadw.published[run.model, run.rule].values()) / 5 for run in hadw.runs]
    of_4b, of_8b = [46.5, 48.7, 47.1, 49.2, 46.8, 49.5], [49.6, 52.5, 50.2, 51.7, 50.7, 53.4]
    assert means == pytest.approx([*of_4b, *of_8b, 25.7, 27.1, 24.9, 25.8, 26.5, 28.1], abs=0.0501)


def summary(score: float, **more: Any) -> dict[str, Any]:
    shared = {"k": 1, "rule": "strict", "step": 3, "mean_length": 9.0, "truncated_share": 0.0, "num_problems": 8}
    return {"accuracy": score, "interval": [0.25, 0.75], **shared, **more}


def test_the_table_holds_the_number_that_papers_print(tmp_path: Path) -> None:
    """Of We-Math the strict score, of MathVerse the Vision Only rows, of a set without scores the accuracy."""
    paper = PAPERS["luspo-vl"]
    rows = table_rows(paper, runs_of(paper.key), tmp_path)
    base = RunDirectory(rows[0].results)
    strict = {"score": 0.3, "n": 5, "interval": [0.1, 0.5]}
    seen = {"score": 0.4, "n": 4, "interval": [0.2, 0.6]}
    base.path.mkdir(parents=True)
    base.write_eval("wemath", 3, [], summary(0.9, headline="score_strict", scores={"score_strict": strict}))
    scored = {"headline": "accuracy", "scores": {"accuracy": {"score": 0.8, "n": 20, "interval": [0.7, 0.9]}}}
    base.write_eval("mathverse", 3, [], summary(0.8, by={"version": {"Vision Only": seen}}, **scored))
    base.write_eval("mathvista", 3, [], summary(0.5, k=4))
    table = make_table(paper, rows, note="A note")
    cells = dict(zip([column.benchmark for column in paper.columns], table["rows"][0]["cells"], strict=True))
    assert cells["wemath"] == {"published": 34.5, "ours": cells["wemath"]["ours"]}
    assert (cells["wemath"]["ours"]["score"], cells["wemath"]["ours"]["n"]) == (30.0, 5)
    assert (cells["mathverse"]["ours"]["score"], cells["mathverse"]["ours"]["n"]) == (40.0, 4)
    assert cells["mathvision"]["ours"] is None
    text = as_markdown(table)
    assert "**A note.**" in text and "Table 3 of arXiv 2602.05261" in text
    assert "| 67.4 / 50.0 [25.0, 75.0] (n 8, k 4) |" in text and "| 26.2 / not measured |" in text
    assert "34.5 / 30.0 [10.0, 50.0] (n 5)" in text and "| 39.2 / not measured |" in text
    assert all(f"- {item}" in text for item in paper.differs)
    ba = PAPERS["ba"]
    other = as_markdown(make_table(ba, table_rows(ba, runs_of("ba"), tmp_path)))
    cell = re.compile(r"\\| no source / not measured (?=\\|)")
    assert len(cell.findall(other)) == (12 + 2) * (7 + 1)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(*words: object) -> tuple[int, str]:
        try:
            code = main([*map(str, words)])
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


@pytest.mark.parametrize("name", ["luspo-vl", "luspo-text"])
def test_a_plan_names_every_download_and_every_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[..., tuple[int, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = said("paper", name, "--configs", CONFIGS)
    assert code == 0
    paper = PAPERS[name]
    for one in downloads(paper):
        assert f"{one.hub}: size {one.size}, licence {one.license}, revision {one.revision}" in text
        assert one.command in text
    for one in runs_of(name):
        assert f"[to do] {one.command(8)}\n" in text
    assert text.count("vlm-rl eval --model") == len(paper.runs) + len(paper.models) and "[done]" not in text


def test_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[..., tuple[int, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    vision = ["luspo-vl", "--configs", CONFIGS]
    missing = len({*downloads(PAPERS["luspo-vl"])})
    for words, expected in (
        (["ppo"], "known: luspo-vl, luspo-text, ba, hadw"),
        (["ba"], "give --configs FOLDER"),
        (["ba", "--plan", "--train"], "give one of them"),
        (["ba", "--ranks", "0"], "--ranks is 0"),
        ([*vision, "--prepare"], f"{missing} downloads are missing"),
        ([*vision, "--train"], "models/Qwen2.5-VL-7B-Instruct is not there, which"),
    ):
        code, text = said("paper", *words)
        assert code == 2 and expected in text, text


def test_what_was_done_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "virl39k").mkdir(parents=True)
    (tmp_path / "data" / "virl39k" / "manifest.json").write_text("{}")
    (tmp_path / "raw" / "ViRL39K").mkdir(parents=True)
    (tmp_path / "raw" / "ViRL39K" / "x.parquet").write_text("")
    assert make_paper("luspo-vl", stages=[], setup=Setup(out=tmp_path / "out", configs=CONFIGS)) == 0
    text = capsys.readouterr().out
    assert "[done]  vlm-rl prepare virl39k --source raw/ViRL39K" in text and text.count("[done]") == 1
    assert "ViRL39K: size" not in text


@pytest.mark.slow
def test_the_whole_of_it_on_toy_data(tmp_path: Path, said: Callable[..., tuple[int, str]]) -> None:
    """Three runs and four evaluations, then the same command again, which finds everything done."""
    words = ["paper", "luspo-vl", "--tiny", "--configs", CONFIGS, "--out", tmp_path / "tiny"]
    stages = ["--prepare", "--train", "--eval", "--table"]
    code, text = said(*words, *stages)
    assert code == 0 and "3 runs, 3 to do" in text, text[-3000:]
    table = json.loads((tmp_path / "tiny" / "table.json").read_text())
    assert [row["rule"] for row in table["rows"]] == [BASE, "GRPO", "GSPO", "LUSPO"]
    assert "say nothing about the paper" in table["note"]
    for row in table["rows"]:
        for cell in row["cells"]:
            assert cell["ours"]["n"] == 4 and cell["ours"]["step"] == (0 if row["rule"] == BASE else 2)
            assert cell["ours"]["mean_length"] <= 14
    algorithms = [
        RunDirectory(tmp_path / "tiny" / f"virl39k_{rule}_7b").config().algorithm.name
        for rule in ("grpo", "gspo", "luspo")
    ]
    assert algorithms == ["grpo", "gspo", "luspo"]
    code, again = said(*words, *stages)
    assert code == 0 and "3 runs, 0 to do" in again and "vlm-rl eval --model" not in again
    assert json.loads((tmp_path / "tiny" / "table.json").read_text()) == table
    code, plan = said(*words)
    assert code == 0 and "[to do]" not in plan and plan.count("[done]") == 3 + 4 + 1
