"""What vLLM computes on a GPU alone: its models take the learner's weights by name, and the proof reads them back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.rotation import todays
from tests.helpers.toy_runs import Runner

GPU_ONLY = todays(["gemma3", "qwen3_5", "gemma4", "qwen3_5_moe", "qwen3_next"], days=5)


@pytest.mark.turn(1, days=2)
@pytest.mark.slow
def test_engines_of_one_and_two_ranks_hold_every_weight(
    family_model: Callable[[str], Path], runner: Runner, tmp_path: Path
) -> None:
    """Every weight of the engine is loaded, the checksum is the learner's, and a change of any weight changes it.

    Queries, keys, values and gates in one tensor, convolutions over three of them, keys that are values too.
    """
    pytest.importorskip("vllm")
    folders = [family_model(name) for name in GPU_ONLY]
    out = tmp_path / "results.json"
    done = runner("vllm", out, *folders, module="tests.helpers.engine_model_worker", ranks=2, deadline=500)
    assert done.code == 0, done.output[-3000:]
    whole = {"missing": [], "proof": True, "unseen": []}
    assert json.loads(out.read_text()) == {name: {"1": whole, "2": whole} for name in GPU_ONLY}
