"""Evaluation: scores against hand arithmetic, controls, and the whole way on a real tiny model."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.helpers.benchmark_rows import REAL_FILES
from tests.helpers.prepared_sets import write_problems
from vlm_rl.cli import main
from vlm_rl.config import RewardConfig, parse_config, save_config
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data_prep.readers.sources import SOURCES
from vlm_rl.data_prep.records import UsableRow
from vlm_rl.distributed import merge_shares
from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.benchmark import Response
from vlm_rl.evaluation.benchmarks.judging import judge
from vlm_rl.evaluation.benchmarks.registry import BENCHMARKS, published_prompts
from vlm_rl.evaluation.benchmarks.score_command import read_annotations
from vlm_rl.evaluation.evaluate import Asking, Judging, evaluate
from vlm_rl.evaluation.image_controls import with_images
from vlm_rl.evaluation.journal import Journal
from vlm_rl.evaluation.records import grade_groups
from vlm_rl.evaluation.results_folder import refuse_another_model
from vlm_rl.evaluation.resume import answer_settings, changed_settings, data_digest
from vlm_rl.evaluation.scores import score_line, summarise
from vlm_rl.evaluation.sets import stopping
from vlm_rl.grading.grader import GRADER_VERSION, Grader
from vlm_rl.rewards.accuracy import AccuracyPart
from vlm_rl.rewards.reward import open_accuracy
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.eval_record import EvalRecord
from vlm_rl.samplers.base import SampleRequest, SamplingParams
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.transformers import TransformersSampler
from vlm_rl.stats import random_derangement, score_interval
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Problem, Prompt, Rollout, StopReason, Verdict


def png(seed: int, size: tuple[int, int] = (56, 56)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def problem(index: int, *images: bytes, answer: str = "4") -> Problem:
    question = "<image>" * len(images) + f"Count the red squares, please ({index})."
    return Problem(f"p{index}", question, images, answer, "integer", category=f"c{index % 2}")


# -- numbers ---------------------------------------------------------------------------------------


@given(st.integers(2, 40), st.integers(0, 2**32))
def test_a_derangement_is_one_cycle_that_leaves_nothing_in_place(size: int, seed: int) -> None:
    order = random_derangement(size, np.random.default_rng(seed))
    seen, place = [0], int(order[0])
    while place != 0:
        seen.append(place)
        place = int(order[place])
    assert sorted(seen) == list(range(size))


def test_derangements_of_three_come_equally_often() -> None:
    rng = np.random.default_rng(0)
    drawn = [tuple(random_derangement(3, rng)) for _ in range(600)]
    assert set(drawn) == {(1, 2, 0), (2, 0, 1)}  # the only two
    assert 240 < drawn.count((1, 2, 0)) < 360  # 300 +- 5 standard deviations of 12.2


def record(problem_id: str, verdict: Verdict, length: int, stop: str = "stop", *, box: bool = True) -> EvalRecord:
    return EvalRecord(
        problem_id=problem_id,
        sample_index=0,
        prompt_text="",
        response="",
        length=length,
        stop_reason=stop,
        extracted=None,
        gold="",
        verdict=verdict,
        path="",
        reason="",
        has_box=box,
        category="",
        image_sha256=[],
        image=None,
        question="",
    )


def test_summary_by_hand() -> None:
    records = [
        record("a", "correct", 10),
        record("a", "wrong", 20),
        record("b", "correct", 30),
        record("b", "correct", 40),
        record("c", "timeout", 50),
        record("c", "no_answer", 100, "length", box=False),
        record("d", "error", 60),
        record("d", "wrong", 90),
    ]
    summary = summarise(records)
    assert (summary["num_problems"], summary["num_responses"], summary["k"]) == (4, 8, 2)
    assert summary["accuracy"] == (0.5 + 1 + 0 + 0) / 4
    assert (summary["timeouts"], summary["errors"]) == (1, 1)
    assert (summary["box_share"], summary["truncated_share"]) == (7 / 8, 1 / 8)
    assert summary["mean_length"] == 400 / 8
    assert summary["median_length"] == (40 + 50) / 2
    assert summary["p90_length"] == pytest.approx(90 + 0.3 * 10)  # place .9 * 7 = 6.3 of the sorted eight
    assert summary["mean_length_correct"] == 80 / 3
    assert summary["mean_length_wrong"] == 320 / 5
    # The interval is over problems: from the four means, not from the eight samples.
    assert summary["interval"] == list(score_interval(np.array([0.5, 1, 0, 0])))
    uneven = [record("a", "correct", 1), record("a", "correct", 1), record("b", "wrong", 1)]
    assert summarise(uneven)["accuracy"] == 1 / 2  # of problems


def test_summary_where_nothing_is_right_or_there_is_nothing() -> None:
    none_right = summarise([record("a", "wrong", 5)])
    assert none_right["mean_length_correct"] is None and none_right["interval"] == list(score_interval(np.zeros(1)))
    empty = summarise([])
    assert empty["accuracy"] is None and empty["num_problems"] == 0
    json.dumps([none_right, empty], allow_nan=False)


@given(st.lists(st.integers()), st.integers(1, 5))
def test_the_shares_of_all_ranks_make_the_whole_again(whole: list[int], ranks: int) -> None:
    assert merge_shares([whole[rank::ranks] for rank in range(ranks)]) == whole


# -- grading ---------------------------------------------------------------------------------------


def rollout(problem_id: str, index: int, text: str, stop: StopReason = "stop") -> Rollout:
    return Rollout(problem_id, index, np.zeros(3 + index, np.int32), np.zeros(3 + index, np.float32), text, stop, 7)


def test_responses_are_graded_with_the_prefill_in_front(grader: Grader) -> None:
    nothing = np.zeros(0, np.int32)
    prompts = [Prompt(f"p{i}", f"chat {i}<think>", "<think>", nothing, nothing, (), {}) for i in range(2)]
    right, wrong = (rf"scan</think><answer>\boxed{{{n}}}</answer>" for n in (4, 5))
    groups = [
        [rollout("p0", 0, right), rollout("p0", 1, wrong)],
        [rollout("p1", 0, "scan", "length"), rollout("p1", 1, r"\boxed{4} scan")],
    ]
    records = grade_groups(
        [problem(0), problem(1)], prompts, groups, grader=grader, template=TEMPLATES["think_answer"]
    )
    assert [[r.verdict for r in group] for group in records] == [["correct", "wrong"], ["no_answer", "no_answer"]]
    assert [[r.has_box for r in group] for group in records] == [[True, True], [False, True]]
    first = records[0][0]
    assert first.response == "<think>" + right
    assert (first.extracted, first.gold, first.length, first.prompt_text) == (
        "4",
        "4",
        3,
        "chat 0<think>",
    )


# -- controls --------------------------------------------------------------------------------------


def test_blank_images_keep_their_sizes_and_nothing_else() -> None:
    given = [problem(0, png(0, (56, 84)), png(1, (40, 30))), problem(1)]
    (blank,) = with_images(given, "blank", seed=0)
    assert (blank.id, blank.question, blank.answer) == (given[0].id, given[0].question, given[0].answer)
    opened = [Image.open(io.BytesIO(data)) for data in blank.images]
    assert [image.size for image in opened] == [(56, 84), (40, 30)]
    assert all(image.convert("RGB").getextrema() == ((128, 128),) * 3 for image in opened)


def test_shuffled_images_come_from_another_problem_with_as_many() -> None:
    ones = [problem(i, png(i)) for i in range(6)]
    twos = [problem(i, png(i), png(i + 50)) for i in range(10, 13)]
    alone, text = problem(20, png(1), png(2), png(3)), problem(21)
    given = [ones[0], twos[0], text, *ones[1:], alone, *twos[1:]]
    shown = with_images(given, "shuffled", seed=3)
    assert [p.id for p in shown] == [p.id for p in given if p not in (alone, text)]
    before = {p.id: p.images for p in given}
    for group in (ones, twos):
        ids = [p.id for p in group]
        after = {p.id: p.images for p in shown if p.id in ids}
        assert sorted(after.values()) == sorted(before[i] for i in ids)  # each used once
        assert all(after[i] != before[i] for i in ids)
    assert [p.images for p in with_images(given, "shuffled", seed=3)] == [p.images for p in shown]
    others = {tuple(p.images for p in with_images(given, "shuffled", seed=s)) for s in range(5)}
    assert len(others) > 1


def test_problems_that_share_a_picture_do_not_get_it_again() -> None:
    given = [problem(i, png(i // 2)) for i in range(8)]  # in pairs
    for seed in range(10):
        shown = with_images(given, "shuffled", seed=seed)
        same = [a.id for a, b in zip(given, shown, strict=True) if a.images == b.images]
        assert same == []


def test_real_images_are_the_given_ones() -> None:
    given = [problem(0, png(0)), problem(1)]
    assert with_images(given, "real", seed=0) == given


# -- the whole way ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def builder(tiny_model: Path) -> PromptBuilder:
    return PromptBuilder(tiny_model, template=TEMPLATES["think_answer"])


@pytest.fixture(scope="module")
def sampler(tiny_model: Path, builder: PromptBuilder) -> TransformersSampler:
    return TransformersSampler(
        EngineSettings(
            model_path=str(tiny_model), builder=builder, max_model_len=512, batch_size=16, dtype=torch.float32
        ),
    )


PROBLEMS = [problem(i, png(i)) for i in range(5)] + [problem(5)]


def counting(seen: list[int]) -> Callable[..., None]:
    return lambda count, **_: seen.append(count)


def run_evaluation(sampler, builder, grader, *, samples: int, problems=PROBLEMS, **options):
    params = SamplingParams(temperature=float(samples > 1), max_tokens=6, responses=samples)
    how = {key: options.pop(key) for key in ("images", "prompt") if key in options}
    judging = {key: options.pop(key) for key in ("mode", "judge_model", "accuracy") if key in options}
    asking = Asking(builder, sampler, params, seed=0, step=60, **how)
    return evaluate(problems, asking, Judging(grader, **judging), **options)


def test_a_sampled_evaluation_end_to_end(sampler, builder, grader: Grader, tmp_path: Path) -> None:
    seen: list[int] = []
    found = run_evaluation(sampler, builder, grader, samples=3, batch_size=4, advance=counting(seen))
    assert seen == [4, 2]
    keys = [(r.problem_id, r.sample_index) for r in found.records]
    assert keys == [(f"p{i}", k) for i in range(6) for k in range(3)]
    assert found.records[0].image_sha256 == [hashlib.sha256(png(0)).hexdigest()]
    assert found.records[0].image_sizes == ["56x56"] and found.records[-1].image_sizes == []
    assert found.records[0].image == [png(0)] and found.records[-1].image == []
    assert all(1 <= r.length <= 6 for r in found.records)
    numbers = summarise(found.records)
    assert {key: found.summary[key] for key in numbers} == numbers
    assert {key: value for key, value in found.summary.items() if key not in numbers} == {
        "mode": "strict",
        "rule": "strict",
        "images": "real",
        "left_out": 0,
        "sampling": {"temperature": 1.0, "max_tokens": 6, "responses": 3, "top_p": 1.0, "top_k": 0},
        "seed": 0,
        "step": 60,
        "template": "think_answer",
        "sampler": "transformers",
        "policy_version": 0,
        "grader_version": GRADER_VERSION,
    }
    # It is what a run directory stores and gives back.
    config = {"out": str(tmp_path / "run"), "model": {"path": "m"}, "data": {"train": ["a"]}}
    run = RunDirectory(tmp_path / "run").create(parse_config(config))
    run.write_eval("toy-test", 60, found.records, found.summary)
    (stored,) = run.evals()
    assert stored.rows().to_pylist() == [asdict(r) for r in found.records]
    assert stored.summary == found.summary


def test_answers_do_not_depend_on_how_problems_are_batched(sampler, builder, grader: Grader) -> None:
    at_once = run_evaluation(sampler, builder, grader, samples=2)
    one_by_one = run_evaluation(sampler, builder, grader, samples=2, batch_size=1)
    assert [r.response for r in at_once.records] == [r.response for r in one_by_one.records]
    assert len({r.response for r in at_once.records}) > 6  # sampled: not all alike
    greedy = run_evaluation(sampler, builder, grader, samples=1)
    assert greedy.records == run_evaluation(sampler, builder, grader, samples=1).records


@pytest.mark.parametrize("known", [{"tolerance": 0.1}, {"alternatives": ["8"]}, {"tests": "other"}, {"unit": "cm"}])
def test_what_decides_a_verdict_is_part_of_the_data(known: dict[str, Any]) -> None:
    """A set that was prepared again with these is a different one: its finished results are not kept."""
    prepared = [replace(PROBLEMS[0], meta={"tests": "some"}), PROBLEMS[1]]
    changed = [replace(prepared[0], meta={**prepared[0].meta, **known}), PROBLEMS[1]]
    assert data_digest(prepared) == data_digest(prepared[::-1]) != data_digest(changed)


@pytest.mark.parametrize(
    ("answered", "finished", "said"),
    [
        (2, 0, "2 answered of 12 problems are kept in {}/eval: the same command continues with the others"),
        (2, 60, "8 answered of 12 problems are kept in {}/eval: the same command continues with the others"),
        (0, 60, "6 answered of 12 problems are kept in {}/eval: the same command continues with the others"),
        (0, 20, "none of 12 problems was answered yet: the same command starts over"),
    ],
)
def test_ctrl_c_says_what_is_kept(
    sampler, builder, grader: Grader, tmp_path: Path, capsys, answered, finished, said
) -> None:
    """Of two sets of six problems one is finished, at the step `finished`: only that of this evaluation counts.

    Nor does what an evaluation of another step, or of another set, has answered.
    """
    evaluation = run_evaluation(sampler, builder, grader, samples=1)
    if finished:
        RunDirectory(tmp_path).write_eval("toy-test", finished, evaluation.records, evaluation.summary)
    with pytest.raises(KeyboardInterrupt) as stop, stopping(tmp_path, {"toy-test": 6, "set": 6}, step=60):
        counted = {".set-000060-0": answered, ".set-000020-0": 6, ".other-000060-0": 6}
        for name, number in counted.items():
            with Journal.open(tmp_path / f"eval/{name}.jsonl", {"seed": 0}) as journal:
                journal.add([[record] for record in evaluation.records[:number]])
        raise KeyboardInterrupt
    line = f"stopped by Ctrl-C; {said.format(tmp_path)}"
    assert capsys.readouterr().out == f"{line}\n"
    assert stop.value.args == (line,), "the command line then adds none"


def test_a_stopped_evaluation_goes_on_where_it_was(sampler, builder, grader: Grader, tmp_path: Path) -> None:
    """Stopped behind its first batch, the second one cut in the middle of a line: as if never stopped."""
    path, settings = tmp_path / "journal.jsonl", {"seed": 0}
    whole = run_evaluation(sampler, builder, grader, samples=2)

    def stop(_: int, **__: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Journal.open(path, settings) as journal:
        run_evaluation(sampler, builder, grader, samples=2, batch_size=4, advance=stop, journal=journal)
    path.write_bytes(path.read_bytes() + b'[{"problem_id": "p4", "resp')
    seen: list[int] = []
    with Journal.open(path, settings) as journal:
        assert sorted(journal.done) == ["p0", "p1", "p2", "p3"]
        again = run_evaluation(
            sampler,
            builder,
            grader,
            samples=2,
            batch_size=1,
            advance=counting(seen),
            journal=journal,
        )
    assert seen == [4, 1, 1]  # four known, two answered
    assert again.records == whole.records and again.summary == whole.summary
    with Journal.open(path, settings) as journal:
        assert len(journal.done) == 6
    with Journal.open(path, {"seed": 1}) as journal:
        assert journal.done == {}  # other settings have other answers
        journal.remove()
    assert not path.exists()


@pytest.mark.parametrize("how", ["blank", "shuffled"])
def test_controls_show_the_model_other_pixels(sampler, builder, grader: Grader, how) -> None:
    found = run_evaluation(sampler, builder, grader, samples=1, images=how)
    assert (found.summary["images"], found.summary["left_out"]) == (how, 1)  # the text-only problem
    shown = with_images(PROBLEMS, how, seed=0)
    assert [r.image for r in found.records] == [list(p.images) for p in shown]
    assert all(r.image != list(p.images) for r, p in zip(found.records, PROBLEMS[:5], strict=True))


def test_large_sets_do_not_keep_their_images(sampler, builder, grader: Grader, monkeypatch) -> None:
    size = sum(len(data) for p in PROBLEMS for data in p.images)
    monkeypatch.setattr("vlm_rl.evaluation.records._KEPT_IMAGE_BYTES", 2 * size - 1)
    assert run_evaluation(sampler, builder, grader, samples=1).records[0].image is not None
    twice = run_evaluation(sampler, builder, grader, samples=2)  # every image would be stored twice
    assert {r.image for r in twice.records} == {None}
    assert twice.records[0].image_sha256 == [hashlib.sha256(png(0)).hexdigest()]


def test_nothing_to_evaluate_is_said(sampler, builder, grader: Grader) -> None:
    with pytest.raises(UserError, match="nothing to evaluate"):
        run_evaluation(sampler, builder, grader, samples=1, problems=[])
    with pytest.raises(UserError, match="1 problems, none of which can be shown blank images"):
        run_evaluation(sampler, builder, grader, samples=1, problems=[problem(0)], images="blank")


# -- benchmarks' own rules, words and scores ---------------------------------------------------------


def dynamath_problem(seed: int, variant: int, kind: str, gold: str, **more) -> Problem:
    meta = {"seed": str(seed), "variant": variant, "level": "high school", "tolerance": 0.001}
    return Problem(
        f"dynamath-{seed}-v{variant}", "How many?", (), gold, kind, source="dynamath", category="algebra", meta=meta
    )  # type: ignore[arg-type]


class Parrot:
    """A sampler that says what it is told to, problem by problem."""

    name, policy_version = "parrot", 0

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts
        self.prompts: list[str] = []

    def generate(self, request: SampleRequest) -> list[list[Rollout]]:
        self.prompts += [prompt.text for prompt in request.prompts]
        return [
            [rollout(p.problem_id, k, self.texts[p.problem_id]) for k in range(request.params.responses)]
            for p in request.prompts
        ]


def test_another_precision_of_the_weights_is_another_setting(sampler, builder, grader: Grader) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, responses=1)
    settings = answer_settings(PROBLEMS, Asking(builder, sampler, params, seed=0, step=0), Judging(grader))
    assert settings["dtype"] == "float32" and changed_settings(settings, settings) == []
    assert changed_settings({**settings, "dtype": "bfloat16"}, settings) == ["dtype"]


def test_a_benchmarks_rule_words_and_scores_in_eval(builder, grader: Grader) -> None:
    """DynaMath by its own rule, asked in its own words; two seeds of two variants, three answers of four right."""
    problems = [
        dynamath_problem(1, 1, "float", "2.0"),
        dynamath_problem(1, 2, "float", "3.0"),
        dynamath_problem(2, 1, "text", "even"),
        dynamath_problem(2, 2, "text", "odd"),
    ]
    said = ['{"short answer": "2.0009"}', '{"short answer": "3"}', '{"short answer": "not even"}', r"\boxed{even}"]
    parrot = Parrot({p.id: text for p, text in zip(problems, said, strict=True)})
    notes: list[str] = []
    found = run_evaluation(
        parrot, builder, grader, samples=1, problems=problems, batch_size=2, mode="official",
        prompt=published_prompts()["dynamath"], advance=lambda count, note="": notes.append(note),
    )  # fmt: skip
    assert [r.verdict for r in found.records] == ["correct", "correct", "correct", "wrong"]
    assert {r.path for r in found.records} == {"official"} and "free point" in found.records[2].reason
    assert (found.summary["mode"], found.summary["rule"], found.summary["headline"]) == (
        *("official", "official"),
        "worst_case",
    )
    assert (
        found.summary["scores"]["average"]["score"] == 0.75 and found.summary["scores"]["worst_case"]["score"] == 0.5
    )
    assert found.summary["by"]["subject"]["algebra"]["n"] == 4
    assert notes == ["accuracy 1.000", "accuracy 0.750"]  # the running score
    assert all("## Question\nHow many?" in text and "'short answer' key" in text for text in parrot.prompts)
    assert ["floating-point number.\n## Answer" in text for text in parrot.prompts] == [True, True, False, False]
    assert {r.question for r in found.records} == {"How many?"}  # the record keeps the question itself
    assert [r.cluster for r in found.records] == ["seed 1", "seed 1", "seed 2", "seed 2"]
    over_seeds = list(score_interval(np.array([1, 0.5])))
    assert over_seeds == found.summary["interval"] == summarise(found.records)["interval"]
    assert over_seeds == found.summary["scores"]["average"]["interval"]
    assert over_seeds == found.summary["by"]["subject"]["algebra"]["interval"]
    line = score_line("dynamath", found.summary)
    assert line.startswith("dynamath: worst_case 0.500 [") and "] of 2, accuracy 0.750 [" in line
    assert "n 4, box 0.25, truncated 0.00, timeouts 0, errors 0, mean length 3.0" in line
    strict = run_evaluation(parrot, builder, grader, samples=1, problems=problems)
    assert not any(r.verdict == "correct" for r in strict.records)
    assert strict.summary["rule"] == "strict" and strict.summary["scores"]["worst_case"]["score"] == 0
    with pytest.raises(UserError, match="official needs problems of one known benchmark; these are of no named"):
        run_evaluation(parrot, builder, grader, samples=1, mode="official")


def boxed(index: int, *images: bytes) -> Problem:
    return Problem(f"b{index}", "<image>Where?", images, "[0, 0, 28, 28]", "list", meta={"box": [0.0, 0.0, 0.5, 0.5]})


def open_part(**reward: Any) -> AccuracyPart:
    template, cache = TEMPLATES["think_answer"], Path("unused")
    part = open_accuracy(RewardConfig(**reward), template=template, model_type="qwen2_5_vl", judge_cache=cache)
    assert part is not None
    return part


def test_boxes_are_judged_by_the_part_that_judged_them_in_training(builder, grader: Grader) -> None:
    """Images of 56 x 56 pixels: the gold is (0, 0) to (28, 28). The problem of a number stays the grader's."""
    problems = [boxed(0, png(0)), boxed(1, png(1)), boxed(2, png(2)), problem(3, png(3))]
    said = {
        "b0": TEMPLATES["think_answer"].wrap("a", "[0, 0, 28, 27.5]"),
        "b1": TEMPLATES["think_answer"].wrap("a", "[14, 0, 42, 28]"),  # a third
        "b2": TEMPLATES["think_answer"].wrap("a", "somewhere"),
        "p3": TEMPLATES["think_answer"].wrap("a", "4"),
    }
    part = open_part(iou={"role": "accuracy"})
    how = {"samples": 1, "problems": problems}
    found = run_evaluation(Parrot(said), builder, grader, accuracy=part, **how)
    assert [r.verdict for r in found.records] == ["correct", "wrong", "wrong", "correct"]
    assert [r.path for r in found.records[:3]] == ["iou"] * 3 and found.records[3].path != "iou"
    assert "iou gives 0.982; right from 0.5 on" in found.records[0].reason
    assert found.summary["accuracy"] == 0.5 and found.summary["rule"] == "reward.iou"
    with pytest.raises(UserError, match=r"answers of 3 problems, such as 'b0', are boxes.*reward\.iou\.role"):
        run_evaluation(Parrot(said), builder, grader, **how)


