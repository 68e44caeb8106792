"""`vlm-rl score`: grade saved responses from elsewhere, or our own, by a benchmark's rules.

    vlm-rl score --benchmark mathvision --annotations test.jsonl --responses model.jsonl --mode official --json s.json

docs/evaluation.md says per benchmark which layouts are read and what the two modes do.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlm_rl.config import recorded_template
from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.benchmark import Benchmark, RawRow, Response
from vlm_rl.evaluation.benchmarks.judging import judge, matched, response_record, summary_of
from vlm_rl.evaluation.benchmarks.raw_rows import UnusableRowError
from vlm_rl.evaluation.benchmarks.registry import BENCHMARKS, eval_template, template_names
from vlm_rl.evaluation.benchmarks.saved_files import read_rows
from vlm_rl.evaluation.benchmarks.saved_responses import responses_in
from vlm_rl.grading.grader import Grader
from vlm_rl.run.run_files import write_atomically
from vlm_rl.templates import Template
from vlm_rl.types import Problem
from vlm_rl.untrusted.json_object import read_object

if TYPE_CHECKING:
    from vlm_rl.evaluation.benchmarks.judge_model import JudgeModel


def score_files(options: argparse.Namespace) -> dict[str, Any]:
    """Score the files, write the JSON and return the summary. Raises UserError for what cannot be scored."""
    benchmark = _benchmark(options.benchmark)
    template = _template(options)
    annotations = options.annotations or options.responses
    if options.annotations is None and not benchmark.rows.carries_annotations:
        raise UserError(
            f"--annotations is missing; give the authors' file, because responses to {benchmark.name} hold no golds"
        )
    try:
        problems = read_annotations(benchmark, _files(annotations))
    except UserError as error:
        hint = "" if options.annotations else ". Responses without the annotations' fields need --annotations"
        raise UserError(f"{error}{hint}") from None
    answered, left_out = matched(benchmark, problems, read_responses(benchmark, _files(options.responses)))
    if options.mode == "strict" and all(not answer.text and answer.published is not None for _, answer in answered):
        raise UserError(
            f"{options.responses[0]}: holds verdicts and no answers; use --mode official, which sums them up"
        )
    judge_model = _judge_model(options, benchmark)
    with Grader() as grader:
        judged = judge(
            benchmark, answered, mode=options.mode, grader=grader, template=template, judge_model=judge_model
        )
    summary = summary_of(
        benchmark,
        judged,
        mode=options.mode,
        num_problems=len(problems),
        template=template.name,
        left_out=left_out,
        judge_model=judge_model,
    )
    summary |= {
        "annotations": [path.name for path in _files(annotations)],
        "responses": [path.name for path in _files(options.responses)],
    }
    if options.json:
        rows = [response_record(benchmark, item) for item in judged]
        tree = json.dumps(summary | {"rows": rows}, ensure_ascii=False, indent=1)
        # A response cut inside a character may hold half of a surrogate pair: the JSON keeps it as an escape.
        escape = "backslashreplace"
        write_atomically(options.json, lambda path: path.write_text(tree, encoding="utf-8", errors=escape))
    return summary


def _judge_model(options: argparse.Namespace, benchmark: Benchmark) -> JudgeModel | None:
    if options.judge is None:
        return None
    from vlm_rl.evaluation.benchmarks.judge_model import open_judge

    beside = options.json or options.responses[0]
    return open_judge(
        options.judge,
        name=options.judge_model,
        key_env=options.judge_key_env,
        cache=options.judge_cache or beside.parent / "judge_cache",
        mode=options.mode,
        benchmarks=[benchmark],
    )


def read_annotations(benchmark: Benchmark, paths: Sequence[Path]) -> list[Problem]:
    """Return the annotated problems; a row that is known to be published without a gold is left out."""
    problems: dict[str, Problem] = {}
    for place, path in enumerate(paths, start=1):
        for where, row in _rows_in(benchmark, path, place):
            try:
                problem = benchmark.rows.read_row(row)
            except UnusableRowError as error:
                if error.known:
                    continue
                raise UserError(f"{where}: {error}") from None
            if problems.setdefault(problem.id, problem) != problem:
                raise UserError(f"{where}: a second, different question {benchmark.own_id(problem)!r}; keep one")
    return list(problems.values())


def read_responses(benchmark: Benchmark, paths: Sequence[Path]) -> list[Response]:
    """Read the responses of all files."""
    responses: list[Response] = []
    for place, path in enumerate(paths, start=1):
        responses += responses_in(benchmark, [*_rows_in(benchmark, path, place)])
    return responses


def _rows_in(benchmark: Benchmark, path: Path, place: int) -> Iterator[tuple[str, RawRow]]:
    """Yield (where, row) of what the rows of a file, one of several, stand for."""
    for where, row in read_rows(path):
        for name, part in benchmark.rows.saved_rows(row, path, place).items():
            yield f"{where} {name!r}" if name else where, part


def describe(summary: dict[str, Any]) -> str:
    """Return the scores with what it takes to believe them, then one table per facet, as text."""
    truncated = "unknown" if summary["truncated_share"] is None else f"{summary['truncated_share']:.1%}"
    lines = [
        f"{summary['benchmark']}, {summary['mode']} mode (rule: {summary['rule']})",
        *(f"  {name}: {_cell(value)}" for name, value in summary["scores"].items()),
        f"  n {summary['n']} questions, {summary['num_responses']} responses (k {summary['k']}), "
        f"{summary['missing']} annotated without a response",
        *_oddities(summary),
        f"  with a box {summary['box_share']:.1%}, empty {summary['empty_share']:.1%}, truncated {truncated}, "
        f"no answer {summary['no_answer']}, timeouts {summary['timeouts']}, errors {summary['errors']}",
    ]
    if summary["mode"] == "official":
        lines.append(
            f"  free points {summary['free_points']}; {len(summary['may_differ'])} rows on which the authors' code "
            f"may differ{_few(summary['may_differ'])}"
        )
    lines += judge_lines(summary)
    if "published_accuracy" in summary:
        lines.append(
            f"  by the file's own verdicts {summary['published_accuracy']:.2%}; judged otherwise here: "
            f"{len(summary['judged_otherwise'])}{_few(summary['judged_otherwise'])}"
        )
    for facet, table in summary["by"].items():
        if 1 < len(table) <= 40:
            lines += [f"  by {facet}", *(f"    {value or '-'}: {_cell(cell)}" for value, cell in table.items())]
    return "\n".join(lines)


def judge_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return a line on the judge model of a result, or on how far emulations have been from published scores."""
    if "emulation" in summary:
        return [f"  emulated, without the authors' judge model: {summary['emulation']}"]
    if judge := summary.get("judge"):
        return [
            f"  judge {judge['model']} (the authors asked {judge['authors_model']}): {judge['requests']} requests, "
            f"{judge['cached']} kept replies, {judge['prompt_tokens']} + {judge['completion_tokens']} tokens"
        ]
    return []


