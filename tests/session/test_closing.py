"""What a session has opened is closed, whatever fails: in its start, in the run, or while another part closes."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from vlm_rl.config import Config, parse_config
from vlm_rl.errors import StoppedError, UserError
from vlm_rl.session import session as module
from vlm_rl.session.recorder import Recorder
from vlm_rl.session.run import Run
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

    def session(self, folder: Path, run: MagicMock | None = None) -> Session:
        tree = {"out": str(folder), "model": {"path": "m"}, "data": {"train": ["x"], "eval": ["y"]}}
        run = MagicMock(model_path=folder, contaminated=[], step=0) if run is None else run
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


def test_a_start_that_fails_once_the_run_s_files_are_open_is_in_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The next run of the process would write into that log too, and trackers would wait for more."""
    refusal = ValueError("refused")
    for name in ("listen", "keep_checkpoints", "grader", "log_line"):
        with monkeypatch.context() as patches:
            opened = Opened(patches)
            run = MagicMock(model_path=tmp_path, contaminated=[], step=0)
            if name == "grader":
                patches.setattr(module, "Grader", lambda *_, **__: MagicMock(start=MagicMock(side_effect=refusal)))
            elif name == "log_line":
                patches.setattr(module, "Stages", lambda: SimpleNamespace(lines=["data"], done=lambda *_: None))
                opened.recorder.log_line.side_effect = refusal
            else:
                getattr(run, name).side_effect = refusal
            with pytest.raises(ValueError, match="refused"):
                opened.session(tmp_path, run)
            opened.recorder.close.assert_called_once_with(refusal)
            assert "sampler" in opened.closed, name


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


def a_config(out: Path) -> Config:
    return parse_config({"out": str(out), "model": {"path": "m"}, "data": {"train": ["x"]}})


def test_a_log_that_the_disk_refuses_is_closed_all_the_same(tmp_path: Path) -> None:
    """Else the next run of the process would write into it."""
    (tmp_path / "log.txt").mkdir()
    directory = SimpleNamespace(path=tmp_path, metrics=list)
    run: Any = SimpleNamespace(directory=directory, step=0, close_trackers=lambda: ["tensorboard: sent"])
    handlers = list(logging.getLogger().handlers)
    recorder = Recorder(run, a_config(tmp_path))
    with pytest.raises(UserError, match=r"log\.txt could not be written"):
        recorder.close()
    assert logging.getLogger().handlers == handlers


def test_trackers_that_nothing_else_closes_are_closed_with_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(a_config(tmp_path / "run"), resume=False)
    run.tracking = MagicMock(close=lambda: ["tensorboard: sent"])
    with pytest.raises(ValueError, match="refused"), run:
        raise ValueError("refused")
    assert capsys.readouterr().err == "tensorboard: sent\n"


def test_what_gave_up_because_the_run_is_asked_to_stop_is_not_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever waits for servers gives up after SIGTERM, and says that none has answered."""
    for asks, reason in ((lambda run: run._on_sigterm(), "stopped by SIGTERM"), (lambda run: None, "no server")):
        run = Run(a_config(tmp_path / "run"), resume=False)
        run.checkpoints = MagicMock()
        asks(run)
        run.ask_to_stop("no server")
        with pytest.raises(StoppedError):
            run.stop_if_asked(3, lambda: None)
        assert capsys.readouterr().out.startswith(f"{reason} after step 3; resume with: ")
