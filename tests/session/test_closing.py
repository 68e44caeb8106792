"""What a session has opened is closed, whatever fails: in its start, in the run, or while another part closes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.helpers.toy_runs import toy_set
from vlm_rl.config import Config, parse_config
from vlm_rl.environments.host import EpisodeHost
from vlm_rl.errors import StoppedError, UserError
from vlm_rl.grading.grader import Grader
from vlm_rl.rewards.accuracy import AccuracyPart
from vlm_rl.rewards.reward import RewardFunction
from vlm_rl.samplers.transformers import TransformersSampler
from vlm_rl.session import session as module
from vlm_rl.session.recorder import Recorder
from vlm_rl.session.run import Run
from vlm_rl.session.session import Session

PARTS = {
    "sampler": TransformersSampler,
    "accuracy": AccuracyPart,
    "reward": RewardFunction,
    "host": EpisodeHost,
    "grader": Grader,
}  # as they are closed
REFUSAL = ValueError("refused")


@pytest.fixture(scope="module")
def config(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Return the configuration of a run that opens each of PARTS."""
    folder = tmp_path_factory.mktemp("closing")
    train, held_out = (toy_set(folder / split, count=2, split=split) for split in ("train", "heldout"))
    tree = {
        "out": str(folder / "run"),
        "model": {"path": str(tiny_model)},
        "data": {"train": [str(train)], "eval": [str(held_out)], "max_prompt_tokens": 700},
        "reward": {
            "overlong_buffer": 8,
            "allow_function": True,
            "functions": {"rule": {"path": "tests.helpers.own_reward.short_words", "role": "accuracy"}},
        },
        "environment": {"name": "zoom", "max_turns": 2},
        "rollout": {"sampler": "transformers", "max_tokens": 14},
        "train": {"steps": 1, "zero_stage": 0},
        "eval": {"every": 1},
    }
    return parse_config(tree)


class Closings:
    """Writes down which parts are closed, in order, with the log's end; `failing` then raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, failing: str = "") -> None:
        self.closed: list[str] = []
        self.failures: list[BaseException | None] = []
        for name, part in PARTS.items():
            monkeypatch.setattr(part, "close", self._watched(name, part.close, fails=name == failing))
        close = Recorder.close

        def close_log(recorder: Recorder, failure: BaseException | None = None) -> None:
            self.failures.append(failure)
            close(recorder, failure)

        monkeypatch.setattr(Recorder, "close", close_log)

    def _watched(self, name: str, close: Callable[[Any], None], *, fails: bool) -> Callable[[Any], None]:
        def watched(part: Any) -> None:
            self.closed.append(name)
            close(part)
            if fails:
                raise RuntimeError(f"{name} does not close")

        return watched


@contextmanager
def opened(config: Config, out: Path) -> Iterator[Session]:
    """Build a run's session, as vlm_rl.train does."""
    changed = config.model_copy(update={"out": str(out)})
    with Run(changed, resume=False) as run, Session(changed, run) as session:
        yield session


def refuse(*_: Any, **__: Any) -> None:
    raise REFUSAL


@pytest.mark.parametrize(
    ("place", "num_open"),
    [
        pytest.param("check_media_limits", 2, marks=pytest.mark.slow),
        pytest.param("check_boxes", 4, marks=pytest.mark.slow),
        pytest.param("Learner", 4, marks=pytest.mark.slow),
        ("WeightSync", 5),
    ],
)
def test_what_was_opened_before_a_start_failed_is_closed(
    monkeypatch: pytest.MonkeyPatch, config: Config, tmp_path: Path, place: str, num_open: int
) -> None:
    """In a notebook the process goes on, with the card's memory and the processes of functions."""
    closings = Closings(monkeypatch)
    monkeypatch.setattr(module, place, refuse)
    with pytest.raises(ValueError, match="refused"), opened(config, tmp_path / "run"):
        pass
    assert closings.closed == list(PARTS)[-num_open:] and closings.failures == []


@pytest.mark.parametrize(
    ("part", "method"),
    [
        pytest.param(Run, "listen", marks=pytest.mark.slow),
        pytest.param(Run, "keep_checkpoints", marks=pytest.mark.slow),
        (Grader, "start"),
        (Recorder, "log_line"),
    ],
)
def test_a_start_that_fails_once_the_run_s_files_are_open_is_in_its_log(
    monkeypatch: pytest.MonkeyPatch, config: Config, tmp_path: Path, part: type, method: str
) -> None:
    """The next run of the process would write into that log too, and trackers would wait for more."""
    closings, handlers = Closings(monkeypatch), list(logging.getLogger().handlers)
    monkeypatch.setattr(part, method, refuse)
    with pytest.raises(ValueError, match="refused"), opened(config, tmp_path / "run"):
        pass
    assert closings.failures == [REFUSAL] and closings.closed == list(PARTS)
    assert "ValueError: refused" in (tmp_path / "run/log.txt").read_text()
    assert logging.getLogger().handlers == handlers


@pytest.mark.parametrize(
    "failing",
    [
        "",
        "sampler",
        *(pytest.param(part, marks=pytest.mark.slow) for part in ("accuracy", "reward", "host", "grader")),
    ],
)
def test_a_part_that_does_not_close_keeps_none_of_the_others(
    monkeypatch: pytest.MonkeyPatch, config: Config, tmp_path: Path, failing: str
) -> None:
    """What ended the run goes into its log, and what did not close is told besides."""
    closings, failure = Closings(monkeypatch, failing=failing), KeyError("the run's own")
    with pytest.raises(RuntimeError if failing else KeyError) as raised, opened(config, tmp_path / "run"):
        raise failure
    assert closings.closed == list(PARTS) and closings.failures == [failure]
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
