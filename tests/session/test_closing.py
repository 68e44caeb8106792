"""What a session has opened is closed, whatever fails: in its start, in the run, or while another part closes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from vlm_rl.config import parse_config
from vlm_rl.session import session as module
from vlm_rl.session.session import Session

PARTS = ("sampler", "accuracy", "reward", "host", "grader")
CHECKS = (
    *("resolve_algorithm", "load_problems", "check_media_limits", "check_divides", "check_fp8", "check_routing"),
    *("model_dtype", "check_a_prompt_fits", "check_boxes", "check_context", "prompts_to_check", "load_policy"),
    *("settled", "Speed", "Learner", "load_reference", "load_teacher", "RowBudget", "WeightSync", "GroupSampling"),
    *("make_source", "contaminated_sources", "Stages"),
)


class Opened:
    """A start whose parts write down what is closed, in order; `failing` raises there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, failing: str = "") -> None:
        self.closed: list[str] = []
        self.failing = failing
        for name in CHECKS:
            monkeypatch.setattr(module, name, MagicMock(name=name))
        monkeypatch.setattr(module, "load_problems", lambda _: ([], {"held-out": []}))
        monkeypatch.setattr(module, "max_gap", lambda *_: 1.0)
        policy, check = MagicMock(), SimpleNamespace(limit=1.0)
        monkeypatch.setattr(module, "load_policy", lambda *_, **__: (policy, check))
        prompt = SimpleNamespace(videos=(), images=())
        monkeypatch.setattr(module, "prompts_to_check", lambda *_: [prompt])
        opening = {"Grader": "grader", "open_host": "host", "RewardFunction": "reward", "open_accuracy": "accuracy"}
        for function, name in {**opening, "load_sampler": "sampler"}.items():
            monkeypatch.setattr(module, function, self.opens(name))
        self.recorder = MagicMock()
        monkeypatch.setattr(module, "Recorder", lambda *_: self.recorder)

    def opens(self, name: str) -> Any:
        part = MagicMock(name=name)

        def close() -> None:
            self.closed.append(name)
            if name == self.failing:
                raise RuntimeError(f"{name} does not close")

        part.close = close
        return lambda *_, **__: part

    def session(self, folder: Path) -> Session:
        tree = {"out": str(folder), "model": {"path": "m"}, "data": {"train": ["x"], "eval": ["y"]}}
        run = MagicMock(model_path=folder, contaminated=[], step=0)
        run.restore.return_value = None
        return Session(parse_config({**tree, "eval": {"every": 1}}), run)


def test_what_was_opened_before_a_start_failed_is_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a notebook the process goes on, with the card's memory and the processes of functions."""
    for function, num_open in {"check_media_limits": 2, "check_boxes": 4, "Learner": 4, "WeightSync": 5}.items():
        with monkeypatch.context() as patches:
            opened = Opened(patches)
            patches.setattr(module, function, MagicMock(side_effect=ValueError("refused")))
            with pytest.raises(ValueError, match="refused"):
                opened.session(tmp_path)
            assert sorted(opened.closed) == sorted(PARTS[-num_open:]), function


@pytest.mark.parametrize("failing", ["", *PARTS])
def test_a_part_that_does_not_close_keeps_none_of_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failing: str
) -> None:
    """What ended the run goes into its log, and what did not close is told besides."""
    opened, failure = Opened(monkeypatch, failing=failing), KeyError("the run's own")
    with pytest.raises(RuntimeError if failing else KeyError) as raised, opened.session(tmp_path):
        raise failure
    assert sorted(opened.closed) == sorted(PARTS) and opened.closed[0] == "sampler"
    opened.recorder.close.assert_called_once_with(failure)
    assert failure in (raised.value, raised.value.__context__)
