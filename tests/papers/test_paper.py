"""`vlm-rl paper`: the catalog, the plan, what is refused, the table, and the whole of it on toy data."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.recipes import CONFIGS, PAPER_RECIPES, RECIPES
from tests.helpers.toy_runs import Runner
from vlm_rl.algorithms import resolve_algorithm
from vlm_rl.cli import main
from vlm_rl.config import load_config
from vlm_rl.data.sets import load_set
from vlm_rl.data_prep.quickstart_data import make_tiny_sets
from vlm_rl.errors import EXIT_STOPPED
from vlm_rl.evaluation.benchmarks.benchmark import Response
from vlm_rl.evaluation.benchmarks.judging import judge
from vlm_rl.evaluation.benchmarks.registry import BENCHMARKS
from vlm_rl.grading.grader import Grader
from vlm_rl.losses import token_weights
from vlm_rl.papers import command
from vlm_rl.papers.catalog import BASE, PAPERS, Paper
from vlm_rl.papers.command import Setup, make_paper
from vlm_rl.papers.downloads import COMMITS, MODELS, NEWEST, SIZES, TRAINING_SETS
from vlm_rl.papers.steps import PlannedRun, downloads, eval_steps, plan_runs, prepare_steps, table_rows
from vlm_rl.papers.table import as_markdown, make_table
from vlm_rl.run.directory import RunDirectory
from vlm_rl.templates import TEMPLATES


@cache
def runs_of(name: str) -> list[PlannedRun]:
    """Return the runs of a paper; reading 39 files takes a second."""
    return plan_runs(PAPERS[name], CONFIGS)


def all_runs() -> list[tuple[Paper, PlannedRun]]:
    return [(paper, one) for name, paper in PAPERS.items() for one in runs_of(name)]


def headline_runs() -> list[tuple[Paper, PlannedRun]]:
    return [(paper, one) for paper, one in all_runs() if not one.run.changes and paper.key != "hadw-ablations"]


def test_all_39_rows_resolve_plan_and_dry_run() -> None:
    """Each is a file of its own, a recipe of test_dry_run, and trains by a command; so is every file for a paper."""
    files = {one.file for _, one in headline_runs()}
    assert len(headline_runs()) == len(files) == 39
    assert files <= {*RECIPES, *PAPER_RECIPES}
    assert {path for path in PAPER_RECIPES if path.stem != "base"} <= files
    assert len({one.planned.config.out for _, one in headline_runs()}) == 39
    for paper, one in all_runs():
        config = one.planned.config
        resolve_algorithm(config.algorithm)
        assert str(one.file) in one.command(8) and one.run.title.startswith(one.run.model)
        assert Path(config.model.path) == Path(MODELS[one.run.model].folder)
        assert {Path(name).name for name in config.data.train} <= {*paper.training_sets}
        assert {*paper.training_sets} <= TRAINING_SETS.keys()


def test_rows_differ_in_what_their_names_say() -> None:
    by_name = {(paper.key, one.run.title): one.planned.config for paper, one in headline_runs()}
    assert by_name["luspo-vl", "Qwen2.5-VL-7B-Instruct LUSPO"].algorithm.name == "luspo"
    weighted = {key for key, config in by_name.items() if config.algorithm.hadw.enabled}
    assert weighted == {key for key in by_name if key[1].endswith("+ HA-DW")} and len(weighted) == 9
    polaris = {key for key, config in by_name.items() if config.data.train == ["data/polaris"]}
    assert polaris == {key for key in by_name if "Polaris" in key[1]} and len(polaris) == 6


@pytest.mark.parametrize("name", ["luspo-vl", "luspo-text", "luspo-mix"])
def test_the_rows_of_luspo_differ_in_the_algorithm_alone(name: str) -> None:
    """GSPO twice: with the one clip that the paper prints, and with that of its own paper."""
    clips = {"GRPO": (0.2, 0.2), "GSPO": (2e-3, 2.5e-3), "GSPO, its own clip": (3e-4, 4e-4), "LUSPO": (2e-3, 2.5e-3)}
    runs = {one.run.title: one.planned.config for one in runs_of(name)}
    for model in PAPERS[name].models:
        shared = []
        for rule in [rule for rule in clips if f"{model} {rule}" in runs]:
            config = runs[f"{model} {rule}"]
            row = resolve_algorithm(config.algorithm)
            name_and_clip = (config.algorithm.name, row.clip_low, row.clip_high)
            assert name_and_clip == (rule.partition(",")[0].lower(), *clips[rule])
            algorithm = config.algorithm.model_copy(update={"name": "", "clip_low": None, "clip_high": None})
            shared.append(config.model_copy(update={"out": "", "algorithm": algorithm}))
        assert len(shared) == (2 if name == "luspo-mix" else 4) and all(config == shared[0] for config in shared)


def test_the_runs_of_luspo_are_as_long_and_as_wide_as_printed() -> None:
    """Steps to which the paper's curves go, 20 rollout steps of warm-up, 4 x 8 cards for the mixture of experts, and
    AIME24 as avg@32 every 10 steps."""
    steps = {
        ("luspo-vl", "Qwen2.5-VL-7B-Instruct"): (700, 1),
        ("luspo-mix", "Qwen2.5-VL-7B-Instruct"): (500, 1),
        ("luspo-text", "Qwen2.5-7B"): (140, 1),
        ("luspo-text", "Qwen3-30B-A3B-Instruct-2507"): (50, 4),
    }
    for paper, one in all_runs():
        if paper.key.startswith("luspo"):
            config = one.planned.config
            assert (config.train.steps, one.run.num_nodes) == steps[paper.key, one.run.model]
            assert config.train.warmup_rollout_steps == 20
            if paper.key == "luspo-text":
                assert config.eval.every == 10
                assert config.eval.sampling("aime24") == (32, 1.0, 0.7)
                assert config.eval.sampling("math500") == (1, 0.0, 1.0)


def test_commands_for_the_figures_of_hadw_ask_as_its_runs_do() -> None:
    """A model before training has no run: without them the template and limits would be those of vlm-rl eval."""
    config = runs_of("hadw")[0].planned.config
    page = (CONFIGS.parent / "docs" / "papers.md").read_text(encoding="utf-8")
    commands = [words for words in re.findall(r"`(vlm-rl eval [^`]*)`", page) if "--samples" in words]
    limits = f"--max-prompt-tokens {config.data.max_prompt_tokens} --max-tokens {config.rollout.max_tokens}"
    assert len(commands) == 2
    assert all(f" --template {config.data.template} {limits} " in command for command in commands)


def test_every_ablation_of_hadw_changes_what_its_name_says_and_nothing_else() -> None:
    """GRPO with and without HA-DW are the runs of the paper's first table, and are trained once."""
    runs = {one.run.rule: one for one in runs_of("hadw-ablations")}
    shared = {"GRPO", "GRPO + HA-DW"}
    of_hadw = {one.run.rule: one for one in runs_of("hadw") if one.run.model == "Qwen3-4B-Base"}
    assert all(runs[rule].planned.out == of_hadw[rule].planned.out for rule in shared)
    outs = {one.planned.out for one in runs.values()}
    assert len(outs) == len(runs) == 13 and len(outs & {one.planned.out for one in runs_of("hadw")}) == 2
    expected = {
        **{f"HA-DW, belief {belief}": {"variant": "constant", "threshold": belief} for belief in (0.4, 0.5, 0.6)},
        **{f"HA-DW, lambda {scale}": {"scale": scale} for scale in (0.5, 0.8, 1.0, 1.5, 1.7, 2.0)},
        "HA-DW, published code": {"variant": "published_code"},
    }
    assert runs.keys() == {*expected, *shared, "GRPO, 16 responses"}
    for rule, changes in expected.items():
        tree = of_hadw["GRPO + HA-DW"].planned.config.model_dump()
        tree["algorithm"]["hadw"] |= changes
        assert runs[rule].planned.config.model_dump() == tree | {"out": str(runs[rule].planned.out)}
        assert all(word in runs[rule].command(8) for word in runs[rule].run.changes)
    tree = of_hadw["GRPO"].planned.config.model_dump()
    tree["rollout"]["responses_per_prompt"] = 16
    wide = runs["GRPO, 16 responses"].planned
    assert wide.config.model_dump() == tree | {"out": str(wide.out)}


