"""Mix prepared sets, read any table by a mapping, and find sets in the hub's cache."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vlm_rl import cli
from vlm_rl.data.images import encode_png
from vlm_rl.data_prep.mix_sets import allot, mix_sets
from vlm_rl.data_prep.options import Options
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.data_prep.readers.hub import locate
from vlm_rl.errors import UserError
from vlm_rl.toy.virl_layout import write_virl


def prepared(folder: Path, name: str, count: int, options: Options | None = None) -> Path:
    rows = [{"question": f"{name} {n}?", "qid": f"{name}-{n}", "source": "ab"[n % 2]} for n in range(count)]
    write_virl(folder / f"{name}-raw", rows, {})
    prepare("virl39k", folder / f"{name}-raw", folder / name, options or Options())
    return folder / name


def recipe(folder: Path, **tree: object) -> Path:
    file = folder / "mix.yaml"
    file.write_text(json.dumps(tree))  # JSON is YAML
    return file


def ids(folder: Path) -> list[str]:
    return pq.read_table(folder / "data.parquet")["id"].to_pylist()


# -- shares ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "available", "rows", "expected"),
    [
        ([3, 1], [100, 100], 40, [30, 10]),
        ([3, 1], [100, 100], None, [100, 33]),  # 100 / 3 = 33.3 units
        ([1, 1], [10, 100], 60, [10, 50]),  # the small set gives all, the other the rest
        ([1, 1, 1], [100, 100, 100], 10, [4, 3, 3]),
        ([1, 1], [5, 5], 99, [5, 5]),
        ([1, 1], [0, 5], 3, [0, 3]),
    ],
)
def test_shares(weights, available, rows, expected) -> None:
    assert allot(weights, available, rows) == expected


@given(
    sets=st.lists(st.tuples(st.floats(0.1, 9), st.integers(0, 50)), min_size=1, max_size=6), rows=st.integers(1, 200)
)
def test_shares_never_exceed_a_set_and_always_fill_the_rows(sets, rows) -> None:
    weights, available = [w for w, _ in sets], [n for _, n in sets]
    counts = allot(weights, available, rows)
    assert all(0 <= count <= have for count, have in zip(counts, available, strict=True))
    assert sum(counts) == min(rows, sum(available))


# -- mixes -----------------------------------------------------------------------------------------


def test_a_mix_has_its_shares_and_repeats_byte_for_byte(tmp_path) -> None:
    one, two = prepared(tmp_path, "one", 50), prepared(tmp_path, "two", 50)
    sets = [{"path": one.name, "weight": 3}, {"path": two.name, "weight": 1}]
    file = recipe(tmp_path, sets=sets, rows=20)
    mix_sets(file, tmp_path / "a")
    mix_sets(file, tmp_path / "b")
    assert (tmp_path / "a/data.parquet").read_bytes() == (tmp_path / "b/data.parquet").read_bytes()
    assert Counter(name.split("-")[0] for name in ids(tmp_path / "a")) == {"one": 15, "two": 5}
    assert (tmp_path / "a/report.html").is_file()
    mix_sets(recipe(tmp_path, sets=sets, rows=40), tmp_path / "larger")
    assert set(ids(tmp_path / "a")) < set(ids(tmp_path / "larger"))
    mix_sets(recipe(tmp_path, sets=sets, rows=20, seed=1), tmp_path / "other")
    assert set(ids(tmp_path / "other")) != set(ids(tmp_path / "a"))


def test_quotas_of_sets_and_sources(tmp_path) -> None:
    one, two = prepared(tmp_path, "one", 20), prepared(tmp_path, "two", 20)
    sets = [{"path": str(one), "quota": 5}, {"path": str(two)}]
    file = recipe(tmp_path, sets=sets, rows=100, quotas={"virl39k/a": 2})
    mix_sets(file, tmp_path / "out")
    rows = pq.read_table(tmp_path / "out/data.parquet").to_pylist()
    taken = Counter((row["id"].split("-")[0], row["source"]) for row in rows)
    assert taken[("one", "virl39k/a")] <= 2 and taken[("two", "virl39k/a")] == 2
    assert sum(n for (name, _), n in taken.items() if name == "one") == 5
    assert taken[("two", "virl39k/b")] == 10


def test_mixes_that_do_not_fit(tmp_path) -> None:
    one = prepared(tmp_path, "one", 4)
    prepared(tmp_path, "two", 1)  # of the source virl39k/a
    other = prepared(tmp_path, "other", 4, Options(max_pixels=50_176))
    with pytest.raises(UserError, match=r"prepared with max_pixels 50176, .* with 1003520"):
        mix_sets(recipe(tmp_path, sets=[{"path": "one"}, {"path": "other"}]), tmp_path / "out")
    with pytest.raises(UserError, match=r"'one-0' is in .*one and again"):
        mix_sets(recipe(tmp_path, sets=[{"path": "one"}, {"path": str(one)}]), tmp_path / "out")
    with pytest.raises(UserError, match="not a prepared set"):
        mix_sets(recipe(tmp_path, sets=[{"path": "none"}]), tmp_path / "out")
    with pytest.raises(UserError, match=r"no set has rows of the source 'virl39k/c'; known: virl39k/a, virl39k/b"):
        mix_sets(recipe(tmp_path, sets=[{"path": "one"}], quotas={"virl39k/c": 2}), tmp_path / "out")
    with pytest.raises(UserError, match="wieght"):
        mix_sets(recipe(tmp_path, sets=[{"path": "one", "wieght": 2}]), tmp_path / "out")
    for sets, quotas in (
        (["one"], {"virl39k/a": 0, "virl39k/b": 0}),
        (["one", "two"], {"virl39k/a": 0}),  # without rows, the set that has none decides
    ):
        file = recipe(tmp_path, sets=[{"path": name} for name in sets], quotas=quotas)
        with pytest.raises(UserError, match=rf"mix\.yaml: no row is left .* no row of \S*{sets[-1]};"):
            mix_sets(file, tmp_path / "out")
    facts = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps({**facts, "test_only": True}))
    with pytest.raises(UserError, match="is a benchmark"):
        mix_sets(recipe(tmp_path, sets=[{"path": "other"}]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_mixes(tmp_path, capsys) -> None:
    prepared(tmp_path, "one", 4)
    file = recipe(tmp_path, sets=[{"path": "one"}], rows=3)
    assert cli.main(["prepare", "mix", "--source", str(file), "--out", str(tmp_path / "out")]) == 0
    assert "3 rows: 3 of 4 from one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--against", "data/mathvista"], "--against: a mix is made of prepared sets as they are"),
        (["--max-prompt-tokens", "100"], "--max-prompt-tokens: a mix is made of prepared sets"),
        (["--question", "prompt"], "--question: a mix is made of prepared sets"),
        (["--keep-duplicates"], "--keep-duplicates: a mix is made of prepared sets"),
        (["--hold-out", "0.1"], "--hold-out: a mix is made of prepared sets"),
        (["--limit", "3"], "--limit: a mix says in its file how many rows"),
        (["--seed", "3"], "--seed: a mix says in its file how many rows"),
        (["--dry-run"], "--dry-run: a mix has no examples of its own"),
    ],
)
def test_the_command_refuses_what_a_mix_would_ignore(tmp_path, capsys, arguments, words) -> None:
    prepared(tmp_path, "a", 4)
    file = recipe(tmp_path, sets=[{"path": "a"}])
    assert cli.main(["prepare", "mix", "--source", str(file), "--out", str(tmp_path / "out"), *arguments]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_the_card_of_a_mix_says_what_its_sets_were_compared_with(tmp_path) -> None:
    bench = prepared(tmp_path, "bench", 1)
    prepared(tmp_path, "a", 4)
    prepared(tmp_path, "b", 3, Options(against=(bench,)))
    mix_sets(recipe(tmp_path, sets=[{"path": "a"}, {"path": "b"}]), tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert "a: Not compared with any benchmark (`--against SET` does).\n" in card
    assert "b: Compared with bench: 0 rows that share text or images with it were dropped.\n" in card


def test_sets_in_folders_of_one_name_are_counted_apart(tmp_path) -> None:
    (tmp_path / "a").mkdir()
    prepared(tmp_path, "train", 4).rename(tmp_path / "a/train")
    prepared(tmp_path, "more", 6).rename(tmp_path / "train")
    report = mix_sets(recipe(tmp_path, sets=[{"path": "a/train"}, {"path": "train"}], rows=10), tmp_path / "out")
    assert str(report).endswith("10 rows: 4 of 4 from a/train, 6 of 6 from train")


# -- generic ---------------------------------------------------------------------------------------

PICTURE = encode_png(Image.new("RGB", (84, 84), "green"))
COLUMNS = {"question": "prompt", "answer": "gold", "images": "pics", "choices": "options", "difficulty": "rate"}


def generic(folder: Path, rows: list[dict], kind: str) -> Path:
    raw = folder / "raw"
    raw.mkdir()
    if kind == "jsonl":
        (raw / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), raw / "rows.parquet")
    else:
        import datasets

        datasets.Dataset.from_list(rows).save_to_disk(str(raw))
    file = folder / "set.yaml"
    file.write_text(json.dumps({"path": "raw", "source": "mine", "columns": COLUMNS}))
    return file


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "datasets"])
def test_any_table_with_a_mapping(tmp_path, kind) -> None:
    picture = "a.png" if kind == "jsonl" else {"bytes": PICTURE, "path": None}
    rows = [
        {"prompt": "Which?", "gold": "B", "pics": [picture], "options": ["one", "two"], "rate": 0.5},
        {"prompt": "How many? <image>", "gold": "7", "pics": [picture], "options": [], "rate": None},
    ]
    file = generic(tmp_path, rows, kind)
    (tmp_path / "raw" / "a.png").write_bytes(PICTURE)
    report = prepare("generic", file, tmp_path / "out", Options(strict=True))
    first, second = pq.read_table(tmp_path / "out/data.parquet").to_pylist()
    assert report.kept == 2
    assert first["question"] == "<image>\nWhich?\nChoices:\n(A) one\n(B) two"
    assert (first["answer_type"], first["choices"], first["difficulty"]) == ("choice", ["one", "two"], 0.5)
    assert (second["answer_type"], second["difficulty"], second["source"]) == ("integer", -1.0, "mine")
    assert first["images"][0]["bytes"] == PICTURE


def test_mistakes_in_a_mapping_name_the_key(tmp_path) -> None:
    file = generic(tmp_path, [{"prompt": "a", "gold": "1"}], "jsonl")
    with pytest.raises(UserError, match=r"columns names 'pics', but the table has \['gold', 'prompt'\]"):
        prepare("generic", file, tmp_path / "out")
    file.write_text(json.dumps({"path": "raw", "source": "x", "columns": {"question": "prompt", "anwser": "gold"}}))
    with pytest.raises(UserError, match=r"unknown key columns\.anwser.*answer"):
        prepare("generic", file, tmp_path / "out")
    file.write_text(json.dumps({"path": "row", "source": "x", "columns": {"question": "prompt", "answer": "gold"}}))
    with pytest.raises(UserError, match=r"set\.yaml: path 'row' does not exist"):
        prepare("generic", file, tmp_path / "out")
    with pytest.raises(UserError, match="described by a YAML file"):
        prepare("generic", tmp_path / "raw", tmp_path / "out")


# -- the hub ---------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_pinned_revision_in_the_cache_needs_no_network(tmp_path, monkeypatch, capsys) -> None:
    snapshot = tmp_path / "hub" / "datasets--TIGER-Lab--ViRL39K" / "snapshots" / COMMIT
    snapshot.parent.mkdir(parents=True)
    write_virl(snapshot, [{}], {})
    monkeypatch.chdir(tmp_path)
    command = ["prepare", "virl39k", "--source", "TIGER-Lab/ViRL39K", "--revision", COMMIT, "--out", "out"]
    monkeypatch.setattr("vlm_rl.data_prep.readers.hub.CACHE", str(tmp_path / "hub"))
    assert cli.main(command) == 0, capsys.readouterr().err
    assert json.loads((tmp_path / "out/manifest.json").read_text())["revision"] == COMMIT


def test_a_generic_table_may_lie_on_the_hub(tmp_path, monkeypatch, capsys) -> None:
    snapshot = tmp_path / "hub" / "datasets--me--mine" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "rows.jsonl").write_text('{"prompt": "How many?", "gold": "7"}\n')
    monkeypatch.setattr("vlm_rl.data_prep.readers.hub.CACHE", str(tmp_path / "hub"))
    tree = {"path": "me/mine", "source": "mine", "columns": {"question": "prompt", "answer": "gold"}}
    file = tmp_path / "set.yaml"
    file.write_text(json.dumps(tree))
    command = ["prepare", "generic", "--source", str(file), "--out", str(tmp_path / "out")]
    assert cli.main(command) == 2
    assert "if it is a hub id, pin it with revision: COMMIT" in " ".join(capsys.readouterr().err.split())
    file.write_text(json.dumps({**tree, "revision": COMMIT}))
    assert cli.main(command) == 0, capsys.readouterr().err
    facts = json.loads((tmp_path / "out/manifest.json").read_text())
    assert (facts["revision"], [entry["name"] for entry in facts["files"]]) == (COMMIT, ["set.yaml", "rows.jsonl"])


def test_a_hub_id_wants_a_revision_and_a_local_path_none(tmp_path) -> None:
    with pytest.raises(UserError, match="--revision COMMIT"):
        locate("TIGER-Lab/ViRL39K", "")
    with pytest.raises(UserError, match="only a hub id has one"):
        locate(str(tmp_path), COMMIT)
    with pytest.raises(UserError, match="not in the cache"):
        locate("nobody/nothing", COMMIT)
