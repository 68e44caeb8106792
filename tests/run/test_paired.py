"""Comparing evaluations: the paired numbers by hand, and the command on files."""

from __future__ import annotations

import csv
import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.prepared_sets import write_problems
from vlm_rl.cli import main
from vlm_rl.paired import ProblemScore, by_category, pair, problem_scores
from vlm_rl.stats import score_interval, sign_test
from vlm_rl.types import Problem


def scores(verdicts: str, *, length: float | None = 10.0) -> dict[str, ProblemScore]:
    return {f"p{i}": ProblemScore(float(v), length, "ab"[i % 2]) for i, v in enumerate(verdicts)}


@pytest.mark.parametrize("total", range(7))
def test_the_sign_test_counts_coin_tosses(total: int) -> None:
    tosses = [sum(toss) for toss in product([0, 1], repeat=total)]
    for won in range(total + 1):
        uneven = abs(won - total / 2)
        as_uneven = sum(abs(heads - total / 2) >= uneven for heads in tosses)
        assert sign_test(won, total - won) == pytest.approx(as_uneven / 2**total)


def test_a_pair_by_hand() -> None:
    """Six shared problems: B gains p1, p2, p3 and loses p4: +2/6. p6 and p7 are A's alone."""
    compared = pair(scores("10001111"), scores("111101", length=14.0))
    assert compared is not None
    assert (compared.n, compared.won, compared.lost, compared.only_a, compared.only_b) == (6, 3, 1, 2, 0)
    assert compared.score_a == pytest.approx(3 / 6) and compared.score_b == pytest.approx(5 / 6)
    assert compared.difference == pytest.approx(2 / 6)
    assert compared.p_value == 2 * (1 + 4) / 16
    assert (compared.length_a, compared.length_b) == (10.0, 14.0)
    assert compared.length_interval is None  # equal differences have no spread to tell one from
    low, high = compared.interval
    assert low <= compared.difference <= high and low < 0  # four changes prove nothing


def test_a_pair_of_lengths_by_hand() -> None:
    """Differences of 2, 4 and 6 tokens: 4 +- 4.303 x 2 / sqrt(3). A problem without a length takes no part."""
    lengths = ((10, 12), (10, 14), (10, 16), (None, 500), (900, None))
    a, b = ({f"p{i}": ProblemScore(1.0, pair[side], "") for i, pair in enumerate(lengths)} for side in (0, 1))
    compared = pair(a, b)
    assert compared is not None and (compared.n, compared.length_a, compared.length_b) == (5, 10.0, 14.0)
    half = 4.302653 * 2 / math.sqrt(3)
    assert compared.length_interval == pytest.approx((4 - half, 4 + half), abs=1e-5)
    alone = pair({"p0": a["p0"]}, {"p0": b["p0"]})
    assert alone is not None and alone.length_interval is None and alone.length_b == 12.0


def test_pairing_is_sharper_than_two_scores() -> None:
    """400 problems, ten gained, none lost: the difference's error is sqrt(.025 * .975 / 400), a score's .025."""
    a, b = scores("01" * 190 + "0" * 20), scores("01" * 190 + "0" * 10 + "1" * 10)
    compared = pair(a, b)
    assert compared is not None and compared.difference == pytest.approx(10 / 400)
    half = 1.96 * math.sqrt(0.025 * 0.975 / 400)
    assert compared.interval == pytest.approx((0.025 - half, 0.025 + half), abs=0.005)
    assert compared.p_value == 2 / 2**10


def test_a_few_problems_that_are_all_won_settle_nothing() -> None:
    """Two of two: (1 - u)^2 = .025, so up to u = .842 of all problems could be lost: +1 - 2 u."""
    compared = pair(scores("00"), scores("11"))
    assert compared is not None and compared.difference == 1
    assert compared.interval == pytest.approx((1 - 2 * (1 - math.sqrt(0.025)), 1))
    same = pair(scores("1" * 500), scores("1" * 500))
    assert same is not None and same.interval == pytest.approx((-0.00735, 0.00735), abs=1e-5)


def test_nothing_in_common_and_categories() -> None:
    assert pair(scores("1"), {"other": ProblemScore(1.0, None, "")}) is None
    parts = by_category(scores("0000"), scores("1010"))
    assert {name: (part.n, part.won) for name, part in parts.items()} == {"a": (2, 2), "b": (2, 0)}