def test_a_known_benchmark_keeps_its_own_rule(builder, grader: Grader) -> None:
    """Where every response is right by the part, the numbers of DynaMath stay those that others publish."""
    own = {"path": "tests.helpers.own_reward.short_words", "role": "accuracy"}
    problems = [dynamath_problem(1, 1, "float", "2.0"), dynamath_problem(2, 2, "float", "3.0")]
    parrot = Parrot({p.id: TEMPLATES["think_answer"].wrap("a", "2") for p in problems})
    part = open_part(functions={"short": own}, allow_function=True)
    with closing(part):
        found = run_evaluation(parrot, builder, grader, accuracy=part, samples=1, problems=problems)
    assert [r.verdict for r in found.records] == ["correct", "wrong"] and found.summary["rule"] == "strict"


def test_what_the_part_is_belongs_to_the_settings_and_how_it_is_reached_does_not(
    sampler, builder, grader: Grader, tmp_path: Path
) -> None:
    asking = Asking(builder, sampler, SamplingParams(temperature=0.0, max_tokens=6, responses=1), seed=0, step=0)
    (tmp_path / "prompt.txt").write_text("{response}")

    def settings_with(**reward: Any) -> dict[str, Any]:
        with closing(open_part(**reward)) as part:
            return answer_settings(PROBLEMS, asking, Judging(grader, accuracy=part))

    judge = {"url": "http://a/v1", "model": "m", "prompt": str(tmp_path / "prompt.txt"), "role": "accuracy"}
    first = settings_with(judge=judge)
    assert changed_settings(first, settings_with(judge=judge | {"url": "http://b/v1", "timeout": 3.0})) == []
    assert changed_settings(first, settings_with(judge=judge | {"model": "n"})) == ["accuracy_part"]
    (tmp_path / "prompt.txt").write_text("Is this right? {response}")
    assert changed_settings(first, settings_with(judge=judge)) == ["accuracy_part"], "other words in the same file"
    assert changed_settings(first, settings_with(iou={"role": "accuracy"})) == ["accuracy_part"]
    plain = answer_settings(PROBLEMS, asking, Judging(grader))
    assert (
        changed_settings({key: plain[key] for key in plain if key != "accuracy_part"}, plain) == []
    )  # older results