def test_the_rows_of_ba_differ_in_their_aggregation_alone_and_token_is_a_mean_of_each_group() -> None:
    """BA compares aggregations within a group. By hand: a token weighs 1 / (P x the group's tokens),
    1 / (N x the response's tokens), and 1 / (N x the mean length of its sign in the group)."""
    lengths = np.array([[1, 3, 5], [2, 10, 6]])
    advantages = np.array([[1.0, -0.5, -0.5], [-0.5, 1.0, -0.5]])
    expected = {
        "token": [[1 / 18] * 3, [1 / 36] * 3],
        "sequence": [[1 / 6, 1 / 18, 1 / 30], [1 / 12, 1 / 60, 1 / 36]],
        "balanced": [[1 / 6, 1 / 24, 1 / 24], [1 / 24, 1 / 60, 1 / 24]],
    }
    shared = set()
    for one in runs_of("ba"):
        data, rule = one.run.rule.split()
        row = resolve_algorithm(one.planned.config.algorithm)
        weights = token_weights(row.aggregation, lengths, advantages, max_tokens=16)
        np.testing.assert_allclose(weights, expected[rule])
        shared.add((one.run.model, data, repr(replace(row, aggregation=""))))
    assert len(shared) == 4


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


def test_what_is_known_of_a_download_is_of_one_that_a_paper_needs() -> None:
    """A commit is named in full, as the hub wants it, and is in the command."""
    needed = {one.hub: one for paper in PAPERS.values() for one in downloads(paper)}
    assert {*COMMITS, *SIZES} <= needed.keys()
    for hub, one in needed.items():
        if hub in COMMITS:
            assert re.fullmatch("[0-9a-f]{40}", one.revision)
            assert f" --revision {one.revision} " in one.command
        else:
            assert one.revision == NEWEST and "--revision" not in one.command
    assert len({*COMMITS.values()}) == len(COMMITS)


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


