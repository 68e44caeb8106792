"""Check each row on its own, before its images are read."""

from __future__ import annotations

from dataclasses import replace

from vlm_rl.data_prep.options import GoldCheck, Options, TokenCount
from vlm_rl.data_prep.records import BlankImage, RowError, TypesetImage, UsableRow
from vlm_rl.errors import UserError
from vlm_rl.templates import CONTROL_TOKENS
from vlm_rl.types import IMAGE_MARKER, Problem

TYPESET_QUESTION = f"{IMAGE_MARKER}\nSolve the problem in the image."


def screen_row(row: UsableRow, options: Options, gold_check: GoldCheck | None) -> UsableRow:
    """Return the row, with the image that the options draw for a text-only problem.

    Raises RowError if a filter that needs no image drops it. Rows of a benchmark are only refused for control
    tokens; a gold that fails `gold_check` is noted in their meta.
    """
    problem = row.problem
    for token in CONTROL_TOKENS:
        if token in problem.question:
            raise RowError("control_token", f"the question holds the model's control token {token}")
    day = problem.meta.get("date", "")
    if day and not (options.since <= day and (not options.until or day < options.until)):
        window = f"{options.since or 'the first'} to {options.until or 'the last'}"
        raise RowError("date", f"the date {day} is outside {window}", known=True)
    if not problem.test_only:
        if problem.answer_type in options.exclude_types:
            raise RowError("answer_type", f"answers of type {problem.answer_type} are excluded", known=True)
        rate = problem.difficulty
        if rate >= 0 and not options.min_pass_rate <= rate <= options.max_pass_rate:
            wanted = f"{options.min_pass_rate} to {options.max_pass_rate}"
            raise RowError("pass_rate", f"the pass rate {rate:.4g} is outside {wanted}", known=True)
    if gold_check is not None and not gold_check(problem):
        if not problem.test_only:
            detail = f"the grader does not accept the answer {problem.answer!r:.60}, or a different spelling of it"
            raise RowError("gold_unverified", detail, known=True)
        row = replace(row, problem=replace(problem, meta={**problem.meta, "gold_unverified": True}))
    return _with_text_image(row, options)


def _with_text_image(row: UsableRow, options: Options) -> UsableRow:
    """Give a text-only problem the image that the options ask for."""
    problem = row.problem
    if row.images or options.text_image == "none" or problem.meta.get("annotations_only"):
        return row
    if options.text_image == "blank":
        problem = replace(
            problem, question=f"{IMAGE_MARKER}\n{problem.question}", meta={**problem.meta, "blank_image": True}
        )
        return replace(row, problem=problem, images=(BlankImage(),))
    text = problem.question
    meta = {**problem.meta, "typeset_image": True, "typeset_text": text}
    return replace(row, problem=replace(problem, question=TYPESET_QUESTION, meta=meta), images=(TypesetImage(text),))


def cached(gold_check: GoldCheck) -> GoldCheck:
    """Return a check that calls `gold_check` once for each distinct gold: many rows say "B" or "12"."""
    known: dict[tuple[object, ...], bool] = {}

    def check(problem: Problem) -> bool:
        rules = tuple(problem.meta.get(key) for key in ("precision", "tolerance", "unit"))
        key = (problem.answer, problem.answer_type, problem.choices, rules)
        if key not in known:
            if len(known) > 100_000:
                known.clear()
            known[key] = gold_check(problem)
        return known[key]

    return check


def count_prompt_tokens(count_tokens: TokenCount | None, problem: Problem) -> int:
    """Return the tokens of the prompt, each image and pair of frames counted as one, or -1 without a `count_tokens`.

    Raises RowError for a text that forms a control token of the tokenizer, and for a video that its model refuses.
    """
    try:
        return -1 if count_tokens is None else count_tokens(problem)
    except UserError as error:
        raise RowError("bad_video" if problem.videos else "control_token", str(error)) from None