def variants(seeds: str, verdicts: str, *, known: bool = True, lengths: str | None = None) -> dict[str, ProblemScore]:
    """One problem for each letter, which names its seed."""
    return {
        f"p{i}": ProblemScore(float(v), float(lengths[i]) if lengths else None, "", f"seed {seed}" if known else None)
        for i, (seed, v) in enumerate(zip(seeds, verdicts, strict=True))
    }


@pytest.mark.parametrize(("a_knows", "b_knows"), [(True, True), (True, False), (False, True)])
def test_variants_of_a_seed_are_one_toss(a_knows: bool, b_knows: bool) -> None:
    """Seed a wins three variants, b two and c loses one of two: 5 to 1 of problems, 2 to 1 of seeds.

    Differences 1 1 1 | 1 1 | 0 -1: mean 4/7; r = 3 - 12/7, 2 - 8/7 and -1 - 8/7; variance 3/2 (r . r) / 49, df 2.
    An older file does not know the seeds: the other one says them.
    """
    compared = pair(variants("aaabbcc", "0000011", known=a_knows), variants("aaabbcc", "1111110", known=b_knows))
    assert compared is not None and (compared.won, compared.lost, compared.n, compared.num_clusters) == (5, 1, 7, 3)
    assert compared.p_value == 1.0  # 2 to 1; of problems it would be 2 x (1 + 6) / 2^6 = .22
    half = 4.302653 * math.sqrt(1.5 * ((9 / 7) ** 2 + (6 / 7) ** 2 + (15 / 7) ** 2)) / 7
    assert compared.interval == pytest.approx((max(-1, 4 / 7 - half), min(1, 4 / 7 + half)), abs=1e-6)
    alone = pair(variants("aaabbcc", "0000011", known=False), variants("aaabbcc", "1111110", known=False))
    assert alone is not None and (alone.num_clusters, alone.p_value) == (7, 2 * (1 + 6) / 64)


def test_a_seed_whose_gains_and_losses_cancel_is_a_tie() -> None:
    gains = [1 / 3, 1 / 3, -2 / 3]  # their sum is not 0 in floating point
    assert sum(2 / 3 + gain - 2 / 3 for gain in gains) != 0
    a = {f"p{i}": ProblemScore(2 / 3, None, "", "seed 0") for i in range(3)}
    b = {f"p{i}": ProblemScore(2 / 3 + gain, None, "", "seed 0") for i, gain in enumerate(gains)}
    a |= {f"q{i}": ProblemScore(0.0, None, "", f"seed {i}") for i in range(1, 6)}
    b |= {f"q{i}": ProblemScore(1.0, None, "", f"seed {i}") for i in range(1, 6)}
    compared = pair(a, b)
    assert compared is not None and compared.p_value == sign_test(5, 0)


def test_lengths_of_variants_are_paired_by_seed() -> None:
    """Changes 1, 2 | 6: as a clustered estimate by hand, 3 +- 12.7062 x 2. Equal sums say nothing of the spread."""
    a = variants("aabb", "1111", lengths="1110") | {"p3": ProblemScore(1.0, None, "", "seed b")}
    compared = pair(a, variants("aabb", "1111", lengths="2370"))
    assert compared is not None
    assert compared.length_interval == pytest.approx((3 - 12.7062 * 2, 3 + 12.7062 * 2), abs=1e-3)
    one_seed = pair(variants("aa", "11", lengths="11"), variants("aa", "11", lengths="25"))
    assert one_seed is not None and one_seed.length_interval is None


def test_samples_of_a_problem_are_one_score() -> None:
    rows = [
        {"problem_id": "a", "verdict": v, "length": n, "category": "c"} for v, n in [("correct", 4), ("wrong", 8)]
    ]
    assert problem_scores(rows) == {"a": ProblemScore(0.5, 6.0, "c")}


