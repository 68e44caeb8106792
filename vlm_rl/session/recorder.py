"""What a run writes down and shows while it trains: metrics, rollouts, trackers, terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np

from vlm_rl.config import Config
from vlm_rl.distributed import alive, rank
from vlm_rl.evaluation.scores import score_line
from vlm_rl.learner.learner import UpdateResult
from vlm_rl.learner.save_progress import SaveLines
from vlm_rl.metrics import batch_metrics, gradient_mass_metrics, length_pull_metrics, update_metrics
from vlm_rl.run.rollout_row import TokenLooks, rollout_rows
from vlm_rl.run.run_log import RunLog
from vlm_rl.run.terminal import Advance, StepLine, progress, sample_table
from vlm_rl.session.alarms import Alarms, evaluation_fell
from vlm_rl.session.run import Run
from vlm_rl.types import Group


class Recorder:
    """Writes and shows what a run reports. On all ranks but 0, every method does nothing."""

    def __init__(self, run: Run, config: Config) -> None:
        """Start the log, on rank 0.

        Args:
            run: that has been started.
            config: of the run.
        """
        self.is_main = rank() == 0
        self.run, self.directory = run, run.directory
        self.samples_every = config.log.samples_every
        self.log = RunLog(run.directory.path) if self.is_main else None
        self.last_step = run.step
        self.line = StepLine(total=config.train.steps, start=run.step)
        self.alarms = Alarms([record for record in self.directory.metrics() if record["step"] <= run.step])

    def phase(self, name: str) -> None:
        """Show which phase the step in progress is in."""
        if self.is_main:
            self.line.phase(self.last_step + 1, name)

    def inside(self, text: str) -> None:
        """Show how far the phase in progress is."""
        if self.is_main:
            self.line.inside(text)

    def step(
        self,
        step: int,
        groups: Sequence[Group],
        metrics: Mapping[str, float],
        *,
        looks: Mapping[tuple[int, int], TokenLooks] = MappingProxyType({}),
    ) -> None:
        """Record a finished step: rollouts first, so that no logged step lacks them.

        `looks` are stored with the responses that they are of, by group and response.
        """
        self.last_step = step
        if not self.is_main:
            return
        rows = rollout_rows(groups, step=step, attempt=self.run.attempt, looks=looks)
        lines = self.alarms.after_step(step, metrics)
        if groups:
            metrics = {**metrics, **self.alarms.spikes.metrics()}
        self.directory.write_rollouts(step, self.run.attempt, rows)
        self.directory.append_metrics(step, self.run.attempt, metrics)
        for complaint in self.run.complaints():
            self.note(complaint)
        self.log_line(self.line.done(step, metrics))
        for line in lines:
            self.note(line)
        if self.samples_every and step % self.samples_every == 0:
            asked = {group.problem.id: (group.problem.question, group.problem.answer) for group in groups}
            sample_table(rows, asked, step=step)

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to a step that is recorded already."""
        if self.is_main:
            self.directory.append_metrics(step, self.run.attempt, metrics)

    def log_line(self, text: str) -> None:
        """Write a line into log.txt that was printed already."""
        if self.log is not None:
            self.log.info(text)

    def note(self, text: str) -> None:
        """Print a line between those of the steps."""
        if self.is_main:
            self.line.note(text)
            self.log_line(text)

    def save_lines(self) -> SaveLines:
        """Return where saves are announced: begin and end in the log, and on a terminal also the bytes so far."""
        return SaveLines(self._save_begins, self.note, show=self.line.beside if self.line.is_live else None)

    def _save_begins(self, text: str) -> None:
        if self.line.is_live:
            self.line.phase(self.last_step, "save")
            self.log_line(text)
        else:
            self.note(text)

    def evaluation(self, benchmark: str, step: int, summary: Mapping[str, Any]) -> None:
        """Print the line of one evaluation, and one that it fell."""
        self.note(f"step {step}  {score_line(benchmark, summary)}")
        if self.is_main:
            results = [result for result in self.directory.evals(benchmark) if result.step <= step]
            if (line := evaluation_fell(results)) is not None:
                self.note(line)

    def progress(self, benchmark: str, *, total: int) -> AbstractContextManager[Advance]:
        """Return a progress bar for an evaluation of `total` problems; it replaces the live line."""
        self.line.close()
        return progress(f"evaluating {benchmark}", total=total)

    def close(self, failure: BaseException | None = None) -> None:
        """Remove the live line, log what ended the run before its time, and close log and trackers."""
        self.line.close()
        try:
            for line in self.run.close_trackers():
                self.note(line)
        finally:
            if self.log is not None:
                if failure is not None:
                    self.log.failure(failure)
                self.log.close()


class Timings:
    """Seconds per phase of a step, as metrics timing/<phase>."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.show = show
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show that a phase begins, and add its seconds up, those of an attempt without memory too."""
        self.show(name)
        alive(name)
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun

    def metrics(self) -> dict[str, float]:
        """Return the seconds of each phase, and as `step_time` those since the beginning."""
        parts = {f"timing/{name}": seconds for name, seconds in self.seconds.items()}
        return parts | {"step_time": time.perf_counter() - self.start}


def step_metrics(
    groups: Sequence[Group],
    weights: Sequence[np.ndarray],
    results: Sequence[UpdateResult],
    *,
    parts_share_advantage: bool = True,
) -> dict[str, float]:
    """Return all metrics of one rollout step.

    Args:
        groups: the batch; where dynamic sampling left none, there are no metrics.
        weights: the token weights [P, G] of each mini-batch.
        results: what the learner returned for each mini-batch.
        parts_share_advantage: False for an advantage that is no sum over the reward's parts; only the total pull is
            known then.
    """
    if not groups:
        return {}
    norms = [result.grad_norm for result in results]
    return {
        **batch_metrics(groups),
        **update_metrics([result.sums for result in results]),
        **gradient_mass_metrics(groups, np.concatenate(weights)),
        **length_pull_metrics(groups, np.concatenate(weights), with_parts=parts_share_advantage),
        "loss": float(np.mean([result.loss for result in results])),
        "grad_norm": max(norms) if all(map(math.isfinite, norms)) else math.nan,
        "learning_rate": results[-1].learning_rate,
    }
