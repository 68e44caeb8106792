"""The pages beside the code name what is there, and the forge's workflow runs what .ci/run runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)")


@pytest.mark.parametrize("page", ["README.md", "AGENTS.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_a_link_leads_to_a_file(page: str) -> None:
    links = LINK.findall((ROOT / page).read_text(encoding="utf-8"))
    assert links and [link for link in links if not (ROOT / link).exists()] == []


def test_the_guide_names_what_is_there() -> None:
    guide = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    for name, file in re.findall(r"`(\w+)` in \[[\w.]+\]\(([\w/.]+)\)", guide):
        assert re.search(rf"^(def|class) {name}\b", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), name
    assert "collect" in re.findall(r"import (.*collect.*)", (ROOT / "vlm_rl" / "train.py").read_text())[0]
    for path in re.findall(r"pytest ((?:\S*/)+\S*)", guide):
        assert (ROOT / path).exists(), path


def test_the_workflow_runs_the_targets_of_ci() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    targets = {*re.findall(r"^ +step .* make --no-print-directory ([a-z-]+)$", script, re.MULTILINE)}
    targets |= {*re.findall(r"tests ([a-z-]+)\"$", script, re.MULTILINE)}
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    matrix = workflow["jobs"]["make"]["strategy"]["matrix"]["include"]
    assert {target for row in matrix for target in row["target"].split()} == targets and "test-slow" in targets