def test_problems_of_an_older_journal_have_their_cluster(builder, grader: Grader, tmp_path: Path) -> None:
    problems = [dynamath_problem(1, variant, "float", "2.0") for variant in (1, 2)]
    parrot = Parrot({p.id: r"\boxed{2}" for p in problems})
    with Journal.open(tmp_path / "journal.jsonl", {}) as journal:
        whole = run_evaluation(parrot, builder, grader, samples=1, problems=problems, journal=journal)
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    older = [[{k: v for k, v in r.items() if k != "cluster"} for r in json.loads(line)] for line in lines[1:]]
    (tmp_path / "journal.jsonl").write_text("".join(f"{line}\n" for line in [lines[0], *map(json.dumps, older)]))
    parrot.prompts.clear()
    with Journal.open(tmp_path / "journal.jsonl", {}) as journal:
        again = run_evaluation(parrot, builder, grader, samples=1, problems=problems, journal=journal)
    assert again.records == whole.records and parrot.prompts == []
    assert {r.cluster for r in again.records} == {"seed 1"}


def test_the_published_rule_knows_the_alternatives_of_a_gold(grader: Grader) -> None:
    """Minerva's lists of golds, as preparation keeps them: any of them is right."""
    problem = Problem("minerva-1", "?", (), "0.01", "float", source="minerva", meta={"alternatives": ["0.02"]})
    answered = [(problem, Response("1", f"The answer is {value}.")) for value in ("0.02", "0.03")]
    judged = judge(BENCHMARKS["minerva"], answered, mode="official", grader=grader, template=TEMPLATES["plain"])
    assert [item.judgement.verdict for item in judged] == ["correct", "wrong"]


