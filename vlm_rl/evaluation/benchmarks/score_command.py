"""`vlm-rl score`: grade saved responses from elsewhere, or our own, by a benchmark's rules.

    vlm-rl score --benchmark mathvision --annotations test.jsonl --responses model.jsonl --mode official --json s.json

docs/evaluation.md says per benchmark which layouts are read and what the two modes do.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.items import Answer, Question
from vlm_rl.evaluation.benchmarks.published_prompts import PUBLISHED_PROMPTS, eval_template
from vlm_rl.evaluation.benchmarks.registry import BENCHMARKS, Benchmark
from vlm_rl.evaluation.benchmarks.responses import answers_in
from vlm_rl.evaluation.benchmarks.score import judge_all, matched, row_record, summarise_rows
from vlm_rl.evaluation.benchmarks.tables import read_rows, with_trial
from vlm_rl.grading.grader import Grader
from vlm_rl.run.directory import write_atomically
from vlm_rl.templates import TEMPLATES, Template


def score_files(options: argparse.Namespace) -> dict[str, Any]:
    """Score the files, write the JSON and return the summary. Raises UserError for what cannot be scored."""
    benchmark = _benchmark(options.benchmark)
    template = _template(options)
    annotations = options.annotations or options.responses
    if options.annotations is None and not benchmark.carries:
        raise UserError(f"--annotations is missing: responses to {benchmark.name} do not carry the golds")
    try:
        questions = read_questions(benchmark, _files(annotations))
    except UserError as error:
        hint = "" if options.annotations else ". Responses without the annotations' fields need --annotations"
        raise UserError(f"{error}{hint}") from None
    answers = read_answers(benchmark, _files(options.responses))
    answers, left_out = matched(benchmark, questions, answers)
    if options.mode == "strict" and all(not answer.text and answer.published is not None for answer in answers):
        raise UserError(
            f"{options.responses[0]}: holds verdicts and no answers: only --mode official can sum them up"
        )
    with Grader() as grader:
        rows = judge_all(
            benchmark,
            questions,
            answers,
            mode=options.mode,
            grader=grader,
            template=template,
        )
    summary = summarise_rows(
        benchmark,
        rows,
        mode=options.mode,
        num_questions=len(questions),
        template=template.name,
        left_out=left_out,
    )
    summary |= {
        "annotations": [path.name for path in _files(annotations)],
        "responses": [path.name for path in _files(options.responses)],
    }
    if options.json:
        tree = json.dumps(summary | {"rows": [row_record(row) for row in rows]}, ensure_ascii=False, indent=1)
        # A response cut inside a character may hold half of a pair: the JSON keeps it as an escape.
        escape = "backslashreplace"
        write_atomically(options.json, lambda path: path.write_text(tree, encoding="utf-8", errors=escape))
    return summary


def read_questions(benchmark: Benchmark, paths: Sequence[Path]) -> list[Question]:
    """The annotated questions; a row without a gold that is known to lack one is left out."""
    found: dict[str, Question] = {}
    for place, path in enumerate(paths, start=1):
        for where, row in read_rows(path):
            row = {"key": row.get("_key"), "pid": row.get("_key"), **with_trial(row, path, place)}
            question = benchmark.read(row, where)
            if question is not None and question.id in found and found[question.id] != question:
                raise UserError(f"{where}: a second, different question {question.id!r}")
            if question is not None:
                found[question.id] = question
    return list(found.values())


def read_answers(benchmark: Benchmark, paths: Sequence[Path]) -> list[Answer]:
    found: list[Answer] = []
    for place, path in enumerate(paths, start=1):
        rows = [(where, with_trial(row, path, place)) for where, row in read_rows(path)]
        found += answers_in(rows, ids=benchmark.ids, prefix=f"{benchmark.name}-", are_short=benchmark.short)
    return found


def describe(summary: dict[str, Any]) -> str:
    """The scores with what it takes to believe them, then one table per facet."""
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
    if "published_accuracy" in summary:
        lines.append(
            f"  by the file's own verdicts {summary['published_accuracy']:.2%}; judged otherwise here: "
            f"{len(summary['judged_otherwise'])}{_few(summary['judged_otherwise'])}"
        )
    for facet, table in summary["by"].items():
        if 1 < len(table) <= 40:
            lines += [f"  by {facet}", *(f"    {value or '-'}: {_cell(cell)}" for value, cell in table.items())]
    return "\n".join(lines)


def _oddities(summary: dict[str, Any]) -> list[str]:
    """What the files hold beyond one response per question; nothing for most."""
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
    """The named one; else that of our own records, which stands beside them; else plain: the final box anywhere.

    Thus `eval` and `score` agree on the same records, and a foreign response is not asked for tags it never heard of.
    """
    name = options.template
    if name is None:
        beside = options.responses[0].with_suffix(".json")
        is_ours = options.responses[0].suffix == ".parquet" and beside.is_file()
        name = json.loads(beside.read_text(encoding="utf-8")).get("template") if is_ours else None
    found = eval_template(name or "plain")
    if found is None:
        raise UserError(f"--template is {name!r}; known: {', '.join([*TEMPLATES, *PUBLISHED_PROMPTS])}")
    return found[0]


def _files(paths: Sequence[Path]) -> list[Path]:
    """Files as they are; a folder stands for the dataset.json of each of its trials."""
    found: list[Path] = []
    for path in paths:
        found += sorted(path.glob("trial*/*.json")) if path.is_dir() else [path]
        if path.is_dir() and not found:
            raise UserError(f"{path}: a folder without trial1/*.json; name the files")
    return found