def _oddities(summary: dict[str, Any]) -> list[str]:
    """Return lines on what the files hold beyond one response per question; none for most."""
    lines = []
    if summary["k_min"] != summary["k"]:
        lines.append(
            f"  between {summary['k_min']} and {summary['k']} responses a question: repeated ids are samples"
        )
    if left_out := summary["left_out"]:
        lines.append(f"  left out: {len(left_out)} ids that no annotated question with a gold has{_few(left_out)}")
    if summary["published_verdicts"]:
        lines.append(f"  {summary['published_verdicts']} verdicts are the file's own: it holds no answers there")
    return lines


def _cell(value: Any) -> str:
    if isinstance(value, dict) and "interval" in value:
        if value["score"] is None:
            return "nothing to score"
        low, high = value["interval"]
        return f"{100 * value['score']:.2f} [{100 * low:.1f}, {100 * high:.1f}] (n {value['n']})"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(part)}" for name, part in value.items())
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _few(names: Sequence[str]) -> str:
    if not names:
        return ""
    return ": " + ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _benchmark(name: str) -> Benchmark:
    if name not in BENCHMARKS:
        raise UserError(f"--benchmark is {name!r}; known: {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name]


def _template(options: argparse.Namespace) -> Template:
    """Return the named template, else that of our own records, else plain: the final box anywhere.

    Our records' template is in the summary beside them. So `eval` and `score` agree on the same records, and
    responses from elsewhere are not expected to hold tags that nobody asked for.
    """
    name, responses = options.template, options.responses[0]
    if name is None and responses.suffix == ".parquet" and (beside := responses.with_suffix(".json")).is_file():
        summary = _summary(beside)
        if (recorded := recorded_template(summary)) is not None:
            return recorded
        name = summary.get("template")
    named = eval_template(name or "plain")
    if named is None:
        raise UserError(f"--template is {name!r}; known: {template_names()}")
    return named[0]


def _summary(path: Path) -> dict[str, Any]:
    try:
        return read_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: is no summary of vlm-rl eval ({error}); give --template, or evaluate again"
        ) from None


def _files(paths: Sequence[Path]) -> list[Path]:
    """Return the files; a folder means the dataset.json of each of its trials."""
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob("trial*/*.json")) if path.is_dir() else [path]
        if not found:
            raise UserError(f"{path}: the folder holds no trial1/*.json; name the files instead")
        files += found
    return files
