"""Grade, score, read a run, evaluate a model, write a report and show the demo from Python.

These functions are offered by `vlm_rl` itself: `vlm_rl.grade`, `vlm_rl.read_run`, ... All but `evaluate` and
`show_demo` load no torch. `vlm_rl.fit`, which trains, is in vlm_rl.notebook.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

from vlm_rl.data.golds import infer_answer_type
from vlm_rl.errors import UserError, near
from vlm_rl.grading.first_answer import FirstAnswer, find_first_answer
from vlm_rl.grading.grader import Grader, GradeTask
from vlm_rl.run.directory import RunDirectory
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import AnswerType, Grade

if TYPE_CHECKING:
    from vlm_rl.demo.background import DemoServer


def grade(
    response: str,
    gold: str | float | Sequence[str | float],
    *,
    answer_type: AnswerType | None = None,
    choices: Sequence[str] = (),
    template: str = "plain",
    tolerance: float | None = None,
    question: str = "",
    grader: Grader | None = None,
) -> Grade:
    r"""Grade one response against the right answer.

    Args:
        response: the whole response; its answer is the content of the last `\boxed{}` that the template allows.
        gold: the right answer without `\boxed{}`, text or number; several are alternatives, any of which is right.
        answer_type: "choice", "integer", "float", "expression", "text" or "list"; by default "choice" where there are
            choices, otherwise the form of the first gold decides.
        choices: the texts of options A, B, C, ...
        template: where the answer must be: "plain" accepts a box anywhere after the reasoning, "think_answer" and
            "think_box" require their tags.
        tolerance: the largest difference from the gold that is accepted of a float, in the gold's unit.
        question: the text of the problem. Where it asks for a percentage, 50% equals 50; where it asks for a ratio,
            4:30 is not a time.
        grader: a `Grader` whose worker processes serve many calls; by default each call has its own.

    Returns:
        The verdict ("correct", "wrong", "no_answer", "timeout" or "error"), the extracted answer, the rule that
        decided (`path`) and the reason in words.

    Raises:
        UserError: the template or the answer type is unknown, or the gold is missing or neither text nor number.
    """
    task = _task(response, gold, answer_type, choices, template, tolerance, question)
    if grader is not None:
        return grader.grade_many([task])[0]
    with Grader() as own:
        return own.grade_many([task])[0]


def first_answer(
    response: str,
    gold: str | float | Sequence[str | float],
    *,
    answer_type: AnswerType | None = None,
    choices: Sequence[str] = (),
    tolerance: float | None = None,
    question: str = "",
    grader: Grader | None = None,
) -> FirstAnswer | None:
    r"""Find where a response's reasoning first states the right answer: the overthinking share is what follows it.

    The value that each statement of the reasoning ends with is graded, until one is right; docs/grading.md has the
    definition. At most 200 values are compared.

    Args:
        response: the whole response.
        gold: the right answer without `\boxed{}`, text or number; several are alternatives, any of which is right.
        answer_type, choices, tolerance, question: as for `grade`.
        grader: a `Grader` whose worker processes make symbolic comparisons, each within its limit of CPU time;
            without one a value that needs such a comparison does not count.

    Returns:
        `start` and `end` of the statement in characters of the response, the value (`text`), the characters of the
        reasoning after it (`after`) and their share of the reasoning (`share_after`, in [0, 1]); None if no
        statement is right.

    Raises:
        UserError: the answer type is unknown, or the gold is missing or neither text nor number.
    """
    task = _task(response, gold, answer_type, choices, "plain", tolerance, question)
    return find_first_answer(task, grader=grader)[0]


def _task(
    response: str,
    gold: str | float | Sequence[str | float],
    answer_type: AnswerType | None,
    choices: Sequence[str],
    template: str,
    tolerance: float | None,
    question: str,
) -> GradeTask:
    given = tuple(gold) if isinstance(gold, Iterable) and not isinstance(gold, str) else (gold,)
    golds = tuple(str(value) for value in given if isinstance(value, str | Real) and not isinstance(value, bool))
    if len(golds) < len(given):
        raise UserError(f"gold is {gold!r}; give a text or a number, or several")
    if not golds:
        raise UserError("gold is empty; give at least one right answer")
    if template not in TEMPLATES:
        raise UserError(f"template is {template!r}; known: {', '.join(TEMPLATES)}")
    kind = answer_type or ("choice" if choices else infer_answer_type(golds[0]))
    if kind not in get_args(AnswerType):
        raise UserError(f"answer_type is {kind!r}; known: {', '.join(get_args(AnswerType))}")
    meta = {} if tolerance is None else {"tolerance": tolerance}
    return GradeTask(response, golds, kind, TEMPLATES[template], tuple(choices), meta, question)


def score(
    benchmark: str,
    responses: str | Path | Sequence[str | Path],
    *,
    annotations: str | Path | Sequence[str | Path] = (),
    mode: Literal["strict", "official"] = "strict",
    template: str | None = None,
    judge: str | None = None,
    judge_model: str = "",
    judge_key_env: str = "",
    judge_cache: str | Path | None = None,
) -> dict[str, Any]:
    """Score saved responses to a benchmark.

    Args:
        benchmark: "mathvista", "mathvision", ...; docs/evaluation.md lists them with the layouts that are read.
        responses: one file or several: JSON, JSON Lines, CSV, or Parquet records of `vlm-rl eval`.
        annotations: the authors' file (for DynaMath one per trial); not needed where the responses carry the golds.
        mode: "official" applies the benchmark's published rule, "strict" the rule of training: the final box decides.
        template: where the strict rule looks for the answer; by default that of our own records, else "plain".
        judge: an OpenAI-compatible endpoint, up to /v1, to ask what the published rule asks a model.
        judge_model: its name there; "" takes the only one.
        judge_key_env: the environment variable that holds the API key; "" sends none.
        judge_cache: folder of replies that are not asked for again; None is judge_cache beside the responses.

    Returns:
        The summary that `vlm-rl score --json` writes, without its rows: `scores` as shares in [0, 1], each with its
        95 % interval and n, then everything needed to believe them.

    Raises:
        UserError: an unknown benchmark, or a file that cannot be read or matched; the message names file and row.
    """
    from vlm_rl.evaluation.benchmarks.score_command import score_files

    options = Namespace(
        benchmark=benchmark,
        responses=_paths(responses),
        annotations=_paths(annotations) or None,
        mode=mode,
        template=template,
        json=None,
        judge=judge,
        judge_model=judge_model,
        judge_key_env=judge_key_env,
        judge_cache=Path(judge_cache) if judge_cache is not None else None,
    )
    return score_files(options)


def _paths(places: str | Path | Sequence[str | Path]) -> list[Path]:
    return [Path(place) for place in ([places] if isinstance(places, str | Path) else places)]


def read_run(path: str | Path) -> RunDirectory:
    """Open the folder of a run for reading.

    Args:
        path: a folder written by `vlm-rl train`, `quickstart` or `eval`, of this version or an older one.

    Returns:
        Its reader. `metrics()` lists one dict per step, `rollouts(step)` and the `rows()` of each of `evals()` are
        Arrow tables with one row per response, `config()` is the configuration, `checkpoints()` lists folders.

    Raises:
        UserError: there is no run in this folder.
    """
    return RunDirectory(path).open()


def evaluate(
    model: str | Path, data: str | Path | Sequence[str | Path], out: str | Path, **settings: Any
) -> RunDirectory:
    """Measure a model on prepared sets, as `vlm-rl eval` does.

    Args:
        model: a Hugging Face folder, ORG/NAME of the hub, or a run: RUN, RUN/60, RUN/best.
        data: the sets.
        out: folder for records and summaries. After an interruption the same call continues.
        settings: options of the command by their names: samples=4, temperature=1.0, max_tokens=512, images="blank".

    Returns:
        The results: `evals()` has for each set its summary and its rows, and `vlm_rl.write_report` takes them.

    Raises:
        UserError: an unknown setting, and for model, sets and folder as the command; nothing is written then.
    """
    from vlm_rl.commands.measuring import add_eval
    from vlm_rl.errors import StoppedError
    from vlm_rl.session.preflight import preflight_eval

    parser = _Options()
    add_eval(parser.add_subparsers())
    others = ("command", "output", "model", "data", "out")
    defaults = vars(parser.parse_args(["eval"]))
    known = {name for name in defaults if name not in others and not name.startswith("endpoint")}
    if unknown := [name for name in settings if name not in known]:
        hint = near(unknown[0], known, otherwise=f"known are {', '.join(sorted(known))}")
        raise UserError(f"evaluate() has no setting {unknown[0]!r}: {hint}")
    given = {name: value for name, value in settings.items() if value != defaults[name]}
    options = parser.parse_args(["eval", *(f"--{name.replace('_', '-')}={value}" for name, value in given.items())])
    options.out, options.data = Path(out), _paths(data)
    options.model = preflight_eval(
        Path(model), options.data, sampler=options.sampler, tensor_parallel=options.tensor_parallel
    )
    from vlm_rl.evaluation.command import evaluate_sets
    from vlm_rl.planning.out_of_memory import advised, eval_memory_advice

    try:
        with advised(eval_memory_advice):
            return evaluate_sets(options)
    except StoppedError:
        raise UserError(f"{out}: the evaluation was stopped; the same call continues it") from None


class _Options(ArgumentParser):
    """Reads the settings of `evaluate` as the command reads its options."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"evaluate(): {message}")