def test_a_model_that_a_run_divides_is_measured_on_engines_of_as_many_ranks() -> None:
    rows = table_rows(PAPERS["luspo-text"], runs_of("luspo-text"), Path("out"))
    for row in rows:
        (step,) = eval_steps(PAPERS["luspo-text"], row, Path("data"))
        divided = step.words[-4:] == ["--sampler", "vllm", "--tensor-parallel", "4"]
        assert divided is row.model.startswith("Qwen3-30B"), step.shown


def test_published_numbers_are_of_rows_and_columns_that_exist() -> None:
    """A number with a wrong digit would move the mean of its row away from the average that the paper prints."""
    for paper in PAPERS.values():
        rows = {(run.model, run.rule) for run in paper.runs} | {(model, BASE) for model in paper.models}
        assert paper.published.keys() | paper.averages.keys() | paper.lengths.keys() <= rows
        columns = {column.benchmark for column in paper.columns}
        assert {name for numbers in paper.published.values() for name in numbers} <= columns
        for key, numbers in paper.published.items():
            if key in paper.averages:  # printed averages agree with printed cells
                mean = sum(numbers.values()) / len(numbers)
                assert mean == pytest.approx(paper.averages[key], abs=0.0501), key
    for name in ("luspo-vl", "luspo-mix", "hadw"):
        assert PAPERS[name].averages.keys() == PAPERS[name].published.keys()


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
    assert cells["mathverse"]["ours"]["mean_length"] is None, "the summary's is that of all versions"
    assert cells["mathvision"]["ours"] is None
    text = as_markdown(table)
    assert "**A note.**" in text and "Table 3 of arXiv 2602.05261" in text
    assert "| 67.4 / 50.0 [25.0, 75.0] (n 8, k 4, 9 tokens) |" in text and "| 26.2 / not measured |" in text
    assert "34.5 / 30.0 [10.0, 50.0] (n 5, 9 tokens)" in text and "| 39.2 / not measured |" in text
    assert "/ 40.0 [20.0, 60.0] (n 4) |" in text
    base.write_eval("mathverse", 4, [], summary(0.8, by={}, **scored))  # no rows of the version that is printed
    row = make_table(paper, rows)["rows"][0]
    assert [cell["ours"] and cell["ours"]["score"] for cell in row["cells"]].count(80.0) == 0
    assert all(f"- {item}" in text for item in paper.differs)


