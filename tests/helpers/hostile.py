"""Text that attacks the page that shows it, a run that holds it in every string a run can bring, and what it did.

with watched("file:///page.html", browser=browser, foreign="img[onerror]") as visit:
    ...                                     # at the end nothing may have run, been added or been asked for
assert attempt("file:///page.html", "<svg onload='pwned=1'></svg>", browser=browser) == "refused"
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers.browser import Visit, open_page
from tests.helpers.example_run import build_run
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.rollout_row import RolloutRow

HOSTILE = (
    "<script>window.pwned=1</script><img src='http://evil.example/x.png' onerror='window.pwned=1'>"
    "<form action='http://evil.example'><input></form></div></section> ![x](http://evil.example/y.png) "
    "${window.pwned=1} {{constructor}} \x00\u202e <svg/onload=window.pwned=1> <style>body{display:none}</style>"
)

_ELSEWHERE = "http://elsewhere.example/x"
# Markup -> what it does on a page that allows it. Which events a browser fires for an element that is added later
# depends on its age: Chromium 156 fires no `load` for an <svg>, older ones do. So `attempt` dispatches them itself.
MARKUP = {
    "<img src=x onerror='pwned=1'>": "ran",
    "<svg onload='pwned=1'></svg>": "ran",
    "<iframe srcdoc='<script>parent.pwned=1</script>'></iframe>": "ran",
    "<a href='javascript:void(pwned=1)'>a link</a>": "ran",
    f"<img src='{_ELSEWHERE}'>": "left",
    f"<iframe src='{_ELSEWHERE}'></iframe>": "left",
}


def attack(field: str) -> str:
    """Return markup that would run a script and tell `field`. It has no slash, so that a folder can be called so."""
    return f"{field}\"'><img src=x onerror=alert('{field}')>"


_NOTE_REFUSALS = "document.addEventListener('securitypolicyviolation', () => { top.refused = true; });"
_ADD = """
(markup) => {
  window.refused = false;
  const place = document.body.appendChild(document.createElement('div'));
  place.innerHTML = markup;
  for (const element of place.querySelectorAll('*'))
    for (const {name} of [...element.attributes])
      if (name.startsWith('on')) element.dispatchEvent(new Event(name.slice(2)));
  place.querySelector('a')?.click();
}
"""


def attempt(address: str, markup: str, *, browser: Any, ready: str = "body", without_policy: bool = False) -> str:
    """Add markup to a page past its templates, and return what became of it as soon as something has.

    That is "ran" for a script, "left" for a request to another host, "refused" for what the page's policy blocked.

    Args:
        address: of the page.
        markup: one of MARKUP.
        browser: as for `open_page`.
        ready: a selector of what the page is complete with.
        without_policy: let the browser ignore the page's policy.
    """
    left: list[str] = []

    def note(route: Any) -> None:  # only what the policy lets through comes here
        left.append(route.request.url)
        route.abort()

    with open_page("about:blank", browser=browser, without_policy=without_policy) as visit:
        visit.page.context.add_init_script(_NOTE_REFUSALS)  # in frames too
        visit.page.context.route(f"{_ELSEWHERE}**", note)
        visit.page.goto(address)
        visit.page.wait_for_selector(ready)
        visit.page.evaluate(_ADD, markup)
        deadline, signs = time.monotonic() + 60, ""
        while not signs:
            assert time.monotonic() < deadline, f"nothing became of {markup}"
            visit.page.wait_for_timeout(50)
            ran, refused = visit.page.evaluate("[window.pwned !== undefined, window.refused]")
            signs = " and ".join(["ran"] * ran + ["left"] * bool(left) + ["refused"] * refused)
        return signs


@contextmanager
def watched(address: str, *, browser: Any, foreign: str, **window: Any) -> Iterator[Visit]:
    """Visit an address; at the end nothing on it may have run, been added, been asked for or failed.

    Args:
        address: of the page. It may ask for what is below it, without its query; an index.html for what is beside it.
        browser: as for `open_page`.
        foreign: a selector of the elements that only an attack adds.
        window: more for `open_page`.
    """
    with open_page("about:blank", browser=browser, **window) as visit:
        dialogs: list[str] = []

        def note(dialog: Any) -> None:
            dialogs.append(dialog.message)
            dialog.dismiss()

        visit.page.on("dialog", note)
        visit.page.set_default_timeout(30_000)
        visit.page.goto(address)
        yield visit
        visit.page.wait_for_timeout(300)  # an image that does not load reports its error a moment later
        allowed = (address.partition("?")[0].removesuffix("index.html"), "blob:", "about:")
        found = {
            "dialogs": dialogs,
            "scripts": ["pwned"] * (visit.page.evaluate("window.pwned") is not None),
            "elements": visit.page.locator(foreign).evaluate_all("found => found.map((one) => one.outerHTML)"),
            "requests": [request for request in visit.requests if not request.startswith(allowed)],
            "failures": visit.failures,
        }
        assert not any(found.values()), found


def hostile_run(path: Path, *, steps: tuple[int, ...], seed: int = 0) -> RunDirectory:
    """Write a run with an attack in every string of its files.

    `steps` are its evaluations; the first problem is right in the last one only.
    """
    run = build_run(path, steps=4, seed=seed, eval_steps=())
    config = (run.path / "config.yaml").read_text(encoding="utf-8")
    config = config.replace("models/tiny", json.dumps(attack("model"))).replace(
        "data/toy-test", json.dumps(attack("set"))
    )
    (run.path / "config.yaml").write_text(config, encoding="utf-8")
    for step in steps:
        rows = [_evaluated(index, right=step == steps[-1] and index == 0) for index in range(3)]
        run.write_eval("benchmark", step, rows, {"template": attack("template"), "model": attack("summary-model")})
    (run.path / "eval" / "benchmark").rename(run.path / "eval" / attack("benchmark"))
    run.stamp_contaminated([attack("contaminated")])
    texts = ("prompt_id", "text", "verdict", "reason", "stop_reason", "extracted", "path")
    attacks = {column: attack(f"rollout-{column}") for column in texts}
    run.write_rollouts(4, 1, [RolloutRow(**(row | attacks)) for row in run.rollouts(4).to_pylist()])
    return run


def _evaluated(index: int, *, right: bool) -> dict[str, object]:
    """Return one row of an evaluation; the verdict of the last problem is an attack too."""
    text = attack("response") + rf" \boxed{{\href{{javascript:alert('link')}}{{x}}}} ${attack('formula')}$"
    return {
        "problem_id": f"{index} {attack('problem')}",
        "sample_index": 0,
        "prompt_text": attack("prompt"),
        "response": f"<think>{attack('reasoning')}{HOSTILE}</think>{text}",
        "length": 20 + 9 * right + index,
        "stop_reason": attack("stop"),
        "extracted": attack("extracted"),
        "gold": attack("gold"),
        "verdict": "correct" if right else attack("verdict") if index == 2 else "wrong",
        "path": attack("path"),
        "reason": attack("reason"),
        "has_box": True,
        "category": attack("category"),
        "image_sha256": [attack("sha")],
        "image_sizes": [],
        "turns": None,
        "cluster": None,
        "image": None,
        "question": f"<image> {attack('question')}",
    }
