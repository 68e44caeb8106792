"""Which checkpoint of a run is the best, and how much lower the last one is.

The first set of data.eval decides. Of steps with the same accuracy the earliest is the best: it is reached in fewer
steps, and is nearer to the model that the run began with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlm_rl.paired import Paired, pair, problem_scores
from vlm_rl.run.eval_result import EvalResult

_COLUMNS = ("problem_id", "verdict", "length", "category", "cluster")


@dataclass(frozen=True, slots=True)
class Best:
    """The best of the evaluated steps, and of those that are saved."""

    benchmark: str
    step: int
    accuracy: float  # in [0, 1]
    last_step: int
    saved_step: int | None  # the best of the steps that have a checkpoint; None if none has both
    saved_accuracy: float
    checkpoint: Path | None  # of saved_step
    last: Paired | None  # the last evaluation minus the best one, problem by problem; None if that is the best

    def sentence(self) -> str:
        """Return one line: the best step, how much lower the last is, and where a better step was not saved."""
        if self.last is None:
            end = ", the last"
        elif self.last.difference == 0:
            end = f"; the last, step {self.last_step}, is equal on average"
        else:
            low, high = (-100 * bound for bound in reversed(self.last.interval))
            end = (
                f"; the last, step {self.last_step}, is {-100 * self.last.difference:.1f} points lower "
                f"[{low:.1f}, {high:.1f}]"
            )
        if self.last is not None:
            end += f" ({self.last.won} won, {self.last.lost} lost)"
        text = f"{self.benchmark}: best {self.accuracy:.1%} at step {self.step}{end}"
        if self.saved_step == self.step:
            return text
        if self.step == 0:
            return f"{text}; step 0 is the model that the run began with"
        if self.saved_step is None:
            return f"{text}; step {self.step} was not saved, nor was any other evaluated step"
        instead = f"step {self.saved_step} ({self.saved_accuracy:.1%})"
        return f"{text}; step {self.step} was not saved, the best that was is {instead}"


def best_of(results: Sequence[EvalResult], checkpoints: Mapping[int, Path]) -> Best | None:
    """Return the best of one set's evaluations; None if there is none.

    Args:
        results: of one set, ascending by step.
        checkpoints: the folders of the saved steps.

    Raises UserError if a file of records is damaged.
    """
    if not results:
        return None
    best, last = best_result(results), results[-1]
    saved = best_result([result for result in results if result.step in checkpoints])
    assert best is not None
    return Best(
        benchmark=best.benchmark,
        step=best.step,
        accuracy=best.accuracy,
        last_step=last.step,
        saved_step=saved.step if saved else None,
        saved_accuracy=saved.accuracy if saved else 0.0,
        checkpoint=checkpoints[saved.step] if saved else None,
        last=None if last.step == best.step else paired_change(best, last),
    )


def best_result(results: Iterable[EvalResult]) -> EvalResult | None:
    """Return the evaluation with the highest accuracy, the earliest of equals; None of none.

    Raises UserError for a summary without one.
    """
    return max(results, key=lambda result: (result.accuracy, -result.step), default=None)


def paired_change(before: EvalResult, after: EvalResult) -> Paired | None:
    """Compare two evaluations of one set problem by problem; None if they share no problem."""
    return pair(*(problem_scores(result.rows(_COLUMNS).to_pylist()) for result in (before, after)))