def test_published_averages_and_lengths_stand_beside_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BA's averages, of which no source gives the cells, and LUSPO's text rows, where some cells are printed."""
    monkeypatch.chdir(tmp_path)
    ba = PAPERS["ba"]
    text = as_markdown(make_table(ba, table_rows(ba, runs_of("ba"), tmp_path)))
    averages = ["44.8", "43.6", "47.0", "46.1", "43.5", "46.4"]
    rows = [line for line in text.splitlines() if line.startswith("| Qwen3-1.7B")]
    assert [line.split(" | ")[-2].removesuffix(" / of other sets") for line in rows] == ["no source", *averages]
    assert text.count("| no source / not measured ") == (12 + 2) * (7 + 1)  # cells, lengths

    paper = PAPERS["luspo-text"]
    rows = table_rows(paper, runs_of(paper.key), tmp_path)
    assert [row.rule for row in rows[:5]] == [BASE, "GRPO", "GSPO", "GSPO, its own clip", "LUSPO"]
    for row, score, length in zip((rows[2], rows[4], rows[-1]), (0.25, 0.375, 0.5), (100, 1400, 9), strict=True):
        results = RunDirectory(row.results)
        results.path.mkdir(parents=True)
        for place, column in enumerate(paper.columns):  # the published lengths are of AIME24
            own = length if column.benchmark == "aime24" else 7.0
            results.write_eval(column.folder, 3, [], summary(score + place / 16, mean_length=float(own)))
    table = make_table(paper, rows)
    text = as_markdown(table)
    assert "| 41.3 / 46.9 | 3,940 / 1,400 |" in text and "| 37.3 / 34.4 | 2,611 / 100 |" in text
    assert "(n 8, 1,400 tokens)" in text and "(n 8, 7 tokens)" in text and "mean length, AIME24" in text
    # Of the mixture AIME24 and AIME25 alone are printed: (.5625 + .625) / 2 stands beside (83.6 + 76.3) / 2.
    assert table["rows"][-1]["average"] == {"published": 80.0, "ours": pytest.approx(59.375), "columns": 2}
    assert "| 80.0 / 59.4 (of 2) |" in text


def test_the_table_says_how_steady_our_runs_were(tmp_path: Path) -> None:
    """Evaluations of .2, .8, .6 and .7: .8 is the best, .1 above the last; sqrt(.41 / 6) = .2614 between them."""
    paper = PAPERS["luspo-vl"]
    planned = table_rows(paper, runs_of(paper.key), tmp_path)
    rows = [replace(row, folder=tmp_path / row.folder.name) for row in planned]
    run = RunDirectory(rows[1].folder)
    run.path.mkdir(parents=True)
    for step, accuracy in enumerate((0.2, 0.8, 0.6, 0.7)):
        run.write_eval(Path(rows[1].config.data.eval[0]).name, step, [], summary(accuracy))
    for step in range(1, 31):
        run.append_metrics(step, 1, {"grad_norm": 50.0 if step in (7, 8) else 2.0, "loss": float(step % 2)})
    table = make_table(paper, rows)
    assert [row["stability"] is None for row in table["rows"][:3]] == [True, False, True]
    evaluated = Path(rows[1].config.data.eval[0]).name
    assert f"| GRPO | {evaluated} | 4 | 80.0 | 10.0 | 26.1 | 30 | 2 | 0 |" in as_markdown(table)


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


@pytest.mark.parametrize("name", PAPERS)
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
    # Programs are measured apart, and so is what the paper takes a number of responses of its own of.
    kinds = {(BENCHMARKS[column.benchmark].has_programs, column.samples) for column in paper.columns}
    evaluations = len(kinds) * (len(paper.runs) + len(paper.models))
    command = "torchrun --nproc-per-node 8 --shutdown-timeout 1800 -m vlm_rl eval --model "
    assert text.count(command) == evaluations and "[done]" not in text


def test_a_download_that_was_stopped_before_its_first_file_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[..., tuple[int, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    one = TRAINING_SETS["dapo_math"].download
    folder = Path(one.folder)
    (folder / ".cache/huggingface/download/data").mkdir(parents=True)  # as `hf download` leaves it
    (folder / ".cache/huggingface/download/data/aB3.0f1e.incomplete").write_bytes(b"PAR1")
    (folder / ".gitattributes").write_text("*.parquet filter=lfs\n")
    assert one.command in said("paper", "luspo-text", "--configs", CONFIGS)[1]
    (folder / "data").mkdir()
    assert one.command not in said("paper", "luspo-text", "--configs", CONFIGS)[1]


def test_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[..., tuple[int, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    vision = ["luspo-vl", "--configs", CONFIGS]
    missing = len({*downloads(PAPERS["luspo-vl"])})
    for words, expected in (
        (["ppo"], "known: luspo-vl, luspo-text, luspo-mix, ba, hadw, hadw-ablations"),
        (["ba"], "give --configs FOLDER"),
        (["ba", "--plan", "--train"], "give one of them"),
        (["ba", "--ranks", "0"], "--ranks is 0"),
        ([*vision, "--prepare"], f"{missing} downloads are missing"),
        ([*vision, "--train"], "models/Qwen2.5-VL-7B-Instruct is not there, which"),
    ):
        code, text = said("paper", *words)
        assert code == 2 and expected in text, text


def test_what_is_printed_does_what_the_command_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[..., tuple[int, str]]
) -> None:
    """Sets of another folder are trained on from there, responses are as many as the paper's, options are kept."""
    monkeypatch.chdir(tmp_path)
    options = ["--configs", str(CONFIGS), "--data", "/d", "--ranks", "4"]
    code, text = said("paper", "hadw", *options)
    lines = [line.split("] ", 1)[1] for line in text.splitlines() if line.startswith("[to do]")]
    trains = [line for line in lines if " train " in line]
    assert code == 0 and len(trains) == 18
    launch, moved = "torchrun --nproc-per-node 4 ", "'data.train=[/d/math]' 'data.eval=[/d/math500,/d/aime25,"
    assert all(line.startswith(launch) and moved in line for line in trains)
    assert (
        sum(
            "/d/aime25 /d/amc23 " in line and line.endswith(" --samples 16 --temperature 1 --top-p 1")
            for line in lines
        )
        == 18 + 3
    )
    assert f"vlm-rl paper hadw --ranks 4 --configs {CONFIGS} --data /d --table" in lines

    code, text = said("paper", "luspo-text", "--tiny", "--configs", CONFIGS)
    lines = [line.split("] ", 1)[1] for line in text.splitlines() if line.startswith("[to do]")]
    assert code == 0 and all(line.startswith("vlm-rl ") for line in lines)  # one rank of one node
    tiny = Path("runs/papers/luspo-text-tiny")
    trains = [line for line in lines if " train " in line]
    for place, (line, run) in enumerate(zip(trains, runs_of("luspo-text"), strict=True)):
        _, _, file, *changes = shlex.split(line)
        config = load_config(file, changes)
        assert Path(file) == run.file and config.model.path == str(tiny / "tiny-model")
        assert config.train.steps == 2 + place and Path(config.out) == tiny / run.planned.out.name
    assert lines[-1] == f"vlm-rl paper luspo-text --tiny --configs {CONFIGS} --table"


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


