"""Studies: pairing, mistakes in the file, arithmetic over seeds, the page, and running them."""

from __future__ import annotations

import csv
import errno
import html
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.helpers.browser import cut_on_a_phone, open_page
from tests.helpers.example_study import lively, lively_evals, study_tree, write_run, write_study
from tests.helpers.pages import Page
from tests.helpers.toy_runs import Toys, assert_sound, clean_environment
from vlm_rl.cli import main
from vlm_rl.config import load_config, parse_config
from vlm_rl.demo.numbers.library import find_runs
from vlm_rl.errors import EXIT_STOPPED, UserError
from vlm_rl.report.charts.frame import PALETTE
from vlm_rl.run.directory import RunDirectory
from vlm_rl.session import run as session_run
from vlm_rl.stats import smooth
from vlm_rl.study import run as command
from vlm_rl.study.findings import findings
from vlm_rl.study.launch import Launch
from vlm_rl.study.results import (
    RunNumbers,
    SeedBand,
    StepCurve,
    StudyResults,
    collect,
    difference,
    final_estimate,
    final_values,
    is_share,
    seed_band,
    stretch_mean,
    thinned,
)
from vlm_rl.study.runs import Study, load_study

ROOT = Path(__file__).resolve().parents[2]


def load(folder: Path, **changes) -> Study:
    return load_study(write_study(folder / "study.yaml", study_tree(**changes)))


# -- the plan --------------------------------------------------------------------------------------


def test_every_rule_gets_the_same_seeds_and_starts(tmp_path):
    runs = load(tmp_path, seeds=[7, 3, 5]).runs(Path("out"))
    rules = ("grpo", "luspo+hadw", "grpo-token")  # the baseline first
    assert [(one.rule, one.seed, one.start) for one in runs] == [
        (rule, seed, start) for seed, start in ((7, "a"), (3, "b"), (5, "a")) for rule in rules
    ]
    for one in runs:
        assert one.config.seed == one.seed
        assert one.config.model.path == {"a": "models/warm-0", "b": "models/warm-1"}[one.start]
        assert one.out == Path(f"out/{one.rule}/seed-{one.seed}") and one.config.out == str(one.out)
        assert one.log == Path(f"out/{one.rule}/seed-{one.seed}.log")


def test_runs_of_a_seed_differ_in_the_rule_alone(tmp_path):
    grpo, luspo, token = load(tmp_path).runs(tmp_path)[:3]
    same = {"algorithm", "out"}
    assert grpo.config.model_dump(exclude=same) == luspo.config.model_dump(exclude=same)
    assert (luspo.config.algorithm.name, luspo.config.algorithm.hadw.enabled) == ("luspo", True)
    # a mapping changes the keys that it names, as dotted keys do
    assert (token.config.algorithm.name, token.config.algorithm.aggregation) == ("grpo", "token")
    assert not grpo.config.algorithm.hadw.enabled and grpo.config.algorithm.aggregation is None


def test_overrides_change_keys_of_the_file(tmp_path):
    path = write_study(tmp_path / "s.yaml", study_tree())
    overrides = ["base.train.steps=7", "seeds=[4]", "rules.grpo.algorithm.clip_high=0.28"]
    grpo, luspo, _ = load_study(path, overrides).runs(tmp_path)
    assert (grpo.seed, grpo.config.train.steps, luspo.config.train.steps) == (4, 7, 7)
    assert (grpo.config.algorithm.clip_high, luspo.config.algorithm.clip_high) == (0.28, None)
    with pytest.raises(UserError, match="seeds: 4 is there twice"):
        load_study(path, ["seeds=[4,4]"])
    for wrong in ("base.data=[x]", "rules=[a]", "seeds.0=3"):
        with pytest.raises(UserError, match=re.escape(f"override {wrong!r}: a list cannot replace a section")):
            load_study(path, [wrong])


def test_a_rule_keeps_the_sections_that_the_base_began(tmp_path):
    tree = study_tree(rules={"grpo": {}, "hot": {"rollout": {"temperature": 1.2}}})
    tree["base"]["model"] = {"path": "replaced", "freeze": ["tower"]}
    grpo, hot = load_study(write_study(tmp_path / "s.yaml", tree)).runs(tmp_path)[:2]
    assert (hot.config.rollout.temperature, hot.config.rollout.max_tokens) == (1.2, 64)
    assert grpo.config.rollout.temperature == 1.0  # one rule's change does not leak into another
    assert grpo.config.model.freeze == ["tower"] and grpo.config.model.path == "models/warm-0"


def test_an_empty_section_in_a_rule_changes_nothing_but_a_section_that_is_off(tmp_path):
    rules = {"grpo": {}, "same": {"rollout": {}, "algorithm.hadw": {}}, "lora": {"model.lora": {}}}
    grpo, same, lora = load(tmp_path, rules=rules, seeds=[0]).runs(tmp_path)
    assert same.config.model_dump(exclude={"out"}) == grpo.config.model_dump(exclude={"out"})
    assert grpo.config.model.lora is None and lora.config.model.lora is not None


