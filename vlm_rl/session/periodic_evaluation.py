"""Evaluation during training: the policy on the sets of data.eval."""

from __future__ import annotations

from functools import partial

from vlm_rl.distributed import from_main, share
from vlm_rl.evaluation.evaluate import Asking, Judging
from vlm_rl.evaluation.resume import AnswerSettings, answer_settings, changed_settings, evaluate_into
from vlm_rl.run.directory import RunDirectory
from vlm_rl.samplers.base import SamplingParams
from vlm_rl.samplers.remote.servers import ServersGoneError
from vlm_rl.session.session import Session


def evaluate_if_due(s: Session) -> None:
    """Evaluate every eval.every steps, at step 0 and at the last one.

    After a kill, problems that were already answered are neither answered nor graded again, and a set whose result
    is complete is skipped.
    """
    every = s.config.eval.every
    if not every or (s.step % every and s.step != s.config.train.steps):
        return
    params = SamplingParams(
        temperature=s.config.eval.temperature,
        max_tokens=s.config.eval.max_tokens or s.config.rollout.max_tokens,
        responses=s.config.eval.samples,
        top_p=s.config.eval.top_p,
    )
    weights = f"{s.weights.checksum:016x}"
    asking = Asking(s.builder, s.sampler, params, seed=s.config.seed, step=s.step)
    for name, problems in s.eval_sets.items():
        settings = {"weights": weights, **answer_settings(problems, asking)}
        if from_main(partial(_is_complete, s.run.directory, name, s.step, settings)):
            continue
        with s.recorder.progress(name, total=len(share(problems))) as advance:
            try:
                summary = evaluate_into(
                    s.run.directory, name, problems, asking, Judging(s.grader), settings=settings, advance=advance
                )
            except ServersGoneError as error:
                s.ask_to_stop(error)
                break
        s.recorder.evaluation(name, s.step, summary)
    s.stop_if_asked(s.state())


def _is_complete(run: RunDirectory, name: str, step: int, settings: AnswerSettings) -> bool:
    """Tell whether the run already holds this set's result for these very weights."""
    results = (result for result in run.evals(name) if result.step == step)
    return any(not changed_settings(result.summary, settings) for result in results)