def test_a_set_of_which_a_part_is_printed_takes_no_part_in_the_mean_length(tmp_path: Path) -> None:
    """The summary's length is that of all its problems. Five sets of 9 tokens have a mean of 9, four have none."""
    paper = PAPERS["luspo-vl"]
    rows = table_rows(paper, runs_of(paper.key), tmp_path)
    base = RunDirectory(rows[0].results)
    base.path.mkdir(parents=True)
    for column in paper.columns:
        means = make_table(paper, rows)["rows"][0]["mean_length"]
        assert means == {"published": None, "ours": None}
        parts = {"by": {"version": {"Vision Only": {"score": 0.4, "n": 4, "interval": [0.2, 0.6]}}}}
        base.write_eval(column.folder, 0, [], summary(0.5, **(parts if column.facet else {})))
    assert make_table(paper, rows)["rows"][0]["mean_length"]["ours"] == 9


def test_sigterm_reaches_the_command_that_runs_and_is_waited_for(tmp_path: Path) -> None:
    """The command takes a moment to save; the table's own process outlives it and says that it was stopped."""
    said = tmp_path / "said"
    command = (
        "import signal, sys, time; from pathlib import Path; said = Path(sys.argv[1])\n"
        "def stop(*_):\n    time.sleep(0.3); said.write_text('saved'); sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, stop); said.write_text('begun'); time.sleep(60)"
    )
    script = f"from vlm_rl.papers.command import _run; _run({[sys.executable, '-c', command, str(said)]})"
    process = subprocess.Popen([sys.executable, "-c", script])
    while not said.exists() or said.read_text() != "begun":
        time.sleep(0.05)
    process.terminate()
    assert process.wait(timeout=60) == EXIT_STOPPED and said.read_text() == "saved"