def records(path: Path, verdicts: str, length: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    names = {"1": "correct", "0": "wrong"}
    rows = [
        {"problem_id": f"p{i}", "verdict": names[v], "length": length, "category": "c"}
        for i, v in enumerate(verdicts)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_the_command_compares_everything_with_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [
        records(tmp_path / name / "set" / "a.parquet", v, n) for name, v, n in [("x", "0011", 5), ("y", "1110", 9)]
    ]
    score = {"benchmark": "set", "rows": [{"id": f"p{i}", "verdict": "correct", "length": None} for i in range(4)]}
    (tmp_path / "score.json").write_text(json.dumps(score))
    out = tmp_path / "out.json"
    assert main(["eval", "compare", *map(str, paths), str(tmp_path / "score.json"), "--json", str(out)]) == 0
    tree = json.loads(out.read_text())
    first, second = tree["compared"]
    assert (first["better_on"], first["worse_on"], first["difference"]) == (["p0", "p1"], ["p3"], 0.25)
    assert (second["score_b"], second["length_b"]) == (1.0, None)
    assert [row["cells"]["set"]["accuracy"] for row in tree["table"]] == [0.5, 0.75, 1.0]
    printed = capsys.readouterr().out
    assert "50.0 -> 75.0: +25.0 points" in printed and "length 5.0 -> 9.0 tokens\n" in printed
    assert "better on 2, worse on 1 problems, exact sign test p = 1" in printed


def test_the_command_compares_clusters_of_new_files_and_reads_older_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three seeds of four variants. Parquet with and without the column, and a JSON of vlm-rl score."""
    file = records(tmp_path / "old" / "eval" / "set" / "step-000000.parquet", "000000001111", 5)
    file.with_suffix(".json").write_text("{}")
    plain = records(tmp_path / "new" / "set" / "r.parquet", "111111000011", 9)
    table = pq.read_table(plain)
    clusters = [f"seed {i // 4}" for i in range(12)]
    pq.write_table(table.append_column("cluster", pa.array(clusters)), plain)
    rows = [{**row, "id": row.pop("problem_id")} for row in pq.read_table(plain).to_pylist()]
    (tmp_path / "score.json").write_text(json.dumps({"benchmark": "set", "rows": rows}))
    out = tmp_path / "out.json"
    for old, new in product((file, tmp_path / "old"), (plain, tmp_path / "score.json")):
        assert main(["eval", "compare", str(old), str(new), "--json", str(out)]) == 0
        tree = json.loads(out.read_text())
        (compared,) = tree["compared"]
        assert (compared["n"], compared["num_clusters"], compared["won"], compared["lost"]) == (12, 3, 6, 2)
        assert compared["p_value"] == 1.0 and compared["by_category"]["c"]["num_clusters"] == 3
        cells = [row["cells"]["set"]["interval"] for row in tree["table"]]
        assert cells[0] == list(score_interval(np.array([0] * 8 + [1] * 4)))  # as before
        assert cells[1] == list(score_interval(np.array([1, 0.5, 0.5])))
        assert "better on 6, worse on 2 problems, exact sign test over 3 clusters p = 1" in capsys.readouterr().out
    assert main(["eval", "compare", str(file), str(file), "--json", str(out)]) == 0
    assert json.loads(out.read_text())["compared"][0]["num_clusters"] == 12
    assert "exact sign test p = 1" in capsys.readouterr().out


ODD = [
    ({"headline": "own"}, "its headline 'own' has no score"),
    ({"headline": ["own"]}, "has no score"),
    ({"headline": "own", "scores": {"own": {"n": 4, "score": "1", "interval": [0, 1]}}}, "has no score"),
    ({"headline": "own", "scores": {"own": {"n": 4, "score": 1, "interval": None}}}, "has no score"),
    ({"headline_parts": {"p0": "1"}}, "has no score"),
    ({"headline_parts": [1]}, "has no score"),
]


@pytest.mark.parametrize(("change", "told"), ODD)
def test_scores_that_somebody_sent_are_numbers_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], told: str
) -> None:
    good = records(tmp_path / "good" / "set" / "a.parquet", "0011", 5)
    rows = [{"id": f"p{i}", "verdict": "correct", "length": 1, "category": ["c"]} for i in range(4)]
    (tmp_path / "score.json").write_text(json.dumps({"benchmark": "set", "rows": rows} | change))
    file = records(tmp_path / "run" / "eval" / "set" / "step-000000.parquet", "0011", 5)
    file.with_suffix(".json").write_text(json.dumps(change))
    for odd in (tmp_path / "score.json", tmp_path / "run", file):
        assert main(["eval", "compare", str(good), str(odd)]) == 2
        assert told in capsys.readouterr().err


@pytest.mark.parametrize("command", [("compare", "GOOD", "ODD"), ("export", "ODD", "--out", "OUT")])
@pytest.mark.parametrize(
    ("column", "values"),
    [("verdict", [[1], [2], [3], [4]]), ("category", [{"a": 1}] * 4), ("problem_id", [None] * 4)],
)
def test_records_of_other_types_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...], column: str, values: list[Any]
) -> None:
    odd = records(tmp_path / "odd" / "set" / "a.parquet", "0011", 5)
    table = pq.read_table(odd)
    for name in ("question", "gold", "response", "extracted"):
        table = table.append_column(name, pa.array(["x"] * 4))
    table = table.append_column("sample_index", pa.array([0] * 4))
    pq.write_table(table.set_column(table.schema.get_field_index(column), column, pa.array(values)), odd)
    places = {"GOOD": records(tmp_path / "good" / "set" / "a.parquet", "0011", 5), "ODD": odd, "OUT": tmp_path / "o"}
    more = ["--to", "vlmevalkit"] if command[0] == "export" else []
    assert main(["eval", *(str(places.get(word, word)) for word in command), *more]) == 2
    assert f"a.parquet: column {column} " in capsys.readouterr().err


def test_a_third_result_says_what_is_hard_medium_and_easy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its share of right responses, of twelve: 0, 3, 4, 8 and 9; a third and two thirds are medium."""
    rows = [
        {"problem_id": f"p{i}", "verdict": "correct" if sample < right else "wrong", "length": 1, "category": "c"}
        for i, right in enumerate([0, 3, 4, 8, 9])
        for sample in range(12)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "base.parquet")
    a = records(tmp_path / "set" / "a.parquet", "000111", 5)  # the base model has not answered the sixth
    b = records(tmp_path / "set" / "b.parquet", "101110", 5)
    out = tmp_path / "out.json"
    command = ["eval", "compare", str(a), str(b), "--json", str(out), "--by-pass-rate"]
    assert main([*command, str(tmp_path / "base.parquet")]) == 0
    (compared,) = json.loads(out.read_text())["compared"]
    parts = compared["by_pass_rate"]
    assert {name: (part["n"], part["score_a"], part["score_b"]) for name, part in parts.items()} == {
        "hard": (2, 0.0, 0.5),
        "medium": (2, 0.5, 1.0),
        "easy": (1, 1.0, 1.0),
    }
    printed = capsys.readouterr().out
    assert printed.index("    hard: 0.0 -> 50.0") < printed.index("    medium: ") < printed.index("    easy: ")
    assert "1 problem without a pass rate" in printed and "regression" not in printed
    for spelling in (a, a.parent / ".." / "set" / a.name):
        assert main([*command, str(spelling)]) == 0
        assert "part of the change is regression to the mean" in capsys.readouterr().out


def test_a_prepared_set_says_which_facet_a_problem_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Levels 1 to 5 of MATH500; hard are 4 and 5, as in figure 1c of the HA-DW paper."""
    problems = [
        Problem(f"p{i}", "?", (), "1", "integer", source="math500", category="algebra", meta={"level": i + 1})
        for i in range(5)
    ]
    data = write_problems(problems, tmp_path / "data" / "math500")
    paths = [records(tmp_path / name / "set" / "r.parquet", v, 5) for name, v in (("a", "11100"), ("b", "11011"))]
    out = tmp_path / "out.json"
    command = ["eval", "compare", *map(str, paths), "--json", str(out), "--data", str(data)]
    assert main([*command, "--by", "difficulty"]) == 0
    (compared,) = json.loads(out.read_text())["compared"]
    assert {key: (part["n"], part["score_a"], part["score_b"]) for key, part in compared["by_facet"].items()} == {
        "easy": (1, 1.0, 1.0),
        "hard": (2, 0.0, 1.0),
        "mid": (2, 1.0, 0.5),
    }
    assert "  by difficulty\n" in (printed := capsys.readouterr().out) and "    hard: 0.0 -> 100.0" in printed
    assert main([*command, "--by", "level"]) == 0
    assert [*json.loads(out.read_text())["compared"][0]["by_facet"]] == ["1", "2", "3", "4", "5"]
    assert main([*command, "--by", "kind"]) == 2
    assert "no facet 'kind'; they have: difficulty, level, subject" in " ".join(capsys.readouterr().err.split())
    assert main(command) == 2 and "go together" in capsys.readouterr().err


def test_a_problem_counts_under_each_of_its_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Skills of MathVista; one problem names none."""
    skills = (["algebra"], ["algebra", "geometry"], [])
    problems = [
        Problem(f"p{i}", "?", (), "1", "integer", source="mathvista", meta={"skills": names})
        for i, names in enumerate(skills)
    ]
    data = write_problems(problems, tmp_path / "data" / "mathvista")
    paths = [records(tmp_path / name / "set" / "r.parquet", v, 5) for name, v in (("a", "101"), ("b", "011"))]
    out = tmp_path / "out.json"
    command = ["eval", "compare", *map(str, paths), "--json", str(out), "--data", str(data)]
    assert main([*command, "--by", "skills"]) == 0
    (compared,) = json.loads(out.read_text())["compared"]
    assert {key: (part["n"], part["score_a"], part["score_b"]) for key, part in compared["by_facet"].items()} == {
        "algebra": (2, 0.5, 0.5),
        "geometry": (1, 0.0, 1.0),
    }
    assert all(part["only_a"] == part["only_b"] == 0 for part in compared["by_facet"].values())
    printed = capsys.readouterr().out
    assert "    geometry: 0.0 -> 100.0" in printed and "['" not in printed


def test_a_split_of_one_set_leaves_the_others_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Results on several sets, and pass rates of one of them."""
    for name, verdicts in (("a", "10"), ("b", "11"), ("rates", "01")):
        for benchmark in ("one", "two") if name != "rates" else ("two",):
            path = records(tmp_path / name / "eval" / benchmark / "step-000000.parquet", verdicts, 5)
            path.with_suffix(".json").write_text("{}")
        (tmp_path / name / "config.yaml").touch()
    a, b, rates = (str(tmp_path / name) for name in ("a", "b", "rates"))
    out = tmp_path / "out.json"
    assert main(["eval", "compare", a, b, "--by-pass-rate", rates, "--json", str(out)]) == 0
    parts = [[*part["by_pass_rate"]] for part in json.loads(out.read_text())["compared"]]
    assert parts == [[], ["hard", "easy"]]
    one = str(tmp_path / "a" / "eval" / "one" / "step-000000.parquet")
    assert main(["eval", "compare", a, b, "--by-pass-rate", one]) == 0  # the set that its folder names
    capsys.readouterr()
    moved = records(tmp_path / "three" / "r.parquet", "11", 5)
    assert main(["eval", "compare", a, b, "--by-pass-rate", str(moved)]) == 2
    assert "--by-pass-rate has ['three'], and compared are ['one', 'two']" in capsys.readouterr().err


def test_the_benchmarks_own_number_is_compared_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two problems of We-Math, one gains half a point: 1/2 to 3/4. Records and scored files share their ids."""
    rows = [{"id": f"p{i}", "verdict": "correct", "length": 1, "category": f"c{i}"} for i in range(41)]
    ways = {
        "a": ("official", {"2steps_1": 1.0, "2steps_2": 0.0}),
        "b": ("strict", {"2steps_1": 1.0, "2steps_2": 0.5}),
    }
    for name, (rule, parts) in ways.items():
        mean = sum(parts.values()) / 2
        scores = {"score_strict": {"score": mean, "interval": [0.0, 1.0], "n": 2}}
        summary = {"benchmark": "wemath", "headline": "score_strict", "scores": scores, "headline_parts": parts}
        (tmp_path / f"{name}.json").write_text(json.dumps({**summary, "rule": rule, "rows": rows}))
    rows = [{**row, "problem_id": f"wemath-{row['id']}"} for row in rows]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    files, out = [str(tmp_path / name) for name in ("a.json", "b.parquet")], tmp_path / "out.json"
    assert main(["eval", "compare", *files, "--json", str(out)]) == 0
    tree = json.loads(out.read_text())
    cells = [row["cells"]["wemath"] for row in tree["table"]]
    assert [(cell["headline"], cell["score"], cell["accuracy"]) for cell in cells] == [
        ("score_strict", 0.5, 1.0),
        ("score_strict", 0.75, 1.0),
    ]
    (compared,) = tree["compared"]
    assert (compared["n"], compared["headline"]["score_strict"]["difference"]) == (41, 0.25)
    assert compared["other_settings"] == ["rule"] and len(compared["by_category"]) == 41
    printed = capsys.readouterr().out
    assert "score_strict 50.0 -> 75.0: +25.0 points" in printed and "different rule" in printed
    assert "41 categories: --json has them" in printed and "c40" not in printed


@pytest.mark.parametrize(
    ("change", "other"),
    [
        ({"accuracy_part": {"name": "judge", "model": "n"}}, ["accuracy_part"]),  # of the same rule
        ({"environment": {"name": "zoom"}}, ["environment"]),  # only named where there is one
        ({"environment": {"name": "zoom"}, "sampling": None}, []),  # a scored file does not say how it was asked
        ({}, []),
    ],
)
def test_what_was_not_asked_or_judged_alike_is_named(
    change: dict[str, Any], other: list[str], tmp_path: Path
) -> None:
    asked = {"rule": "reward.judge", "accuracy_part": {"name": "judge", "model": "m"}, "sampling": {"top_p": 1.0}}
    for name, summary in (("a", asked), ("b", asked | change)):
        summary = {key: value for key, value in summary.items() if value is not None}
        records(tmp_path / f"{name}.parquet", "10", 5).with_suffix(".json").write_text(json.dumps(summary))
    files, out = [str(tmp_path / f"{name}.parquet") for name in "ab"], tmp_path / "out.json"
    assert main(["eval", "compare", *files, "--json", str(out)]) == 0
    assert json.loads(out.read_text())["compared"][0]["other_settings"] == other


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a.parquet"], ["two results"]),
        (["a.parquet", "gone"], ["gone: there is no such file or folder", "check the path"]),
        (["a.parquet", "folder"], ["folder", "no results in it"]),
        (["a.parquet", "broken.json"], ["broken.json", "neither records", "vlm-rl score --json"]),
        (["a.parquet", "bare.json"], ["bare.json: its headline 'score_strict' has no score", "score again"]),
        (["beside.parquet", "a.parquet"], ["beside.json: its headline 'score_strict' has no score", "evaluate"]),
        (["a.parquet", "empty.json"], ["empty.json: the result on a has no rows", "score again"]),
        (["empty.parquet", "a.parquet"], ["empty.parquet: the result on", "has no rows", "evaluate"]),
        (["a.parquet", "a.parquet", "--by-pass-rate", "b.parquet"], ["b.parquet", "no problem of", "in common"]),
    ],
)
def test_what_cannot_be_compared_is_said(
    tmp_path: Path, monkeypatch, capsys, arguments: list[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    records(Path("a.parquet").absolute(), "1", 1)
    pq.write_table(
        pa.table({"problem_id": ["q"], "verdict": ["wrong"], "length": [1], "category": [""]}), "b.parquet"
    )
    pq.write_table(pq.read_table("b.parquet").slice(0, 0), "empty.parquet")
    Path("folder").mkdir()
    Path("broken.json").write_text("{}")
    Path("empty.json").write_text('{"benchmark": "a", "rows": []}')
    row = {"id": "p0", "verdict": "correct"}
    Path("bare.json").write_text(json.dumps({"benchmark": "a", "headline": "score_strict", "rows": [row]}))
    records(Path("beside.parquet").absolute(), "1", 1)
    Path("beside.json").write_text('{"benchmark": "a", "headline": "score_strict"}')
    assert main(["eval", "compare", *arguments]) == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words) and "Error(" not in message


def test_records_leave_in_the_formats_of_other_tools(tmp_path: Path) -> None:
    rows = [
        {
            "problem_id": "p0",
            "sample_index": k,
            "question": 'a\tb\n"c"',
            "gold": "4",
            "response": text,
            "extracted": "4" if k else None,
            "verdict": "correct" if k else "no_answer",
            "category": "c",
        }
        for k, text in enumerate(["first\nline", "4"])
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "r.parquet")
    base = ["eval", "export", str(tmp_path / "r.parquet")]
    assert main([*base, "--to", "vlmevalkit", "--out", str(tmp_path / "k.tsv")]) == 0
    with (tmp_path / "k.tsv").open(encoding="utf-8", newline="") as file:
        read = list(csv.DictReader(file, delimiter="\t"))
    assert [(r["index"], r["question"], r["answer"], r["prediction"], r["sample"]) for r in read] == [
        ("p0", 'a\tb\n"c"', "4", "first\nline", "0"),
        ("p0", 'a\tb\n"c"', "4", "4", "1"),
    ]
    assert main([*base, "--to", "lmms-eval", "--out", str(tmp_path / "l.jsonl")]) == 0
    (line,) = (tmp_path / "l.jsonl").read_text(encoding="utf-8").splitlines()
    tree = json.loads(line)
    assert (tree["resps"], tree["filtered_resps"], tree["acc"]) == ([["first\nline", "4"]], ["", "4"], 0.5)
    assert (tree["doc_id"], tree["target"], tree["doc"]["id"]) == (0, "4", "p0")
    assert main(["eval", "export", "gone.parquet", "--to", "lmms-eval", "--out", "x"]) == 2