@pytest.mark.parametrize(
    ("kind", "choices", "meta", "words"),
    [
        ("choice", ("x", "y"), {}, "the correct option letter, e.g., A, B, C, D,"),
        (
            "text",
            ("x", "y"),
            {},
            "the correct option letter, e.g., A, B, C, D,",
        ),  # pid 168: a gold that is not an option
        ("integer", (), {}, "the final value, e.g., 1, 2, 3,"),
        ("float", (), {"precision": 1}, "with one decimal place and provide the final value, e.g., 1.2, 1.3, 1.4,"),
        ("float", (), {"precision": 2}, "two decimal places and provide the final value, e.g., 1.23, 1.34, 1.45,"),
        ("expression", (), {"answer_type": "list"}, "the final list, e.g., [1, 2, 3], [1.2, 1.3, 1.4],"),
    ],
)
def test_mathvistas_hint_is_its_own(kind, choices, meta, words: str) -> None:
    """As its column `query` has it: options ask for a letter, numbers for as many decimals as the gold has."""
    mine = Problem("mathvista-1", "How many?", (), "x", kind, choices=choices, source="mathvista", meta=meta)
    hint, question = published_prompts()["mathvista"].applied(mine).question.split("\nQuestion: ")
    assert hint.startswith("Hint: Please answer the question ") and hint.endswith(f"{words} at the end.")
    assert question == "How many?"


