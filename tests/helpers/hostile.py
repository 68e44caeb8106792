"""Text that attacks the page that shows it, and a run that holds it in every string a run can bring."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.example_run import build_run
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.rollout_row import RolloutRow

HOSTILE = (
    "<script>window.pwned=1</script><img src='http://evil.example/x.png' onerror='window.pwned=1'>"
    "<form action='http://evil.example'><input></form></div></section> ![x](http://evil.example/y.png) "
    "${window.pwned=1} {{constructor}} \x00\u202e <svg/onload=window.pwned=1> <style>body{display:none}</style>"
)


def attack(field: str) -> str:
    """Return markup that would run a script and tell `field`. It has no slash, so that a folder can be called so."""
    return f"{field}\"'><img src=x onerror=alert('{field}')>"


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
        "cluster": None,
        "image": None,
        "question": f"<image> {attack('question')}",
    }