def test_rules_with_limits_of_their_own_are_measured_with_one(tmp_path):
    """Held-out responses have rollout.max_tokens where the base gives no limit, which is among the mistakes below."""
    tree = study_tree(rules={"grpo": {}, "short": {"rollout": {"max_tokens": 32}}}, seeds=[0])
    tree["base"]["eval"]["max_tokens"] = 48
    study = load_study(write_study(tmp_path / "s.yaml", tree))
    assert [run.config.rollout.max_tokens for run in study.runs(tmp_path)] == [64, 32]
    tree["base"]["eval"] = {"every": 0}  # nothing is measured
    load_study(write_study(tmp_path / "s.yaml", tree))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"baselin": "grpo"}, ["unknown key baselin", "did you mean 'baseline'"]),
        ({"baseline": "gspo"}, ["baseline is 'gspo'", "grpo, grpo-token"]),
        ({"seeds": []}, ["seeds is []"]),
        ({"seeds": [1, 2, 1]}, ["seeds", "1 is there twice"]),
        ({"seeds": ["1"]}, ["seeds.0 is '1'"]),
        ({"starts": {}}, ["starts is {}"]),
        ({"starts": {"a b": "m"}}, ["starts", "'a b'", "letters"]),
        ({"rules": {"../up": {}, "grpo": {}}}, ["rules", "'../up'"]),
        ({"rules": {"grpo": None}}, ["rules.grpo is None"]),
        ({"rules": {"grpo": {"algorithm.nme": "ba"}}}, ["rules.grpo", "unknown key algorithm.nme", "'name'"]),
        ({"rules": {"grpo": {"algorithm.name": "grp"}}}, ["rules.grpo", "algorithm.name is 'grp'", "'grpo'"]),
        ({"rules": {"grpo": {"train.lr": "fast"}}}, ["rules.grpo", "train.lr is 'fast'"]),
        ({"rules": {"grpo": {"seed": 3}}}, ["rules.grpo", "seed is 3", "share"]),
        ({"rules": {"grpo": {"train": {"steps": 9}}}}, ["rules.grpo", "train.steps is 9", "share"]),
        ({"rules": {"grpo": {"rollout.prompts_per_step": 9}}}, ["rules.grpo", "prompts_per_step is 9", "share"]),
        ({"rules": {"grpo": {"data.train": ["x"]}}}, ["rules.grpo", "data.train", "share"]),
        ({"rules": {"grpo": {"data": {}}}}, ["rules.grpo", "data is {}", "share"]),
        (
            {"rules": {"grpo": {"rollout": {"max_tokens": 32}}}},
            ["rules.grpo", "rollout.max_tokens is 32", "base.eval.max_tokens"],
        ),
        ({"rules": {"grpo": {"train.lr.x": 1}}}, ["rules.grpo"]),
        ({"rules": {"grpo": {"train.lr": "${oc.env:HOME}"}}}, ["interpolation"]),
        ({"base": {"seed": 1}}, ["base", "seed is 1", "seeds"]),
        ({"base": {"out": "x"}}, ["base", "out is 'x'", "--out"]),
        ({"base": {"data": {"train": ["x"]}, "model": "m"}}, ["cannot set model.path", "'m'"]),
        ({"base": {}}, ["rules.grpo", "data is missing"]),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path, changes, said):
    with pytest.raises(UserError) as caught:
        load(tmp_path, **{"rules": {"grpo": {}, "grpo-token": {}}} | changes)
    for part in [str(tmp_path / "study.yaml"), *said]:
        assert part in str(caught.value)


