"""Every string that a run, an endpoint or an address can bring is shown as text and never acts on the page."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

import pytest

pytest.importorskip("gradio", reason="the demo extra is not installed")

from tests.helpers.browser import open_page
from tests.helpers.chat_server import chat_server
from tests.helpers.example_run import build_run
from tests.helpers.hostile import MARKUP, attack, attempt, hostile_run, watched
from tests.helpers.served import Served
from vlm_rl.demo.live.endpoints import Endpoint
from vlm_rl.demo.live.panel import LiveOptions
from vlm_rl.demo.server import make_server

ON_THE_CARD = (
    "problem", "question", "gold", "category", "reasoning", "response", "extracted", "path", "reason", "stop",
    "alone", "rule",
)  # fmt: skip
IN_THE_ROLLOUTS = ("alone", "rollout-prompt_id", "rollout-text", "rollout-verdict", "rollout-reason")
COMPARED = {"base": f"runs/{attack('alone')}@2", "others": f"{attack('rule')}/*@4"}
# elements that an attack would add, and an address that it would set
INJECTED = (
    "[onerror], [onload], img[src='x'], a[href^='javascript'], form[action], .card iframe, .card script:not([type])"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """Return a run, two seeds of one rule and a broken run, all with attacks as their names."""
    root = tmp_path_factory.mktemp("hostile")
    alone = hostile_run(
        root / "runs" / attack("alone"), steps=(2, 4)
    )  # no step 0: the page says at which step instead
    seeds = [hostile_run(root / attack("rule") / f"seed-{seed}", steps=(2, 4), seed=seed) for seed in (0, 1)]
    broken = build_run(root / attack("broken") / "seed-0", steps=1)  # the same last folder: names get their parents
    (broken.path / "config.yaml").write_text(f"algorithm: [{attack('yaml')}", encoding="utf-8")
    return [alone.path, *(run.path for run in seeds), broken.path]


@pytest.fixture(scope="module")
def served(runs) -> Iterator[Served]:
    with chat_server() as models:
        endpoints = [
            Endpoint(attack("endpoint"), models.url("hostile"), "m"),
            Endpoint("refuses", models.url("refuse"), attack("model")),
        ]
        server = Served(make_server(runs, live=LiveOptions(endpoints)))
        yield server
        server.stop()


harmless = partial(watched, foreign=INJECTED)


def missing(text: str, fields: tuple[str, ...]) -> list[str]:
    """Return the fields whose attack is not readable in the text of a page."""
    return [field for field in fields if attack(field) not in text]


@pytest.mark.turn(1, days=2)
def test_no_string_of_a_run_acts_in_the_first_panel_and_on_a_card(served, browser):
    with harmless(f"{served.url}?{urlencode(COMPARED)}", browser=browser) as visit:
        page = visit.page
        page.wait_for_selector("#overview .lead")
        overview, benchmark = page.inner_text("body"), page.locator("#control-benchmark input").input_value()
        page.click("button[role=tab]:has-text('Problems')")
        page.wait_for_selector("#problem .ckpt >> nth=1")
        card = page.inner_text("body")
    assert missing(overview, ("alone", "question", "broken", "contaminated")) == []
    assert missing(card, (*ON_THE_CARD, "broken", "contaminated")) == [] and benchmark == attack("benchmark")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tab", "ready", "fields"),
    [
        ("lengths", "#lengths figure >> nth=3", ("alone", "rule")),
        ("training", "#training .rollouts", IN_THE_ROLLOUTS),
        ("export", "#export input", ("alone", "rule")),
    ],
)
@pytest.mark.turn(1, days=2)
def test_no_string_of_a_run_acts_in_a_panel(served, browser, tab, ready, fields):
    with harmless(f"{served.url}?{urlencode(COMPARED | {'tab': tab})}", browser=browser) as visit:
        visit.page.wait_for_selector(ready)
        text = visit.page.inner_text("body")
    assert missing(text, (*fields, "broken", "contaminated")) == []


@pytest.mark.turn(0, days=2)
@pytest.mark.slow
def test_markup_that_would_get_past_the_templates_does_nothing(served, browser):
    """What it does without the page's policy, the report's test shows."""
    tried = partial(attempt, f"{served.url}?tab=problems", browser=browser, ready="#problem .ckpt")
    assert {markup: tried(markup) for markup in MARKUP} == dict.fromkeys(MARKUP, "refused")


@pytest.mark.slow
def test_no_name_acts_in_the_tooltip_and_the_legend_of_a_chart(served, browser):
    with harmless(f"{served.url}?{urlencode(COMPARED | {'tab': 'lengths'})}", browser=browser) as visit:
        figure = visit.page.locator("#lengths figure:has-text('How many tokens')")
        figure.locator(".mark-rect path").first.hover()
        tip, legend = visit.page.inner_text(".chart-tip"), figure.locator(".legend").inner_text()
    assert missing(tip, ("alone",)) == [] and missing(legend, ("alone", "rule")) == []


@pytest.mark.slow
def test_no_verdict_and_no_value_of_the_address_acts(served, browser):
    wanted = {
        **COMPARED, "benchmark": attack("other"), "text": attack("reasoning"), "at": f"2 {attack('problem')}",
        "category": attack("category"), "tab": "problems", "focus": attack("focus"), "runs": attack("runs"),
    }  # fmt: skip
    with harmless(f"{served.url}?{urlencode(wanted)}", browser=browser) as visit:
        visit.page.wait_for_selector("#problem .ckpt >> nth=1")
        text = visit.page.inner_text("body")
    assert missing(text, ("other", "verdict", "reasoning", "category")) == []


@pytest.mark.slow
def test_no_endpoint_acts_in_the_live_panel(served, browser):
    with harmless(f"{served.url}?tab=live", browser=browser) as visit:
        page = visit.page
        page.wait_for_selector("#live-ask")
        page.get_by_label("Question").fill(attack("asked"))
        page.get_by_label("Models to ask").click()
        page.get_by_role("option", name="endpoint").click()
        page.get_by_role("option", name="refuses").click()
        page.keyboard.press("Escape")
        page.click("#live-ask")
        page.wait_for_selector(".live-status b:text-is('done')")
        text = page.inner_text("#live-columns")
    assert missing(text, ("endpoint", "endpoint-reasoning", "endpoint-answer", "endpoint-error")) == []


@pytest.mark.slow
def test_nothing_acts_in_the_exported_page(served, browser, tmp_path):
    with open_page(f"{served.url}?{urlencode(COMPARED | {'tab': 'export'})}", browser=browser) as visit:
        with visit.page.expect_download() as download:
            visit.page.click("#export a[download='page.html']")
        place = tmp_path / "page.html"
        download.value.save_as(place)
    with harmless(place.as_uri(), browser=browser) as visit:
        text = visit.page.inner_text("body")
    assert missing(text, (*ON_THE_CARD, "formula", "verdict", "benchmark")) == []
    assert {markup: attempt(place.as_uri(), markup, browser=browser) for markup in MARKUP} == dict.fromkeys(
        MARKUP, "refused"
    )
