"""Pins and notes: what the file keeps through several writers, damage and hostile text, and where pages show them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest

pytest.importorskip("gradio", reason="the demo extra is not installed")

from tests.helpers.browser import open_browser, open_page
from tests.helpers.demo_events import arrival, run_event
from tests.helpers.example_run import build_run
from tests.helpers.hostile import HOSTILE, attack
from tests.helpers.served import Served
from vlm_rl.demo.default_runs import RECORDED, notes_file
from vlm_rl.demo.files.bundle import write_bundle
from vlm_rl.demo.files.export import export
from vlm_rl.demo.numbers.library import Library
from vlm_rl.demo.numbers.url_state import UrlState
from vlm_rl.demo.panels.page_state import PageState, PageStates
from vlm_rl.demo.panels.pins import MAX_BYTES, MAX_NOTE, PinFile
from vlm_rl.demo.panels.problem import problem_panel
from vlm_rl.demo.panels.table import table_panel
from vlm_rl.demo.server import make_server
from vlm_rl.demo.web.access import Access
from vlm_rl.errors import UserError

TOKEN = "a token of enough characters"
GOOD = {
    "id": "0" * 16, "time": "2026-05-04T12:00:00Z", "benchmark": "toy-test", "problem": "toy-test-0003",
    "checkpoint": "run@4", "note": "counts row b twice",
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return build_run(tmp_path_factory.mktemp("pins") / "run", steps=4, num_problems=6).path


@pytest.fixture
def pins(tmp_path) -> PinFile:
    return PinFile(tmp_path / "notes.jsonl", is_writable=True)


def pin(pins: PinFile, problem: str, *, checkpoint: str = "", note: str = "") -> None:
    pins.add(benchmark="toy-test", problem=problem, checkpoint=checkpoint, note=note)


def page(run: Path, pins: PinFile, query: str = "") -> PageState:
    return PageStates(Library([run]), pins=pins).of(UrlState.parse(query))


# -- the file ------------------------------------------------------------------------------------


def test_what_was_pinned_is_there_for_the_next_demo_until_it_is_removed(pins):
    assert pins.read() == () and not pins.path.exists()  # nothing is written before somebody pins
    pin(pins, "p1", note="  two\nlines  ")
    pin(pins, "p1", checkpoint="a@4")
    pin(pins, "p1", checkpoint="a@4")  # without a note, twice is once
    found = PinFile(pins.path, is_writable=False).read()
    assert [(one.problem, one.checkpoint, one.note) for one in found] == [("p1", "", "two\nlines"), ("p1", "a@4", "")]
    pins.remove(found[0].id)
    pins.remove("no such pin")
    assert pins.read() == found[1:]


def test_writers_at_the_same_time_lose_nothing_of_each_other(pins):
    writers = [PinFile(pins.path, is_writable=True) for _ in range(6)]  # a lock each, as separate processes have
    with ThreadPoolExecutor(len(writers)) as pool:
        list(pool.map(lambda n: pin(writers[n % 6], f"p{n}", note=f"note {n}"), range(60)))
    assert {one.note for one in pins.read()} == {f"note {n}" for n in range(60)}
    assert {path.name for path in pins.path.parent.iterdir()} == {"notes.jsonl", ".notes.jsonl.lock"}


@pytest.mark.parametrize(
    "line",
    [
        "{", "[]", "null", '"text"', json.dumps(GOOD | {"note": 5}), json.dumps(GOOD | {"more": 1}),
        json.dumps(GOOD | {"note": "x" * (MAX_NOTE + 1)}), json.dumps(GOOD | {"id": "../x"}),
        json.dumps(GOOD | {"time": "yesterday"}), json.dumps({**GOOD, "problem": None}), "[" * 5000,
        json.dumps({name: value for name, value in GOOD.items() if name != "benchmark"}),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named_by_its_line_and_never_written(run, pins, line):
    text = f"{json.dumps(GOOD)}\n\n{line}\n"
    pins.path.write_text(text)
    with pytest.raises(UserError, match=re.escape(f"{pins.path}:3 is not a note")) as caught:
        pins.read()
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="is not a note"):
        pin(pins, "p1", note="lost otherwise")
    assert pins.path.read_text() == text
    state = page(run, pins)  # the page shows everything else
    assert len(state.order) == 6 and not state.can_pin and "notes.jsonl:3" in state.notes[0]


def test_what_is_no_file_of_notes_is_refused(pins):
    pins.path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(UserError, match=":1 is not a note"):
        pins.read()
    with pins.path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(UserError, match="at most 1,048,576: move it away"):
        pins.read()
    pins.path.unlink()
    pins.path.mkdir()
    with pytest.raises(UserError, match="is not a file"):
        pins.read()
    below = PinFile(Path("/dev/null/notes.jsonl"), is_writable=True)
    with pytest.raises(UserError, match="could not be written to /dev/null/notes"):
        pin(below, "p1")


def test_notes_and_their_file_are_bounded(pins):
    with pytest.raises(UserError, match="at most 2,000 characters, and this one 2,001"):
        pin(pins, "p1", note="x" * (MAX_NOTE + 1))
    line = json.dumps(GOOD | {"note": "é" * MAX_NOTE}, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    pins.path.write_bytes(line * (MAX_BYTES // len(line)))
    full = pins.path.read_bytes()
    with pytest.raises(UserError, match="is full"):
        pin(pins, "toy-test-0003", checkpoint="run@4", note="é" * MAX_NOTE)  # a line as long
    assert pins.path.read_bytes() == full
    pins.remove(GOOD["id"])
    assert pins.read() == ()


def test_the_file_is_beside_the_first_run(run, tmp_path, monkeypatch):
    beside = run.parent / "demo_notes.jsonl"
    assert notes_file([run, tmp_path]) == notes_file([run.parent]) == beside  # a run, and a folder of runs
    monkeypatch.chdir(run)
    assert notes_file([Path()]) == beside
    assert notes_file([RECORDED]) == Path("runs/demo_notes.jsonl")  # not among the installed files


# -- the pages -----------------------------------------------------------------------------------


def test_pins_are_shown_filtered_and_exported(run, pins):
    pin(pins, "toy-test-0003", checkpoint="run@4", note="row b\ntwice")
    pin(pins, "toy-test-0001")
    pin(pins, "elsewhere")  # of other runs of this benchmark
    pins.add(benchmark="other", problem="toy-test-0002", checkpoint="", note="")
    state = page(run, pins, "pinned=yes&base=run@0&others=run@4")
    assert [state.table.ids[p] for p in state.order] == ["toy-test-0001", "toy-test-0003"]
    assert "2 pinned" in table_panel(page(run, pins)) and table_panel(state).count('class="pin"') == 2
    shown = problem_panel(page(run, pins, "at=toy-test-0003&base=run@0&others=run@4"))
    assert "row b\ntwice" in shown and "★ Pinned" in shown and f'data-unpin="{pins.read()[0].id}"' in shown
    exported = export(state, "page.html").decode()
    assert "row b\ntwice" in exported and "data-unpin" not in exported


def test_a_note_is_text_wherever_it_is_shown(run, pins):
    pin(pins, "toy-test-0000", note=attack("note") + HOSTILE)
    state = page(run, pins)
    for html in (problem_panel(state), table_panel(state), export(state, "page.html").decode()):
        assert "<img src=x" not in html and "<svg/onload" not in html and "\u202e" not in html
    assert "note&#34;&#39;&gt;&lt;img src=x onerror=alert" in problem_panel(state)


# -- the event -----------------------------------------------------------------------------------


@pytest.fixture
def client(run, pins) -> Iterator[httpx.Client]:
    server = Served(make_server([run], pins=pins))
    with httpx.Client(base_url=server.url, timeout=30, trust_env=False) as client:
        yield client
    server.stop()


def pin_event(client: httpx.Client) -> dict[str, Any]:
    """Return the body of the event that pins, without what is pinned."""
    dependencies = client.get("/config").json()["dependencies"]
    index = next(event["id"] for event in dependencies if any(name == "pin" for _, name in event["targets"]))
    return {"fn_index": index, "data": ["base=run@0&others=run@4"]}


def test_the_event_pins_what_is_shown_and_nothing_else(client, pins):
    body = pin_event(client)

    def send(data: Any) -> str:
        answer = run_event(client, body | {"event_data": data})
        assert answer["success"]
        return json.dumps(answer["output"])

    for nothing in (None, {}, {"patch": ""}, {"patch": "&".join(f"k{n}=1" for n in range(99))}, {"patch": "note=x"}):
        send(nothing)
    assert not pins.path.exists()
    for gone in ("problem=nowhere", "problem=toy-test-0001&checkpoint=run@9", "problem=../../etc/passwd"):
        assert "no longer shown" in send({"patch": gone})
    assert not pins.path.exists()
    assert "shorten it" in send({"patch": urlencode({"problem": "toy-test-0001", "note": "x" * 2001})})
    send({"patch": "problem=toy-test-0001&checkpoint=run@4&note=%ff%00\x00 \ud7ff"})
    assert [(one.problem, one.checkpoint) for one in pins.read()] == [("toy-test-0001", "run@4")]
    send({"patch": f"remove={pins.read()[0].id}"})
    assert pins.read() == ()


def test_where_visitors_log_in_notes_are_shown_and_none_are_taken(run, pins):
    pin(pins, "toy-test-0000", note="by its owner")
    shared = PinFile(pins.path, is_writable=False)  # as `launch` opens it for them
    server = Served(make_server([run], access=Access(token=TOKEN), pins=shared))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=server.url, timeout=30, trust_env=False, headers=headers) as client:
        panels = json.dumps(run_event(client, arrival(client, ""))["output"])
        refused = run_event(client, pin_event(client) | {"event_data": {"patch": "problem=toy-test-0001"}})
    server.stop()
    assert "by its owner" in panels and "data-pin" not in panels and "data-unpin" not in panels
    assert "shows notes and takes none" in json.dumps(refused["output"])
    assert [one.note for one in pins.read()] == ["by its owner"]


# -- in the browser ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_reader_pins_by_keyboard_and_a_second_tab_and_the_bundle_show_it(run, pins, tmp_path):
    server = Served(make_server([run], pins=pins))
    with open_browser() as browser:
        with open_page(server.url, browser=browser) as first, open_page(server.url, browser=browser) as second:
            one, other = first.page, second.page
            other.wait_for_selector("#problem .ckpt")
            one.wait_for_selector("#problem .ckpt")
            one.keyboard.press("n")
            one.keyboard.type("n is <b>a letter</b> here")
            one.keyboard.press("Control+Enter")
            one.wait_for_selector(".pins .note:text-is('n is <b>a letter</b> here')")
            other.keyboard.press("ArrowRight")
            other.wait_for_selector(".bar .at:text-is('toy-test-0001')")
            other.focus(".pin-box summary")
            other.keyboard.press("Enter")
            other.select_option(".pin-form select", "run@4")
            other.focus("[data-pin]")
            other.keyboard.press("Enter")
            other.wait_for_selector(".pins li b:has-text('step 4')")
            other.keyboard.press("t")
            other.click("button:has-text('★ 2 pinned')")
            other.wait_for_function("document.querySelectorAll('.problems tbody tr').length === 2")
            one.focus("[data-unpin]")
            one.keyboard.press("Enter")
            one.wait_for_selector(".pin-box summary:text-is('☆ Pin')")
            assert first.failures == second.failures == []
        assert [(found.problem, found.checkpoint) for found in pins.read()] == [("toy-test-0001", "run@4")]
        pin(pins, "toy-test-0002", note=attack("note"))
        write_bundle([run], tmp_path / "site", notes=pins.path)
        with open_page((tmp_path / "site/index.html").as_uri(), browser=browser) as visit:
            visit.page.wait_for_selector(".ckpt")
            visit.page.select_option("select[data-name=pinned]", "yes")
            visit.page.wait_for_selector("[data-count]:text-is('2 of 6 problems')")
            visit.page.keyboard.press("ArrowRight")
            visit.page.wait_for_selector(".pins li")
            assert (
                attack("note") in visit.page.inner_text(".pins") and visit.page.locator("[data-unpin]").count() == 0
            )
            visit.page.keyboard.press("t")
            visit.page.wait_for_function("document.querySelectorAll('.problems tbody .pin').length === 2")
            assert visit.failures == []
    server.stop()
