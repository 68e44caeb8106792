"""Evaluation during training: the policy on the sets of data.eval."""

from __future__ import annotations

from functools import partial

from vlm_rl.config import Config
from vlm_rl.distributed import alive, from_main, share
from vlm_rl.evaluation.evaluate import Asking, Judging
from vlm_rl.evaluation.resume import AnswerSettings, answer_settings, changed_settings, evaluate_into
from vlm_rl.run.directory import RunDirectory
from vlm_rl.samplers.base import SamplingParams
from vlm_rl.samplers.remote.servers import ServersGoneError
from vlm_rl.session.session import Session


def evaluate_if_due(session: Session) -> None:
    """Evaluate every eval.every steps, at step 0 and at the last one. Save the step where it is the best so far.

    After a kill, problems that were already answered are neither answered nor graded again, and a set whose result
    is complete is skipped.
    """
    every = session.config.eval.every
    if not every or (session.step % every and session.step != session.config.train.steps):
        return
    weights = f"{session.weights.checksum:016x}"
    judging = Judging(session.grader, accuracy=session.accuracy)
    how = {"seed": session.config.seed, "step": session.step, "host": session.host}
    for name, problems in session.eval_sets.items():
        asking = Asking(session.builder, session.sampler, _sampling(session.config, name), **how)
        settings = {"weights": weights, **answer_settings(problems, asking, judging)}
        if from_main(partial(_is_complete, session.run.directory, name, session.step, settings)):
            continue
        alive("evaluation")
        with session.recorder.progress(name, total=len(share(problems))) as advance:
            try:
                summary = evaluate_into(
                    session.run.directory,
                    name,
                    problems,
                    asking,
                    judging,
                    settings=settings,
                    advance=advance,
                )
            except ServersGoneError as error:
                session.ask_to_stop(error)
                break
        session.recorder.evaluation(name, session.step, summary)
    else:
        session.save_if_best()
    session.stop_if_asked(session.state())


def _sampling(config: Config, name: str) -> SamplingParams:
    samples, temperature, top_p = config.eval.sampling(name)
    longest = config.eval.max_tokens or config.rollout.max_tokens
    return SamplingParams(temperature=temperature, max_tokens=longest, responses=samples, top_p=top_p)


def _is_complete(run: RunDirectory, name: str, step: int, settings: AnswerSettings) -> bool:
    """Tell whether the run already holds this set's result for these very weights."""
    results = (result for result in run.evals(name) if result.step == step)
    return any(not changed_settings(result.summary, settings) for result in results)