def test_a_study_that_is_not_there_is_named(tmp_path, capsys):
    assert main(["study", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err


def test_the_documented_study_is_valid(tmp_path):
    text = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")
    block = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[0]
    (tmp_path / "study.yaml").write_text(block)
    study = load_study(tmp_path / "study.yaml")
    assert len(study.runs(tmp_path)) == 15 and study.base["train"]["lr"] == 1e-4


# -- arithmetic over seeds -------------------------------------------------------------------------


def numbers(rule: str, seed: int, finals=None, *, sections=None, **curves) -> RunNumbers:
    """A run of as many steps as its curves have; `sections` are those of its configuration."""
    tree = {"out": f"{rule}/{seed}", "seed": seed, "model": {"path": f"m-{seed % 2}"}, "data": {"train": ["x"]}}
    config = parse_config({**tree, "algorithm": {"name": "grpo"}, **(sections or {})})
    made = {}
    for name, values in curves.items():
        y = np.array(values, dtype=float)
        made[name.replace("__", "/")] = StepCurve(np.arange(1.0, len(y) + 1), y)
    return RunNumbers(rule, seed, "a", config, made, finals or {})


def study_of(*runs: RunNumbers, num_steps: int = 10) -> StudyResults:
    rules = tuple(dict.fromkeys(run.rule for run in runs))
    return StudyResults(rules, tuple(dict.fromkeys(run.seed for run in runs)), num_steps, runs, ())


def test_paired_differences_by_hand():
    base = {0: 0.5, 1: 0.2, 2: 0.7, 3: 0.4}
    ours = {0: 0.6, 1: 0.4, 2: 1.0}  # differences .1, .2, .3: mean .2, std .1
    runs = [numbers("grpo", seed, {"train_accuracy": v}) for seed, v in base.items()]
    runs += [numbers("ba", seed, {"train_accuracy": v}) for seed, v in reversed(ours.items())]
    comparison = study_of(*runs)
    found = difference(comparison, "ba", "grpo", "train_accuracy")
    error = 0.1 / math.sqrt(3)
    assert found.num == 3 and found.mean == pytest.approx(0.2) and found.std == pytest.approx(0.1)
    assert found.low == pytest.approx(0.2 - 4.3027 * error, abs=1e-5)
    assert found.detectable == pytest.approx((4.3027 + 1.0607) * error, abs=1e-5)
    # unpaired, seed 3 counts for the baseline: (.5 + .2 + .7 + .4) / 4
    assert final_estimate(comparison, "grpo", "train_accuracy").mean == pytest.approx(0.45)
    assert final_values(comparison, "ba", "train_accuracy") == ours
    assert difference(comparison, "ba", "grpo", "train_length").num == 0


def test_a_band_is_over_the_seeds():
    runs = [numbers("a", 0, reward=[1, 2, math.nan]), numbers("a", 1, reward=[3, math.nan, math.nan, 8])]
    found = seed_band([run.curves["reward"] for run in runs])
    assert found is not None
    np.testing.assert_array_equal(found.steps, [1, 2, 4])  # no run has step 3
    np.testing.assert_array_equal(found.mean, [2, 2, 8])
    np.testing.assert_array_equal(found.low, [1, 2, 8])
    np.testing.assert_array_equal(found.high, [3, 2, 8])
    assert seed_band([]) is None


def test_many_steps_are_thinned_to_their_neighbours_mean():
    steps = np.arange(1.0, 101.0)
    band = SeedBand(steps, 2 * steps, 2 * steps - 1, 2 * steps + 3)
    few = thinned(band, 25)  # four steps each: 1 to 4 are the first
    np.testing.assert_array_equal(few.steps[:2], [2.5, 6.5])
    np.testing.assert_array_equal(few.mean, 2 * few.steps)
    assert (len(few.steps), few.low[0], few.high[0], few.high[-1]) == (25, 2 * 1 - 1, 2 * 4 + 3, 2 * 100 + 3)
    assert thinned(band, 100) is band


def test_the_ends_of_a_run():
    curve = StepCurve(np.arange(1.0, 31.0), np.arange(1.0, 31.0))
    assert stretch_mean(curve, 30, early=True) == 2.0  # steps 1, 2, 3
    assert stretch_mean(curve, 30, early=False) == 29.0  # 28, 29, 30
    assert stretch_mean(curve, 5, early=True) == 1.0
    assert math.isnan(stretch_mean(StepCurve(np.array([9.0]), np.array([1.0])), 100, early=False))


# -- the words -------------------------------------------------------------------------------------


TOKEN = {"algorithm": {"name": "grpo", "aggregation": "token"}}


def length_runs(gaps: dict[int, tuple[float, float]], token=(0.5,), sequence=(0.5,), sections=TOKEN) -> StudyResults:
    """Two rules; per seed the gap at the first and at the last step, and the final accuracies."""
    runs = []
    for place, (seed, ends) in enumerate(gaps.items()):
        for rule, values, own in (("grpo", sequence, None), ("grpo-token", token, sections)):
            finals = {"heldout_accuracy/toy": values[place % len(values)]}
            curves = {"length__group_cv": [0.2, 0.2 + 0.1 * seed], "length__sign_gap": ends}
            runs.append(numbers(rule, seed, finals, sections=own, **curves))
    return study_of(*runs, num_steps=2)


def test_words_say_what_the_intervals_carry():
    comparison = length_runs(
        {1: (2, -10), 2: (2, -12), 3: (2, -11)}, token=(0.6, 0.7, 0.65), sequence=(0.4, 0.5, 0.46)
    )
    variation, gap, account, outcome = findings(comparison)
    # .3, .4, .5 at the end: mean .4; the change .1, .2, .3 has the interval .2 +- 4.30 x .1 / sqrt(3)
    assert "0.200 over the first" in variation and "0.400 over the last (mean of 6 runs)" in variation
    assert "-0.048 to +0.448" in variation and "is not settled" in variation
    assert "2.0 tokens longer" in gap and "11.0 tokens shorter" in gap and "a change of -13.0 tokens" in gap
    assert "the negative responses" in account
    assert "+19.7 points" in outcome and "excludes 0" in outcome and "more than the aggregation" not in outcome


def test_words_claim_nothing_that_is_not_settled():
    unsettled = findings(
        length_runs({1: (2, -10), 2: (2, 12), 3: (2, 3)}, token=(0.6, 0.3, 0.6), sequence=(0.4, 0.5, 0.5))
    )
    assert "not settled" in unsettled[1] and "which sign that is at the end is not settled" in unsettled[2]
    assert "do not tell them apart" in unsettled[3] and "would detect" in unsettled[3]
    single = findings(length_runs({1: (2, -10)}))
    assert all("no interval" in single[k] for k in (0, 1, 3)) and "one seed does not settle" in single[2]
    assert not any("change of" in sentence for sentence in single)


@pytest.mark.parametrize(
    ("sections", "is_more"),
    [
        (TOKEN, False),
        ({"algorithm": {"name": "grpo", "aggregation": "group_token"}}, False),
        ({"algorithm": {"name": "rloo"}}, True),  # token aggregation with other advantages
        ({**TOKEN, "train": {"lr": 1e-3}}, True),
        ({**TOKEN, "rollout": {"responses_per_prompt": 16}}, True),
        ({"algorithm": {**TOKEN["algorithm"], "kl_coef": 0.1}}, True),
        ({"algorithm": {**TOKEN["algorithm"], "hadw": {"enabled": True}}}, True),
    ],
)
def test_words_say_whether_only_the_aggregation_differs(sections, is_more):
    outcome = findings(length_runs({1: (2, -10), 2: (2, -12)}, sections=sections))[-1]
    aggregation = sections["algorithm"].get("aggregation", "token")
    assert f"of grpo-token ({aggregation}) minus grpo (sequence)" in outcome
    assert ("more than the aggregation" in outcome) is is_more


def test_a_measure_is_what_stands_before_its_sets_name():
    """Sets in folders called accuracy-toy and length-toy."""
    finals = {f"heldout_{kind}/{name}-toy": 3.0 for name in ("accuracy", "length") for kind in ("length", "accuracy")}
    comparison = study_of(numbers("grpo", 0, finals), numbers("grpo", 1, finals))
    assert [measure.split("/")[0] for measure in comparison.measures] == ["heldout_accuracy"] * 2 + [
        "heldout_length"
    ] * 2
    assert [is_share(measure) for measure in comparison.measures] == [True, True, False, False]
    assert final_estimate(comparison, "grpo", "heldout_length/accuracy-toy").high == 3.0


def test_words_about_what_is_not_there():
    only = study_of(
        numbers("grpo", 0, {"train_accuracy": 1.0}, length__group_cv=[1], length__sign_gap=[1]), num_steps=1
    )
    assert "has no rule of both kinds" in findings(only)[-1]
    assert "have not logged" in findings(study_of(numbers("grpo", 0)))[0]
    assert "have not logged" in findings(StudyResults(("grpo",), (0,), 10, (), ()))[0]


# -- reading runs ----------------------------------------------------------------------------------


def test_numbers_of_a_run_by_hand(tmp_path):
    tree = study_tree(seeds=[0], rules={"grpo": {"reward.accuracy": 2.0}})
    study = load_study(write_study(tmp_path / "s.yaml", tree))
    (entry,) = study.runs(tmp_path / "out")

    def metrics(_, step):
        masses = {f"gradient_mass/positive/decile_{d}": d / 100 for d in range(1, 11)}
        part = {"rewards/accuracy/mean": step / 10, "completions/mean_length": float(step), "length/wrong_mean": 5.0}
        return {**masses, **part, "grad_norm": 30.0 if step in (9, 12) else 1.0, "loss": 0.1}  # 20 losses: too few

    write_run(entry, metrics, evals={0: ([False], [9]), 20: ([True, False, True, True], [4, 6, 8, 2])})
    comparison = collect(study, [entry])
    (run,) = comparison.runs
    assert run.stability == {"drop/toy-test": 0, "norm_spikes": 2}  # of two evaluations no deviation
    assert run.finals == {  # 20 steps: the last two; an accuracy part of 2 per right answer
        "train_accuracy": pytest.approx((1.9 + 2.0) / 2 / 2),
        "train_length": 19.5,
        "train_length_change": 18.0,  # from steps 1 and 2, 1.5 tokens
        "heldout_accuracy/toy-test": 0.75,
        "heldout_length/toy-test": 5.0,
    }
    assert comparison.measures[0] == "heldout_accuracy/toy-test" and comparison.benchmarks == ["toy-test"]
    np.testing.assert_allclose(run.curves["gradient_mass/positive/longest"].values, 0.27)  # .08 + .09 + .10
    assert "gradient_mass/negative/longest" not in run.curves and "length/correct_mean" not in run.curves


def test_unfinished_runs_are_missing_and_not_counted(tmp_path):
    study = load(tmp_path, seeds=[0, 1])
    runs = study.runs(tmp_path / "out")
    write_run(runs[0], lively, evals=lively_evals(runs[0]))
    write_run(runs[1], lively, steps=13)
    write_run(runs[2], lively, evals={10: ([True], [3])})
    comparison = collect(study, runs)
    assert [(run.rule, run.seed) for run in comparison.runs] == [("grpo", 0)]
    reasons = [one.reason for one in comparison.missing]
    assert reasons[0] == "at step 13 of 20" and "not evaluated on toy-test" in reasons[1]
    assert reasons[2:] == ["not started"] * 3


# -- the page --------------------------------------------------------------------------------------

SECTIONS = [
    "Paired differences",
    "Final values",
    "Token or sequence aggregation",
    "Learning",
    "Length",
    "Updates",
    "Time",
    "Every metric",
    "Runs",
    "Configuration",
]


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    """The folder of a study whose runs are all there, but one, with its report."""
    folder = tmp_path_factory.mktemp("study")
    study = load(folder)
    for entry in study.runs(folder / "out")[:-1]:
        write_run(entry, lively, evals=lively_evals(entry))
    assert main(["compare", str(folder / "study.yaml"), "--out", str(folder / "out"), "--report-only"]) == 0
    return folder / "out"


@pytest.fixture(scope="module")
def page(done) -> Page:
    return Page(done / "comparison.html")


@pytest.fixture(scope="module")
def logged(done) -> set[str]:
    """The names of the metrics that every run logged."""
    return {*RunDirectory(done / "grpo" / "seed-0").metrics()[1]} - {"step", "attempt", "time"}


def test_the_page_holds_everything_and_asks_for_nothing(page, logged):
    for title in SECTIONS:
        assert f"<h2>{title}</h2>" in page.source
    assert len(page.charts) == 17 + 5 + len(logged) and "not logged" not in page.text
    assert 'http-equiv="Content-Security-Policy"' in page.source
    assert all(address.startswith("#") for address in page.addresses)
    assert page.tags.count("script") == len(page.charts) + 3 and "link" not in page.tags
    assert len(page.ids) == len(set(page.ids))


def test_the_differences_come_first_in_words(page):
    """A rule is named with its interval where that excludes 0, and the table says the same in bold."""
    first = page.source[: page.source.index("<h2>Final values")]
    assert "<h2>Paired differences" in first
    sentences = re.findall(r"<p>(Against grpo: .*?|No rule clearly differs from grpo\.)</p>", first)
    assert len(sentences) == first.count('class="card difference"')
    for sentence, table in zip(sentences, first.split('class="card difference"')[1:], strict=True):
        number = r'<td class="number"[^>]*>'
        bold = re.findall(rf"</i>([^<]+)</td>\s*{number}\d+</td>{number}<b>([^<]+)</b>", table)
        assert re.findall(r"(\S+) ([+-][\d.]+) (?:points|tokens)", sentence) == bold


def test_every_metric_has_a_chart_with_a_line_per_rule(done, page, logged):
    assert len(logged) > 20 and logged <= page.charts.keys()
    rows = page.charts["step_time"]["datasets"]["rows"]
    for rule in ("grpo", "luspo+hadw"):
        runs = [RunDirectory(done / rule / f"seed-{seed}").metrics() for seed in (0, 1, 2)]
        expected = np.mean([smooth(np.array([line["step_time"] for line in run])) for run in runs], axis=0)
        drawn = [row["y"] for row in rows if row["series"] == rule]
        np.testing.assert_allclose(drawn, expected, rtol=1e-5)


def test_the_page_says_how_to_open_its_runs_in_the_demo(tmp_path):
    study, out = load(tmp_path, seeds=[0]), tmp_path / "the study's runs"
    for entry in study.runs(out):
        write_run(entry, lively, evals=lively_evals(entry))
    assert main(["study", str(tmp_path / "study.yaml"), "--out", str(out), "--report-only"]) == 0
    said = html.unescape(re.findall(r"<code>(vlm-rl demo .*?)</code>", (out / "comparison.html").read_text())[0])
    program, name, *folders = shlex.split(said)
    assert (program, name) == ("vlm-rl", "demo")
    opened = [path for folder in folders for path in find_runs(Path(folder))]
    assert sorted(opened) == sorted(entry.out for entry in study.runs(out))


def test_rules_may_draw_different_numbers_of_responses(tmp_path, page):
    assert "Steps do not cost the same" not in page.text
    tree = {"seeds": [0], "rules": {"grpo": {}, "wide": {"rollout.responses_per_prompt": 16}}}
    study = load(tmp_path, **tree)
    assert study.responses_per_prompt == {"grpo": 8, "wide": 16}
    for entry in study.runs(tmp_path / "out"):
        write_run(entry, lively, evals=lively_evals(entry))
    assert main(["study", str(tmp_path / "study.yaml"), "--out", str(tmp_path / "out"), "--report-only"]) == 0
    assert "different numbers of responses (grpo 8, wide 16)" in Page(tmp_path / "out" / "comparison.html").text


@pytest.mark.slow
def test_on_a_phone_nothing_is_cut_and_no_labels_collide(done):
    with open_page((done / "comparison.html").as_uri(), width=390, height=844) as visit:
        visit.page.wait_for_selector("#time .chart svg")
        assert cut_on_a_phone(visit.page) == []


@pytest.mark.slow
def test_the_titles_of_final_values_wrap_before_the_table_is_cut(done):
    with open_page((done / "comparison.html").as_uri(), width=1060) as visit:
        table = visit.page.locator("#final-values .scroll").first
        assert table.evaluate("(box) => box.scrollWidth - box.clientWidth") <= 1


def test_the_page_names_what_is_missing(page):
    assert "1 run is missing and counts nowhere below" in page.text
    assert "8 of 9 runs are finished" in page.text and page.text.count("not started") == 1


def test_each_rule_has_its_colour(page, logged):
    for place, rule in enumerate(("grpo", "luspo+hadw", "grpo-token")):
        swatch = f'<i class="swatch" style="color:var(--c{place})"></i>'
        assert f"<span>{swatch}{rule}<" in page.source and f'<td class="rule">{swatch}{rule}' in page.source
    curves = [chart for chart in page.charts.values() if "color" in chart["encoding"]]
    assert len(curves) == 17 + len(logged)
    for chart in curves:
        assert chart["encoding"]["color"]["scale"] == {
            "domain": ["grpo", "luspo+hadw", "grpo-token"],
            "range": ["var(--c0)", "var(--c1)", "var(--c2)"],
        }


def test_the_tables_tell_the_numbers(done, page):
    tree = json.loads((done / "comparison.json").read_text())
    final = tree["final"]["heldout_accuracy/toy-test"]["luspo+hadw"]
    runs = [run["final"]["heldout_accuracy/toy-test"] for run in tree["runs"] if run["rule"] == "luspo+hadw"]
    assert final["num_seeds"] == 3 and final["mean"] == pytest.approx(np.mean(runs))
    assert f"{100 * final['mean']:.1f} ({100 * final['low']:.1f} to {100 * final['high']:.1f})" in page.text
    apart = tree["difference_to_baseline"]["train_length"]["grpo-token"]
    assert apart["num_seeds"] == 2  # the run of its third seed is missing
    assert f"{apart['mean']:+.1f}" in page.text and f"{apart['low']:+.1f} to {apart['high']:+.1f}" in page.text
    assert f"{apart['detectable']:.1f}" in page.text
    assert all(sentence in page.text for sentence in tree["words"]) and len(tree["words"]) == 4
    (steady,) = re.findall(r'<section id="stability">.*?</section>', page.source, re.S)
    for measure, scale in (("drop/toy-test", 100), ("between_std/toy-test", 100), ("norm_spikes", 1)):
        known = tree["stability"][measure]["grpo"]
        assert known["mean"] == pytest.approx(
            np.mean([run["stability"][measure] for run in tree["runs"] if run["rule"] == "grpo"])
        )
        assert f"{scale * known['mean']:.1f} ({scale * known['low']:.1f} to {scale * known['high']:.1f})" in steady
    for run in tree["runs"]:  # the change recorded is that of the ends recorded
        first, last = run["first_and_last"]["completions/mean_length"]
        assert last - first == pytest.approx(run["final"]["train_length_change"], abs=0.02)
        assert run["first_and_last"]["heldout_accuracy/toy-test"][1] == pytest.approx(
            run["final"]["heldout_accuracy/toy-test"], rel=1e-3
        )


def test_the_published_numbers_hold_no_path(done):
    for name in ("comparison.json", "curves.csv"):
        text = (done / name).read_text()
        assert str(done) not in text and "models/" not in text and "data/toy" not in text
    with (done / "curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    chosen = [r for r in rows if (r["rule"], r["seed"], r["metric"]) == ("luspo+hadw", "1", "reward")]
    run = RunDirectory(done / "luspo+hadw" / "seed-1").metrics()
    assert [int(r["step"]) for r in chosen] == list(range(1, 21))
    np.testing.assert_allclose([float(r["value"]) for r in chosen], [m["reward"] for m in run], rtol=1e-5)


def test_an_empty_study_and_one_seed_are_said_in_words(tmp_path):
    tree = study_tree(seeds=[4], rules={"grpo": {}, "b+a.x": {"algorithm.name": "ba"}})
    tree["base"]["data"]["train"] = ["<script>x</script>"]
    path, out = write_study(tmp_path / "s.yaml", tree), tmp_path / "out"
    assert command.run_study(path, out, report_only=True) == 0
    empty = Page(out / "comparison.html")
    assert "No run is finished yet" in empty.text and empty.charts == {}
    assert "<script>x</script>" in empty.text
    for entry in load_study(path).runs(out):
        write_run(entry, lively, evals=lively_evals(entry))
    assert command.run_study(path, out, report_only=True) == 0
    page = Page(out / "comparison.html")
    assert "One seed has no interval" in page.text and "needs 2 seeds" in page.text and "nan" not in page.text
    assert "nothing is settled: b+a.x." in page.text and "clearly differs" not in page.text
    assert not re.search(r"\d runs? (is|are) missing", page.text)


def test_names_are_escaped_on_the_page(tmp_path):
    """Names are checked in the file; a benchmark's name and a start's folder come from elsewhere."""
    tree = study_tree(starts={"a": "<b>models</b>"}, seeds=[0])
    study = load_study(write_study(tmp_path / "s.yaml", tree))
    for entry in study.runs(tmp_path / "out"):
        run = write_run(entry, lively, evals=lively_evals(entry))
        run.stamp_contaminated(["<b>Bench</b>"])
    command.run_study(tmp_path / "s.yaml", tmp_path / "out", report_only=True)
    page = Page(tmp_path / "out" / "comparison.html")
    assert "CONTAMINATED" in page.text and "<b>Bench</b>" in page.text and "<b>models</b>" in page.text
    assert page.source.count("<b>") == page.source.count("<b>CONTAMINATED") + len(re.findall(r"<b>[+-]", page.source))


def test_many_rules_look_different_and_every_colour_has_two_themes(tmp_path):
    tree = study_tree(seeds=[0], rules={"grpo": {}} | {f"r{k}": {"train.lr": 1e-6 * (k + 1)} for k in range(11)})
    study = load_study(write_study(tmp_path / "s.yaml", tree))
    for entry in study.runs(tmp_path / "out"):
        write_run(entry, lively, evals=lively_evals(entry))
    command.run_study(tmp_path / "s.yaml", tmp_path / "out", report_only=True)
    key = re.findall(r'<div class="key">(.*?)</div>', (tmp_path / "out" / "comparison.html").read_text())[0]
    looks = re.findall(r'class="([^"]*)" style="color:var\((--c\d)\)"', key)
    assert len(looks) == len(set(looks)) == 12 and len({color for _, color in looks}) == len(PALETTE) == 10
    css = (ROOT / "vlm_rl" / "assets" / "cards.css").read_text()
    assert all(len(set(re.findall(rf"{color}: (#\w+);", css))) == 2 for _, color in looks)


# -- starting and resuming -------------------------------------------------------------------------


def test_another_study_in_the_folder_is_refused(tmp_path):
    study = load(tmp_path)
    entry = study.runs(tmp_path / "out")[0]
    write_run(entry, lively, evals=lively_evals(entry))
    tree = study_tree()
    tree["base"]["train"]["lr"] = 3e-5
    with pytest.raises(UserError, match=r"grpo/seed-0 holds a run with a different train\.lr"):
        command.run_study(write_study(tmp_path / "s.yaml", tree), tmp_path / "out", report_only=True)
    tree = study_tree()
    tree["base"]["train"]["steps"] = 30  # training for longer does not make it a different run
    assert command.run_study(write_study(tmp_path / "s.yaml", tree), tmp_path / "out", report_only=True) == 0
    (entry.out / "checkpoints" / "step-000040").mkdir(parents=True)
    (entry.out / "checkpoints" / "step-000040" / "MANIFEST.json").touch()
    with pytest.raises(UserError, match="trained 40 steps"):
        command.run_study(tmp_path / "s.yaml", tmp_path / "out", report_only=True)


@pytest.mark.parametrize("name", ["samples", "temperature", "top_p", "max_tokens"])
def test_runs_that_were_measured_otherwise_are_refused(tmp_path, name):
    tree, out = study_tree(seeds=[0]), tmp_path / "out"
    tree["base"]["eval"] |= {"temperature": 0.6, "samples": 2}
    first, second, _ = load_study(write_study(tmp_path / "s.yaml", tree)).runs(out)
    write_run(first, lively, evals=lively_evals(first))
    tree["base"]["eval"] |= {"every": 5, "max_tokens": 64}  # the limit that it was: rollout.max_tokens
    assert command.run_study(write_study(tmp_path / "s.yaml", tree), out, report_only=True) == 0
    tree["base"]["eval"][name] = {"samples": 4, "temperature": 1.0, "top_p": 0.9, "max_tokens": 32}[name]
    with pytest.raises(UserError, match=rf"grpo/seed-0 holds a run with a different eval\.{name} than"):
        command.run_study(write_study(tmp_path / "s.yaml", tree), out, report_only=True)
    shutil.rmtree(first.out)
    write_run(second, lively, steps=3)  # not measured yet
    assert command.run_study(tmp_path / "s.yaml", out, report_only=True) == 0


def test_mistakes_are_found_before_anything_starts(tmp_path):
    path, out = write_study(tmp_path / "s.yaml", study_tree()), tmp_path / "out"
    with pytest.raises(UserError, match=r"starts\.a.*models/warm-0"):
        command.run_study(path, out)
    assert not list(out.glob("*/*"))


def test_a_run_without_its_checkpoint_is_not_finished(tmp_path):
    entry = load(tmp_path).runs(tmp_path / "out")[0]
    write_run(entry, lively, evals=lively_evals(entry))
    assert not command.is_finished(entry)


def test_one_comparison_at_a_time(tmp_path):
    with command._exclusive(tmp_path / "out") as lock:
        child = subprocess.Popen(["sleep", "30"], pass_fds=(lock,))
        with pytest.raises(UserError, match="another study command"), command._exclusive(tmp_path / "out"):
            pass
    with pytest.raises(UserError, match="left behind"), command._exclusive(tmp_path / "out"):
        pass  # a run that outlived its comparison holds it too
    child.kill()
    child.wait()
    with command._exclusive(tmp_path / "out"):
        pass


def test_a_folder_without_locks_is_worked_in(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(command.fcntl, "flock", flock)
    with command._exclusive(tmp_path / "out") as lock:
        os.fstat(lock)


def test_an_error_of_the_work_is_not_taken_for_that_of_the_lock(tmp_path):
    with pytest.raises(BlockingIOError), command._exclusive(tmp_path / "out"):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def test_stopping_has_the_trainer_s_exit_code():
    assert command.StoppedError is session_run.StoppedError


def test_the_tail_of_a_log(tmp_path):
    (tmp_path / "log").write_bytes(b"x" * 40_000 + b"\nfirst\n\n" + b"".join(b"line %d\n" % k for k in range(15)))
    assert command.log_tail(tmp_path / "log") == [f"line {k}" for k in range(15)]


def sleeper(entry, shell: str = "echo ready; sleep 60") -> command.RunProcess:
    """A process in the place of a run, begun and waiting."""
    arguments = ["sh", "-c", shell]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    return command.RunProcess(entry, process, time.monotonic())


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_ends_the_runs_and_starts_none(tmp_path, capsys, number, error):
    runs = load(tmp_path).runs(tmp_path / "out")
    with command._exclusive(tmp_path / "out") as lock:
        runner = command.StudyRunner(runs[1:], num_done=0, launch=Launch(), lock=lock)
        runner.working = [sleeper(runs[0])]
        job = runner.working[0]
        before = signal.getsignal(number)

        def send():
            while signal.getsignal(number) is before:  # until the runner listens
                time.sleep(0.01)
            os.kill(os.getpid(), number)

        threading.Thread(target=send).start()
        with pytest.raises(error):
            runner.work()
    assert job.process.returncode == -signal.SIGTERM
    assert len(runner.waiting) == len(runs) - 1 and runner.failed == []
    assert "grpo seed 0: stopped" in capsys.readouterr().out
    assert signal.getsignal(number) is before


def test_the_second_signal_kills(tmp_path):
    runs = load(tmp_path).runs(tmp_path / "out")
    runner = command.StudyRunner([], num_done=0, launch=Launch(), lock=-1)
    runner.working = [sleeper(runs[0], "trap '' TERM; echo ready; while true; do sleep 0.1; done")]
    process = runner.working[0].process
    runner.signals = [signal.SIGTERM]
    runner._pass_on_signals()
    time.sleep(0.3)
    assert process.poll() is None
    runner.signals = [signal.SIGTERM, signal.SIGTERM]
    runner._pass_on_signals()
    assert process.wait(timeout=30) == -signal.SIGKILL


def test_a_run_is_a_process_that_holds_the_lock(tmp_path):
    entry = load(tmp_path).runs(tmp_path / "out")[1]
    with command._exclusive(tmp_path / "out") as lock:
        runner = command.StudyRunner([entry], num_done=0, launch=Launch(), lock=lock)
        runner._start(entry)
    process = runner.working[0].process
    try:
        with pytest.raises(UserError, match="left behind"), command._exclusive(tmp_path / "out"):
            pass
    finally:
        process.kill()
        process.wait()
    assert process.args[1:] == ["-m", "vlm_rl", "train", str(entry.config_file)]
    assert load_config(entry.config_file) == entry.config and entry.log.is_file()


def test_each_machine_has_one_run_at_a_time(tmp_path):
    """Three runs on two machines, by a shell that writes down where it was: no machine is left out."""
    runs = load(tmp_path).runs(tmp_path / "out")[:3]
    launch = Launch(jobs=2, template="sh -c 'echo on {machine}: {command}; sleep 0.3'", machines=("one", "two"))
    with command._exclusive(tmp_path / "out") as lock:
        runner = command.StudyRunner(runs, num_done=0, launch=launch, lock=lock)
        runner.work()
    assert runner.failed == [] and runner.num_done == 3
    said = [run.log.read_text() for run in runs]
    assert all(f"-m vlm_rl train {run.config_file}" in text for run, text in zip(runs, said, strict=True))
    assert [text.split(":")[0] for text in said[:2]] == ["on one", "on two"]


def test_a_launcher_that_is_not_there_is_named(tmp_path):
    runs = load(tmp_path).runs(tmp_path / "out")[:1]
    runner = command.StudyRunner(runs, num_done=0, launch=Launch(template="no-such-srun {command}"), lock=-1)
    with pytest.raises(UserError, match="no command no-such-srun"):
        runner.work()


def test_a_moved_study_is_not_gone_on_with(tmp_path):
    study = load(tmp_path)
    write_run(study.runs(tmp_path / "old")[0], lively, steps=3)
    (tmp_path / "old").rename(tmp_path / "new")
    moved = study.runs(tmp_path / "new")[0]
    with pytest.raises(UserError, match="cannot resume from a different place"):
        command._resumable(moved)


def test_a_run_goes_on_under_the_spelling_that_it_began_with(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study = load(tmp_path)
    write_run(study.runs(Path("out"))[0], lively, steps=3)
    settled = command._resumable(study.runs(tmp_path / "out")[0])
    assert settled.config == study.runs(Path("out"))[0].config


# -- whole -----------------------------------------------------------------------------------------


def toy_study(toys: Toys, path: Path, **rules: dict) -> Path:
    """Rules with one seed of two steps. The first is the baseline, whose run is the first to start."""
    base = yaml.safe_load(toys.config("study-base").read_text())
    del base["seed"], base["out"]
    base["train"]["steps"] = 2
    base["checkpoint"]["every"] = 1
    base["data"]["eval"], base["eval"] = [str(toys.heldout)], {"every": 2, "max_tokens": 14}
    tree = {"base": base, "starts": {"warm": str(toys.model)}, "seeds": [0], "rules": rules}
    return write_study(path, tree | {"baseline": next(iter(rules))})


def start(path: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "vlm_rl", "study", str(path), "--out", str(out), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=clean_environment() | {"PYTHONPATH": str(ROOT)},
    )


def processes_in(folder: Path) -> list[int]:
    """Processes whose command line names the folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.turn(2, days=4)
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_a_study_stopped_in_the_middle_and_started_again(toys: Toys, tmp_path):
    """A run that fails stops no other; a finished one is not touched again."""
    huge = {"rollout.max_tokens": 10**6, "train.micro_batch_tokens": 10**6}
    path, out = toy_study(toys, tmp_path / "study.yaml", huge=huge, grpo={}), tmp_path / "out"
    process = start(path, out, "--jobs", "2")
    metrics = out / "grpo" / "seed-0" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and RunDirectory(metrics.parent).metrics()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == EXIT_STOPPED, said
    assert "stopping" in said and processes_in(out) == []
    broken, entry = load_study(path).runs(out)
    assert not command.is_finished(entry)

    process = start(path, out)
    said, _ = process.communicate(timeout=500)
    assert process.returncode == 1, said
    assert "2 runs, 2 to do" in said and "huge seed 0: FAILED" in said and "exit code 2" in said
    assert "above the model's context" in said  # the end of its log
    assert "grpo seed 0: done" in said and "missing: huge seed 0" in said
    assert "1 run is missing" in Page(out / "comparison.html").text
    assert command.is_finished(entry) and not command.is_finished(broken)
    assert_sound(RunDirectory(entry.out))

    path, before = toy_study(toys, tmp_path / "rest.yaml", grpo={}), metrics.stat().st_mtime_ns
    assert command.run_study(path, out) == 0
    assert metrics.stat().st_mtime_ns == before
    results = collect(load_study(path), load_study(path).runs(out))
    assert not results.missing and results.benchmarks == [toys.heldout.name]
    assert "not logged" not in Page(out / "comparison.html").text