def write_report(
    runs: str | Path | RunDirectory | Sequence[str | Path | RunDirectory], out: str | Path = "report.html"
) -> Path:
    """Write one self-contained HTML page about runs or results, as `vlm-rl report` does, and return its path.

    Args:
        runs: their folders, or what `read_run`, `fit` and `evaluate` return.
        out: the page.

    Raises:
        UserError: a folder is not a run's, or `out` cannot be written.
    """
    from vlm_rl.report.run_report import write_report as write

    return write([read_run(folder) for folder in _folders(runs)], Path(out))


def show_demo(
    runs: str | Path | RunDirectory | Sequence[str | Path | RunDirectory], *, port: int = 0, height: int = 900
) -> DemoServer:
    """Serve the demo of runs in the background, and show it in the notebook.

    Args:
        runs: their folders, or what `read_run`, `fit` and `evaluate` return.
        port: of 127.0.0.1; 0 takes a free one.
        height: of the frame in the notebook, in pixels.

    Returns:
        The server, which a notebook shows as a frame: its `url`, and `close()`. The browser must run on this machine,
        or reach the port of its loopback, as through `ssh -L`.

    Raises:
        UserError: there is nothing to show, or the port is taken.
    """
    from vlm_rl.demo.background import serve_in_background

    return serve_in_background(_folders(runs), port=port, height=height)


def _folders(runs: str | Path | RunDirectory | Sequence[str | Path | RunDirectory]) -> list[Path]:
    listed = [runs] if isinstance(runs, str | Path | RunDirectory) else runs
    return [run.path if isinstance(run, RunDirectory) else Path(run) for run in listed]
