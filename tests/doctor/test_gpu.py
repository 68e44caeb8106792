"""The doctor's page on a GPU: `pytest -m gpu`."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
import torch

from vlm_rl import cli
from vlm_rl.doctor.apart import GROUPS
from vlm_rl.doctor.machine import MACHINE_CHECKS

NAMES = [check.__name__.replace("_", " ") for check in MACHINE_CHECKS] + [n for group in GROUPS for n in group.checks]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    folder = tmp_path_factory.mktemp("doctor")
    with suppress(SystemExit):  # where something is off, the test of its name says what
        cli.main(["doctor", "--runs", str(folder), "--json", str(folder / "answers.json")])
    return {answer["name"]: answer for answer in json.loads((folder / "answers.json").read_text())}


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_every_check_passes(name: str, answers: dict[str, dict[str, str]]) -> None:
    assert answers[name]["outcome"] == "ok", answers[name]
