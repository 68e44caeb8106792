"""`vlm_rl.fit`: train a policy from a notebook or a script.

run = vlm_rl.fit(model="models/tiny", data=rows, reward=[short_and_right], steps=20, out="runs/first")
run = vlm_rl.fit(steps=40, out="runs/first", reward=[short_and_right], resume=True)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vlm_rl.errors import StoppedError, UserError
from vlm_rl.notebook.own_rows import prepared_sets
from vlm_rl.notebook.settings import (
    checked,
    flat_keys,
    new_configuration,
    resumed_configuration,
    reward_functions,
)
from vlm_rl.run.directory import RunDirectory

GivenReward = Callable[..., Any] | str


def fit(
    *,
    out: str | Path,
    model: str | Path | None = None,
    data: Any = None,
    reward: GivenReward | Sequence[GivenReward] | Mapping[str, GivenReward] = (),
    algorithm: str | None = None,
    steps: int | None = None,
    eval_data: Any = None,
    columns: Mapping[str, str | Sequence[str]] | None = None,
    callbacks: Sequence[Callable[[int, Mapping[str, float]], Any]] = (),
    resume: bool = False,
    **keys: Any,
) -> RunDirectory:
    """Train a policy and return its run directory, which every command of `vlm-rl` reads.

    Sizes that are not given come from the data and this machine, as in a recipe of `vlm-rl init`.

    Args:
        out: the run directory; sets that are made of rows are in OUT-data.
        model: a Hugging Face folder, ORG/NAME of the hub, or a run's checkpoint.
        data: rows as dicts with a question, an answer and maybe an image; a Dataset or a data frame; the path of a
            table or a hub id, as for `vlm-rl prepare`; or prepared sets. A resume has its run's.
        reward: functions that are added to the reward, each called as docs/rewards.md says; a mapping names them.
            One of an imported module runs in a separate process. One of a cell runs in this process: nothing can
            end it, and a call over reward.function_timeout ends the run once it returns.
        algorithm: a key of `vlm_rl.ALGORITHMS`; luspo where it is not given.
        steps: rollout steps, in all.
        eval_data: what the policy is evaluated on while it trains, given as `data` is.
        columns: the columns of question, answer, images and choices, where they cannot be guessed.
        callbacks: called after each step with its number and its metrics; a text that one returns is printed.
        resume: continue the run in `out` from its newest checkpoint.
        keys: keys of the configuration, __ for the dot: train__lr=1e-5, or a section: rollout={"max_tokens": 512}.

    Returns:
        The run: `metrics_frame()`, `plot("length")`, `rollouts(step)`, `evals()`, `best()`, `checkpoints()`.

    Raises:
        UserError: a mistake in an argument, the data, the model or a reward function; where the run was stopped, once
            it is saved.
    """
    path, values = Path(out), flat_keys(keys)
    for name, value in {"algorithm.name": algorithm, "train.steps": steps}.items():
        if value is not None:
            values[name] = value
    functions = reward_functions(reward)
    run = RunDirectory(path)
    if resume:
        config, own = resumed_configuration(run.open(), model, functions, values)
    else:
        checked(values)  # before minutes of preparation
        if (path / "config.yaml").exists():
            raise UserError(f"{path} already holds a run: continue it with resume=True, or choose a different out")
        run.check_new()
        if model is None or data is None:
            raise UserError(f"{'model' if model is None else 'data'} is missing; only a resume goes without")
        make = partial(
            prepared_sets,
            beside=path.with_name(f"{path.name}-data"),
            model=str(model),
            template=values.get("data.template", "think_answer"),
            columns=columns or {},
        )
        evaluated = [] if eval_data is None else make(eval_data, "held_out")
        sets = make(data, "train"), evaluated
        config, own = new_configuration(path, str(model), *sets, functions, values)

    from vlm_rl.planning.out_of_memory import advised, memory_advice
    from vlm_rl.session.preflight import preflight
    from vlm_rl.train import train

    config = preflight(config, resume=resume)

    def remark(step: int) -> str:
        metrics = run.metrics()[-1]
        return "\n".join(text for call in callbacks if isinstance(text := call(step, metrics), str))

    try:
        with advised(partial(memory_advice, config)):
            train(config, resume=resume, remark=remark if callbacks else None, functions=own)
    except StoppedError:  # which would end a script, and say nothing in a notebook
        raise UserError(f"{path}: the run was stopped and is saved; continue it with resume=True") from None
    return run.open()
