"""Files of responses as people write them: which column is the answer, whose it is, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from vlm_rl.cli import main
from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks import dynamath
from vlm_rl.evaluation.benchmarks.benchmark import Response
from vlm_rl.evaluation.benchmarks.final_answers import final_letters
from vlm_rl.evaluation.benchmarks.judging import matched
from vlm_rl.evaluation.benchmarks.registry import BENCHMARKS
from vlm_rl.evaluation.benchmarks.score_command import read_annotations, read_responses
from vlm_rl.types import Problem


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def responses_of(benchmark: str, *paths: Path) -> list[Response]:
    return read_responses(BENCHMARKS[benchmark], paths)


VISTA = {"question": "?", "answer": "3", "question_type": "free_form", "answer_type": "integer", "choices": None}


def test_a_gold_is_never_taken_for_a_response(tmp_path: Path) -> None:
    """A row of annotations without a response (its call failed) has an empty answer, not the gold in `answer`."""
    rows = {"1": {**VISTA, "response": "4"}, "2": {**VISTA, "error": "429"}}
    assert [answer.text for answer in responses_of("mathvista", write(tmp_path / "r.json", rows))] == ["4", ""]
    for benchmark in ("mathvista", "logicvista", "dynamath", "wemath"):
        annotations = write(tmp_path / "a.json", {"1": {**VISTA, "ID": "2steps_1", "key": "2steps_1"}})
        with pytest.raises(UserError, match=r"no response: .* an 'answer' beside the question is taken for the gold"):
            responses_of(benchmark, annotations)
    found = responses_of("logicvista", write(tmp_path / "b.json", {"v1_0": {"answer": "B", "reasoning": "none"}}))
    assert [answer.text for answer in found] == ["B"]


def test_a_table_that_cuts_an_answer_at_a_comma_is_refused(tmp_path: Path) -> None:
    cut = write(tmp_path / "r.csv", "id,response\n1,A\n2,so 3, thus B\n")
    with pytest.raises(UserError, match="row 1 has more cells than the header: quote"):
        responses_of("mathvision", cut)
    whole = write(tmp_path / "r.csv", 'id,response\n1,A\n2,"so ""3"", thus\nB"\n')
    assert [answer.text for answer in responses_of("mathvision", whole)] == ["A", 'so "3", thus\nB']


def test_nothing_is_an_empty_answer_however_it_is_written(tmp_path: Path) -> None:
    lines = ['"response": null', '"response": ""', '"response": NaN', '"response": []', '"error": "cut"']
    text = "\n".join(f'{{"id": {number}, {line}}}' for number, line in enumerate(lines))
    found = responses_of("mathvision", write(tmp_path / "r.jsonl", text + '\n{"id": 9, "response": 7}'))
    assert [(answer.id, answer.text) for answer in found] == [*((str(i), "") for i in range(5)), ("9", "7")]


def test_a_length_is_a_whole_number_or_unknown(tmp_path: Path) -> None:
    """A table has texts; writers of tables make 12.0 of 12 beside an empty cell."""
    table = write(tmp_path / "r.csv", "id,response,length\n1,A,12\n2,B,12.0\n3,C,\n4,D,long\n5,E,inf\n6,F,nan\n")
    assert [answer.length for answer in responses_of("mathvision", table)] == [12, 12, None, None, None, None]


# -- DynaMath's trials -------------------------------------------------------------------------------

GOLDS = {"1": {"1": "2.5", "2": "B"}, "3": {"1": "4", "2": "C"}}  # trial -> seed -> gold


@pytest.fixture
def trials(tmp_path: Path) -> list[Problem]:
    kinds = {"1": "float", "2": "multiple choice"}
    for trial, golds in GOLDS.items():
        rows = {seed: {"question": "?", "answer": gold, "answer_type": kinds[seed]} for seed, gold in golds.items()}
        write(tmp_path / f"trial{trial}" / "dataset.json", rows)
    return read_annotations(BENCHMARKS["dynamath"], sorted(tmp_path.glob("trial*/dataset.json")))


def test_golds_of_dynamath_are_read_from_its_other_form(tmp_path: Path) -> None:
    """The rows of its splits have an id, and the gold under a different name; the file is named by its split."""
    rows = [{"id": "7", "question": "?", "ground_truth": "2.5", "answer_type": "float", "knowledge_level": "x"}]
    benchmark, file = BENCHMARKS["dynamath"], write(tmp_path / "sample_variant4-00000-of-00001.json", rows)
    (problem,) = read_annotations(benchmark, [file])
    assert (problem.id, problem.answer) == ("dynamath-7-v4", "2.5")
    assert benchmark.facet_values(problem)["level"] == ("x",)


def flat(cells: Sequence[str], *, header: str) -> str:
    rows = [cells[0].format(trial=t, seed=s, gold=gold) for t, golds in GOLDS.items() for s, gold in golds.items()]
    return "\n".join([header, *rows])


@pytest.mark.parametrize(
    "files",
    [
        {"trial1.json": GOLDS["1"], "trial3.json": GOLDS["3"]},
        {"3.json": GOLDS["3"], "1.json": GOLDS["1"]},  # in whatever order
        {"a.csv": flat(["{seed},{trial},{gold}"], header="id,trial,answer")},
        {"a.csv": flat(["Q{seed},trial{trial},{gold}"], header="Question ID,variant,short answer")},
        {"a.csv": flat(['{seed},{trial},"{{""short answer"": ""{gold}""}}"'], header="question_id,trial,response")},
        {"a.csv": "Question ID,Variant 1,Variant 3\nQ1,2.5,4\nQ2,B,C\n"},
        {"a.json": {f"trial{t}": {s: {"answer": g} for s, g in golds.items()} for t, golds in GOLDS.items()}},
        {"a.json": {s: {t: {"answer": GOLDS[t][s]} for t in GOLDS} for s in ("1", "2")}},
        {"a.json": {s: {f"variant_{t}": {"answer": GOLDS[t][s]} for t in GOLDS} for s in ("1", "2")}},
        {
            f"report_trial{t}.json": {s: {"response": {"solution": "s", "short answer": g}} for s, g in golds.items()}
            for t, golds in GOLDS.items()
        },
    ],
)
def test_dynamath_answers_in_every_layout_belong_to_their_trials(
    tmp_path: Path, trials: list[Problem], files: dict[str, Any]
) -> None:
    """Perfect short answers: a bare one is not cut as the last line of a reply without JSON is."""
    paths = [write(tmp_path / "answers" / name, tree) for name, tree in files.items()]
    answered, _ = matched(BENCHMARKS["dynamath"], trials, responses_of("dynamath", *paths))
    assert sorted(response.id for _, response in answered) == ["1-v1", "1-v3", "2-v1", "2-v3"]
    assert all(dynamath.official_rule(*pair).verdict == "correct" for pair in answered)


def test_answers_to_another_trial_are_refused(tmp_path: Path, trials: list[Problem]) -> None:
    rows = {seed: {"Ground truth": gold, "response": {"short answer": gold}} for seed, gold in GOLDS["3"].items()}
    benchmark = BENCHMARKS["dynamath"]
    with pytest.raises(UserError, match=r"2 of 2 responses name a different right answer .* as 1-v1: '4' and '2.5'"):
        matched(benchmark, trials, responses_of("dynamath", write(tmp_path / "model.json", rows)))
    kept, _ = matched(benchmark, trials, responses_of("dynamath", write(tmp_path / "model_trial3.json", rows)))
    assert [response.id for _, response in kept] == ["1-v3", "2-v3"]


# -- what is said ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("benchmark", "annotations", "responses", "message"),
    [
        ("mathvista", {"1": {**VISTA, "choices": '["a", "b"]'}}, {"1": "3"}, "choices must be a list, not str"),
        ("mathvista", {"1": {**VISTA, "metadata": "{}"}}, {"1": "3"}, "metadata must be an object, not str '{}'"),
        (
            "mathvista",
            {"1": {**VISTA, "precision": "B"}},
            {"1": "3"},
            "precision must be a whole number from 0 to 30",
        ),
        ("dynamath", {"1": {**VISTA, "answer_type": ["float"]}}, {"1": "3"}, "answer_type is \"['float']\"; known:"),
        ("mathvision", [{"id": "1", "options": "ABCDE", "answer": "A"}], {"1": "A"}, "options must be a list"),
        ("mathvista", None, {"1": "3"}, "Responses without the annotations' fields need --annotations"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, benchmark: str, annotations: Any, responses: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["score", "--benchmark", benchmark, "--responses", str(write(tmp_path / "r.json", responses))]
    if annotations is not None:
        arguments += ["--annotations", str(write(tmp_path / "a.json", annotations))]
    assert main(arguments) == 2 and message in capsys.readouterr().err


def test_half_a_character_does_not_stop_the_result(tmp_path: Path) -> None:
    """A response cut inside a pair of surrogates, as JSON can hold it, comes back as it was."""
    files = ["--annotations", str(write(tmp_path / "a.json", [{"id": "1", "options": [], "answer": "6"}]))]
    files += ["--responses", str(write(tmp_path / "r.jsonl", '{"id": "1", "response": "6 \\ud83d"}'))]
    out = tmp_path / "s.json"
    assert main(["score", "--benchmark", "mathvision", "--mode", "official", *files, "--json", str(out)]) == 0
    assert json.loads(out.read_text(encoding="utf-8"))["rows"][0]["extracted"] == "6\ud83d"


@pytest.mark.parametrize(
    ("response", "letters"),
    [
        ("The choice to replace the question mark would be B.", "B"),
        ("It corresponds to option D.", "D"),
        ("The closest to this value is (A) 124 million.", "A"),
        ("The best reason is (D) Water gets in. As the air escapes, the tank sinks.", "D"),
        ("It is (A) or (B), I think", ""),
        ("A and C", "AC"),
        ("A total of five boxes touch it", ""),
        ("I cannot see the picture", ""),
        ("the vertex of the angle at point A", ""),
    ],
)
def test_letters_inside_a_sentence(response: str, letters: str) -> None:
    assert "".join(final_letters(response)) == letters
