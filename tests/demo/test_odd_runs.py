"""Runs whose files are not as our writers leave them: other columns, other types, half-written lines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("gradio", reason="the demo extra is not installed")

from tests.helpers.demo_events import show
from tests.helpers.example_run import build_run
from tests.helpers.rotation import todays
from tests.helpers.served import Served
from vlm_rl.demo.files.export import MEDIA_TYPES, export
from vlm_rl.demo.live.panel import read_examples
from vlm_rl.demo.numbers.library import Library
from vlm_rl.demo.numbers.url_state import TABS, UrlState
from vlm_rl.demo.panels.lengths import lengths_panel
from vlm_rl.demo.panels.overview import overview_panel
from vlm_rl.demo.panels.page_state import UNREADABLE, PageState, PageStates
from vlm_rl.demo.panels.problem import problem_panel
from vlm_rl.demo.panels.summary_cards import summary_html
from vlm_rl.demo.panels.training import training_panel
from vlm_rl.demo.server import make_server
from vlm_rl.errors import UserError
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.eval_record import EVAL_SCHEMA

ODD_VALUES: list[Any] = [
    [None], [{"a": [1]}], [[["x"]]], [b"\xff\x00"], [float("nan")], [2**62], [True], ["<b>\x00"], [1.5], [[]],
]  # fmt: skip


@contextmanager
def demo_of(run: RunDirectory) -> Iterator[httpx.Client]:
    server = Served(make_server([run.path]))
    try:
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
            yield client
    finally:
        server.stop()


def rewrite(path: Path, columns: Mapping[str, Any]) -> None:
    """Give the records of a Parquet file other columns, or more of them; a value is that of every row."""
    table = pq.read_table(path)
    for name, value in columns.items():
        column = pa.array(value * len(table))
        place = table.column_names.index(name) if name in table.column_names else None
        table = table.append_column(name, column) if place is None else table.set_column(place, name, column)
    pq.write_table(table, path)


def pages(client: httpx.Client) -> dict[str, str]:
    """Return what each tab shows. Every event must succeed, whatever it has to say."""
    answers = {tab: show(client, f"tab={tab}") for tab in TABS}
    assert all(answer["success"] for answer in answers.values())
    return {tab: json.dumps(answer["output"]["data"]) for tab, answer in answers.items()}


@pytest.mark.slow
def test_fifty_columns_of_odd_types_change_nothing(tmp_path, capfd):
    plain = build_run(tmp_path / "plain" / "run", steps=2, num_problems=4)
    odd = build_run(tmp_path / "odd" / "run", steps=2, num_problems=4)
    more = {f"column {index}": ODD_VALUES[index % len(ODD_VALUES)] for index in range(50)}
    for path in [*odd.path.glob("eval/*/*.parquet"), *odd.path.glob("rollouts/*.parquet")]:
        rewrite(path, more)
    metrics = (odd.path / "metrics.jsonl").read_text().splitlines()
    numbers = (int, float, type(None))  # a line of metrics with anything else is damaged, and left out
    odd_metrics = {f"odd/{index}": value for index, (value, *_) in enumerate(ODD_VALUES) if type(value) in numbers}
    lines = [json.dumps(json.loads(line) | odd_metrics) for line in metrics]
    (odd.path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with demo_of(plain) as first, demo_of(odd) as second:
        plainly = pages(first)
        assert pages(second) == plainly and "ckpt" in plainly["problems"]
        assert all(second.get(f"/export/{name}").status_code == 200 for name in MEDIA_TYPES)
        assert capfd.readouterr().err == ""


def test_problems_without_a_category_can_be_chosen(tmp_path):
    run = build_run(tmp_path / "run", steps=1, num_problems=2)
    for path in run.path.glob("eval/*/*.parquet"):
        table = pq.read_table(path)
        names = pa.array(["count", ""], table.schema.field("category").type)
        pq.write_table(table.set_column(table.column_names.index("category"), "category", names), path)
    with demo_of(run) as client:
        components = client.get("/config").json()["components"]
    props = next(c["props"] for c in components if c["props"].get("elem_id") == "control-category")
    states = PageStates(Library([run.path]))
    chosen = [UrlState(category=(key,)).query() for _, key in props["choices"]]  # as a link names it
    assert [states.of(UrlState.parse(query)).keep_P.tolist() for query in chosen] == [[True, False], [False, True]]


DRAWN: dict[str, Callable[[PageState], Any]] = {
    "overview": overview_panel,
    "problems": problem_panel,
    "summary": summary_html,
    "lengths": lengths_panel,
    "training": lambda state: training_panel(state.library, state.url, state.run_slots()),
    **{name: partial(export, name=name) for name in MEDIA_TYPES},
}
FILTERED = ("", "text=red", "flags=format&flags=cut", "category=count&low=1", "sort=growth", "change=changed")


OFTEN = "image"  # the other columns are slow tests, a third of them a day
OTHERS = todays((name for name in EVAL_SCHEMA.names if name != OFTEN), days=3)


@pytest.mark.parametrize("column", [OFTEN, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_column_of_another_type_is_read_or_named(tmp_path, column):
    run = build_run(tmp_path / "run", steps=1, num_problems=2)
    path = next(run.path.glob("eval/*/step-000000.parquet"))
    original = path.read_bytes()
    for value in ODD_VALUES:
        path.write_bytes(original)
        rewrite(path, {column: value})
        states = PageStates(Library([run.path]))
        for query in FILTERED:
            with suppress(*UNREADABLE):  # the page shows the message
                states.of(UrlState.parse(query))
        for draw in DRAWN.values():
            with suppress(*UNREADABLE):
                draw(states.of(UrlState()))


def test_a_column_that_cannot_be_read_is_named_with_its_file(tmp_path):
    run = build_run(tmp_path / "run", steps=1, num_problems=2)
    path = next(run.path.glob("eval/*/step-000000.parquet"))
    for value, said in (({"a": 1}, "verdict holds struct.* not string"), (None, "verdict has a row without a value")):
        rewrite(path, {"verdict": [value]})
        with pytest.raises(UserError, match=f"{path}: column {said}"):
            PageStates(Library([run.path])).of(UrlState(base="run@0"))


@pytest.mark.parametrize(
    "name", ["eval/toy-test/step-000000.parquet", "eval/toy-test/step-000001.parquet", "rollouts/step-000001.parquet"]
)
def test_a_damaged_file_of_one_run_leaves_the_others(tmp_path, name):
    """The page begins with the first run, whose file it is, and difficulty is that of step 0 in all runs."""
    broken, other = (build_run(tmp_path / run, steps=2, num_problems=2, eval_steps=(0, 1)) for run in ("a", "b"))
    (broken.path / name).write_bytes(b"PAR1")
    states = PageStates(Library([broken.path, other.path]))
    first = states.of(UrlState())
    assert {"b@0", "b@1"} & {*first.url.keys}
    shown = "".join([*(str(draw(first)) for draw in DRAWN.values()), *first.notes])
    assert str(broken.path / name) in shown
    alone = states.of(UrlState.parse("base=b@0&others=b@1"))
    assert alone.table.num_problems == 2 and not np.isnan(alone.table.base_rate_P).any()


@pytest.mark.parametrize("value", [5, "x", [5], [[[1]]]])
def test_images_of_other_types_are_no_examples(tmp_path, value):
    run, other = (build_run(tmp_path / name, steps=1, num_problems=2) for name in ("a", "b"))
    config = (run.path / "config.yaml").read_text()
    (run.path / "config.yaml").write_text(
        config.replace("models/tiny", "x" * 5000)
    )  # where a tokenizer is looked for
    for path in run.path.glob("eval/*/*.parquet"):
        rewrite(path, {"image": [value]})
    examples = read_examples([run, other])
    assert len(examples) == 2 and all(example.image for example in examples)
    assert Library([run.path, other.path]).checkpoints["toy-test"]["a@0"].counter is None


def test_a_run_whose_names_are_not_utf8_leaves_the_others(tmp_path):
    odd, other = (build_run(tmp_path / run, steps=1, num_problems=2) for run in ("a", "b"))
    (odd.path / "eval" / "toy-test").rename(odd.path / "eval" / os.fsdecode(b"\xff"))
    library = Library([odd.path, other.path])
    assert list(library.runs) == ["b"] and "\\udcff' is not UTF-8: rename it" in library.faults[0]
    assert library.faults[0].encode()


@pytest.mark.parametrize("count", [4, 3])
def test_an_evaluation_that_was_written_again_is_named(tmp_path, count):
    """Its texts belong to other lengths and verdicts than those that the demo has read: no page shows both."""
    run = build_run(tmp_path / "run", steps=1, eval_steps=(0, 1), num_problems=4)
    states = PageStates(Library([run.path]))
    before = states.of(UrlState.parse("base=run@0&others=run@1"))
    assert len(before.summaries) == 2
    rows = run.evals()[1].rows().to_pylist()
    run.write_eval("toy-test", 1, rows[::-1][:count], {"accuracy": 1.0})
    for draw in (problem_panel, overview_panel):
        with pytest.raises(UserError, match=r"step-000001\.parquet was written again .*start the demo again"):
            draw(states.of(before.url))
    assert len(states.of(UrlState.parse("base=run@0&text=squares")).order) == 4
