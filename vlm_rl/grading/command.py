r"""Grade a response on the terminal or a file of responses: `vlm-rl grade`.

Each line of the file is a JSON object, which comes out with four fields more:

    {"id": "p1", "gold": "1/2", "response": "... \\boxed{0.5}"}
    {"id": "p1", ..., "verdict": "correct", "extracted": "0.5", "path": "number", "reason": "..."}
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from vlm_rl.errors import UserError
from vlm_rl.grading.grader import GRADER_VERSION, Grader, GradeTask
from vlm_rl.templates import TEMPLATES, Template
from vlm_rl.types import AnswerType, Grade, Verdict

InferType = Callable[[str], AnswerType]
ANSWER_TYPES: tuple[str, ...] = get_args(AnswerType)


def grade_one(row: Mapping[str, Any], *, template: str, infer_type: InferType) -> None:
    """Print the extracted answer, the path, the verdict and the reason of a response.

    Raises UserError if the gold or the response is missing.
    """
    for key in ("gold", "response"):
        if key not in row:
            raise UserError(f"--{key} is missing; give --gold and --response, or --file and --out")
    with Grader() as grader:
        (grade,) = grader.grade_many([_task(row, "the arguments", _template(template), infer_type)])
    print(f"extracted: {grade.extracted}\npath: {grade.path}\nverdict: {grade.verdict}\nreason: {grade.reason}")


def grade_file(source: Path, out: Path, *, template: str, infer_type: InferType) -> None:
    """Grade every line of a file into the same line of another, and print a summary.

    Raises UserError with the file, the line and the value for the first bad line; nothing is written then.

    Args:
        source: A file of JSON Lines with the keys gold, response, answer_type?, choices?, tolerance? and question?.
        out: The file to write. It appears only when it is complete.
        template: Name of the template that says where in a response the answer is.
        infer_type: Returns the answer type that follows from a gold, for lines that give none.
    """
    rows = _read(source)
    chosen = _template(template)
    tasks = [_task(row, f"{source} line {number}", chosen, infer_type) for number, row in rows]
    with Grader() as grader:
        grades = grader.grade_many(tasks)
    lines = [json.dumps(dict(row) | _result(grade)) + "\n" for (_, row), grade in zip(rows, grades, strict=True)]
    part = out.with_name(f".{out.name}.part")
    try:
        part.write_text("".join(lines), encoding="utf-8")
        part.replace(out)
    except OSError as error:
        with suppress(OSError):  # a file system that refused the file may refuse this too
            part.unlink(missing_ok=True)
        raise UserError(f"--out {out}: cannot be written: {error.strerror}; choose a different path") from None
    print(summary(grades))


def summary(grades: Sequence[Grade]) -> str:
    """Return the counts of the verdicts, the accuracy, and the share that needed no symbolic comparison."""
    verdicts = Counter(grade.verdict for grade in grades)
    exact = sum(grade.path not in ("math_verify", "rounded") for grade in grades)
    total = len(grades)
    counts = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in get_args(Verdict))
    shares = f"accuracy {verdicts['correct'] / total:.3f}, {exact / total:.1%} by exact rules; " if total else ""
    return f"{total} responses: {counts}; {shares}grader version {GRADER_VERSION}"


def _result(grade: Grade) -> dict[str, Any]:
    return {"verdict": grade.verdict, "extracted": grade.extracted, "path": grade.path, "reason": grade.reason}


def _template(name: str) -> Template:
    if name not in TEMPLATES:
        raise UserError(f"--template is {name!r}; known: {', '.join(TEMPLATES)}")
    return TEMPLATES[name]


def _read(source: Path) -> list[tuple[int, Any]]:
    """Return (line number, parsed line) of each line that is not blank."""
    try:
        text = source.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--file {source}: {error.strerror}; give a file of JSON Lines") from None
    except UnicodeDecodeError as error:
        line = source.read_bytes()[: error.start].count(b"\n") + 1
        raise UserError(f"{source} line {line}: not UTF-8; save the file as UTF-8") from None
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{source} line {number}: not JSON ({error}); write one object on each line") from None
        rows.append((number, row))
    return rows


def _task(row: Any, where: str, template: Template, infer_type: InferType) -> GradeTask:
    """Return the grading task of a parsed line. Raises UserError with the line, the key and the value."""
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: {_shown(row)} is not an object; write one with gold and response")
    missing = [key for key in ("gold", "response") if key not in row]
    if missing:
        raise UserError(f"{where}: {missing[0]!r} is missing; give gold and response")
    if not isinstance(row["response"], str):
        raise UserError(f"{where}: response is {_shown(row['response'])}; give a text")
    gold = row["gold"]
    golds = tuple(_text(value, where, "gold") for value in (gold if isinstance(gold, list) else [gold]))
    if not golds:
        raise UserError(f"{where}: gold is []; give at least one text")
    choices = row.get("choices") or []
    if not isinstance(choices, list):
        raise UserError(f"{where}: choices is {_shown(choices)}; give a list of the options' texts")
    options = tuple(_text(value, where, "choices") for value in choices)
    kind = row.get("answer_type")
    if kind is None:
        kind = "choice" if options else infer_type(golds[0])
    if kind not in ANSWER_TYPES:
        raise UserError(f"{where}: answer_type is {_shown(kind)}; known: {', '.join(ANSWER_TYPES)}")
    question = row.get("question", "")
    if not isinstance(question, str):
        raise UserError(f"{where}: question is {_shown(question)}; give a text or leave it out")
    tolerance = row.get("tolerance")
    if tolerance is None:
        return GradeTask(row["response"], golds, kind, template, options, question=question)
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < float("inf"):
        raise UserError(f"{where}: tolerance is {_shown(tolerance)}; give a number, 0 or more")
    return GradeTask(row["response"], golds, kind, template, options, {"tolerance": tolerance}, question)


def _text(value: Any, where: str, key: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f"{where}: {key} holds {_shown(value)}; give texts or numbers")
    text = str(value)
    if not text.strip():
        raise UserError(f"{where}: {key} is empty; give the right answer")
    return text


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