@pytest.fixture
def forked_evaluations(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the commands of evaluations from a process that has imported everything; test_sigterm starts one anew."""

    def run(argv: Sequence[str]) -> int:
        python, *module, program = argv[:3]
        assert (python, module, program) == (sys.executable, ["-m"], "vlm_rl")
        result = runner(*argv[3:])
        print(result.output)
        return result.code

    monkeypatch.setattr(command, "_run", run)


@pytest.mark.turn(0, days=2)
@pytest.mark.slow
@pytest.mark.usefixtures("forked_evaluations")
def test_the_whole_of_it_on_toy_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[..., tuple[int, str]]
) -> None:
    """Two runs and three evaluations, then the same command again, which finds everything done.

    Each row has a number of steps of its own and each column a number of problems: exchanged ones would show.
    """
    paper = PAPERS["luspo-vl"]
    monkeypatch.setitem(
        PAPERS, "luspo-vl", replace(paper, runs=[run for run in paper.runs if run.rule in ("GSPO", "LUSPO")])
    )
    words = ["paper", "luspo-vl", "--tiny", "--configs", CONFIGS, "--out", tmp_path / "tiny"]
    stages = ["--prepare", "--train", "--eval", "--table"]
    code, text = said(*words, *stages)
    assert code == 0 and "2 runs, 2 to do" in text, text[-3000:]
    table = json.loads((tmp_path / "tiny" / "table.json").read_text())
    assert [row["rule"] for row in table["rows"]] == [BASE, "GSPO", "LUSPO"]
    assert "say nothing about the paper" in table["note"]
    for row, step in zip(table["rows"], (0, 2, 3), strict=True):
        assert [cell["ours"]["n"] for cell in row["cells"]] == [5, 6, 7, 8, 9, 10]
        assert {cell["ours"]["step"] for cell in row["cells"]} == {step}
        assert all(cell["ours"]["mean_length"] <= 14 for cell in row["cells"])
    algorithms = [
        RunDirectory(tmp_path / "tiny" / f"qwen2.5_vl_7b_{rule}").config().algorithm.name
        for rule in ("gspo", "luspo")
    ]
    assert algorithms == ["gspo", "luspo"]
    code, again = said(*words, *stages)
    assert code == 0 and "2 runs, 0 to do" in again and "vlm-rl eval --model" not in again
    assert json.loads((tmp_path / "tiny" / "table.json").read_text()) == table
    code, plan = said(*words)
    assert code == 0 and "[to do]" not in plan and plan.count("[done]") == 2 + 3 + 1


@pytest.mark.turn(1, days=2)
@pytest.mark.slow
@pytest.mark.usefixtures("forked_evaluations")
def test_a_row_of_another_paper_on_toy_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[..., tuple[int, str]]
) -> None:
    """One run of four nodes on divided engines and its model before training; programs have a rule of their own."""
    name, title = "luspo-text", "Qwen3-30B-A3B-Instruct-2507 LUSPO"
    paper = PAPERS[name]
    (run,) = (run for run in paper.runs if run.title == title)
    monkeypatch.setitem(PAPERS, name, replace(paper, runs=[run]))
    out = tmp_path / "tiny"
    words = ["paper", name, "--tiny", "--configs", CONFIGS, "--out", out]
    code, text = said(*words, "--prepare", "--train", "--eval", "--table")
    assert code == 0, text[-3000:]
    table = json.loads((out / "table.json").read_text())
    assert [(row["model"], row["rule"]) for row in table["rows"]] == [(run.model, BASE), (run.model, run.rule)]
    for row in table["rows"]:
        assert [cell["ours"]["n"] for cell in row["cells"]] == [5, 6, 7, 8]
        assert {cell["ours"]["step"] for cell in row["cells"]} == {0 if row["rule"] == BASE else 2}
    shipped = load_config(CONFIGS / run.config, run.changes)
    folder = out / Path(shipped.out).name
    trained = RunDirectory(folder).config()
    assert trained.algorithm == shipped.algorithm and trained.reward.format == shipped.reward.format
    programs = [result.summary for result in RunDirectory(out / f"{folder.name}-eval").evals("livecodebench")]
    assert len(programs) == any(column.benchmark == "livecodebench" for column in paper.columns)
    for summary in programs:
        assert (summary["mode"], summary["rule"], summary["k"]) == ("official", "official", 10)
        assert {"pass@1", "pass@10"} <= summary["scores"].keys()


def test_the_programs_of_a_tiny_set_are_judged_by_their_tests(tmp_path: Path) -> None:
    """The first program prints the sum, the second the largest number: right in both tests of one problem each."""
    make_tiny_sets(tmp_path, ["livecodebench"])
    problems = load_set(tmp_path / "livecodebench")
    for program, right in (("sum", "tiny-0"), ("max", "tiny-1")):
        response = f"```python\nprint({program}(map(int, input().split())))\n```"
        answered = [(problem, Response(problem.id, response)) for problem in problems]
        with Grader() as grader:
            judged = judge(
                BENCHMARKS["livecodebench"], answered, mode="official", grader=grader, template=TEMPLATES["plain"]
            )
        assert [item.problem.id for item in judged if item.correct] == [f"livecodebench-{right}"]