@pytest.mark.parametrize("name", REAL_FILES)
def test_preparation_and_scoring_read_the_same_problems(
    name: str, annotation_files: Callable[[str], list[Path]]
) -> None:
    """Whatever way a row comes in: preparation adds only where its images are."""
    files = annotation_files(name)
    scored = read_annotations(BENCHMARKS[name], files)
    folder = files[0] if len(files) == 1 else files[0].parent.parent
    prepared = [row.problem for row in SOURCES[name].read(folder) if isinstance(row, UsableRow)]
    assert {problem.id: facts(problem) for problem in prepared} == {problem.id: facts(problem) for problem in scored}


def facts(problem: Problem) -> tuple[object, ...]:
    about_images = ("annotations_only", "image", "markers_prepended")
    meta = {key: value for key, value in problem.meta.items() if key not in about_images}
    return problem.answer, problem.answer_type, problem.choices, problem.category, problem.source, meta


def test_score_reads_our_records_where_their_prompt_asked_for_the_answer(tmp_path: Path) -> None:
    """think_answer wants the box inside <answer>; the summary beside the records says so. Foreign files: plain."""
    rows = [{"problem_id": "mathvision-7", "sample_index": 0, "response": r"<think>x</think>\boxed{B}"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "step-000000.parquet")
    annotations = tmp_path / "a.jsonl"
    annotations.write_text(json.dumps({"id": "7", "options": ["A", "B"], "answer": "B"}))

    def verdict(*more: str) -> str:
        words = ["--annotations", str(annotations), "--responses", str(tmp_path / "step-000000.parquet"), *more]
        assert main(["score", "--benchmark", "mathvision", "--json", str(tmp_path / "s.json"), *words]) == 0
        return json.loads((tmp_path / "s.json").read_text())["rows"][0]["verdict"]

    assert verdict() == "correct"
    (tmp_path / "step-000000.json").write_text(json.dumps({"template": "think_answer"}))
    assert verdict() == "no_answer" and verdict("--template", "think_box") == "correct"
    (tmp_path / "step-000000.json").write_text(json.dumps({"template": "wemath"}))
    assert verdict() == "correct"


def test_results_of_one_model_do_not_join_those_of_another(tmp_path: Path) -> None:
    """The checkpoints of a run belong together, with the model that it began with, in either order."""
    tree = {"out": "o", "model": {"path": str(tmp_path / "base")}, "data": {"train": ["x"]}}
    for name in ("run", "other"):
        (tmp_path / name).mkdir()
        save_config(parse_config(tree), tmp_path / name / "config.yaml")
    base = tmp_path / "base"
    (first, last), other = ((tmp_path / "run" / "checkpoints" / f"step-{n}" for n in (1, 2)), tmp_path / "other")
    another = other / "checkpoints" / "step-9"
    begun = parse_config(tree)
    for there, asked, run, is_refused in (
        (base, first, begun, False),
        (first, base, None, False),
        (first, last, begun, False),
        (first, another, begun, True),
        (base, tmp_path / "base-2", None, True),
        (first, tmp_path / "base-2", None, True),
    ):
        results = RunDirectory(tmp_path / f"{there.name}-{asked.name}")
        results.path.mkdir(exist_ok=True)
        results.write_eval("toy", 0, [], {"model": str(there)})
        if is_refused:
            with pytest.raises(UserError, match="choose a different --out"):
                refuse_another_model(results.path, asked, run)
        else:
            refuse_another_model(results.path, asked, run)


def test_a_result_does_not_depend_on_the_other_sets_of_the_command(tiny_model: Path, tmp_path: Path) -> None:
    """Sets whose images were brought to different sizes: one that is finished is kept where another is added."""
    sides = {"small": 56, "large": 112}
    for name, side in sides.items():
        write_problems([problem(0, png(0))], tmp_path / name, {"min_pixels": 3136, "max_pixels": side * side})
    words = ["eval", "--model", str(tiny_model), "--sampler", "transformers", "--max-tokens", "4"]
    for out, names in (("alone", ["small"]), ("both", ["small", "large"]), ("alone", ["small", "large"])):
        data = [str(tmp_path / name) for name in names]
        assert main([*words, "--out", str(tmp_path / out), "--data", *data]) == 0
    alone, both = (
        {r.benchmark: r.summary for r in RunDirectory(tmp_path / out).evals()} for out in ("alone", "both")
    )
    assert alone == both
    assert {name: summary["max_pixels"] for name, summary in both.items()} == {n: s * s for n, s in sides.items()}
