"""The panel of one problem: its image and question once, and what each checkpoint answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from vlm_rl.demo.numbers.library import EvaluatedCheckpoint
from vlm_rl.demo.numbers.problem_images import images_of
from vlm_rl.demo.numbers.problem_table import DIFFICULTIES, ProblemTable
from vlm_rl.demo.numbers.reasoning import Reasoning, reasoning_at
from vlm_rl.demo.numbers.url_state import FLAGS
from vlm_rl.demo.panels.page_state import PageState, order_names
from vlm_rl.demo.web.rendering import render, share_text
from vlm_rl.grading.moves import MOVES
from vlm_rl.report.html import VERDICT_MARKS, data_uri, name_images, split_response
from vlm_rl.run.turn_record import StoredTurn, read_turns

_MAX_SQUARES = 200  # problems of the strip at a time
_STRIP_KINDS = {  # sign and words; colour alone would not tell them apart for everybody
    "up": ("▲", "became right"),
    "down": ("▼", "became wrong"),
    "right": ("●", "right in both"),
    "still": ("○", "wrong in both"),
}
KEYS = {
    "← →": "previous and next problem",
    "/": "search",
    "t": "table and back",
    "d": "mark the differences",
    "s": "scroll together",
    "m": "plain text or Markdown",
}


@dataclass(frozen=True, slots=True)
class ProblemCard:
    """What was asked, once for all checkpoints."""

    images: tuple[str | None, ...]  # data: addresses; None for an image that does not open
    question: str
    gold: str
    facts: tuple[str, ...]  # id, category, difficulty


@dataclass(frozen=True, slots=True)
class Column:
    """What one checkpoint answered, ready to be shown."""

    label: str
    slot: int  # of its colour
    record: Mapping[str, Any]  # of the sample shown
    sample: int  # its index
    lengths: tuple[int, ...]  # of all samples
    verdicts: tuple[str, ...]
    reasoning_tokens: int | None  # None without the model's tokenizer
    findings: Reasoning  # where it first states the right answer, and its moves

    @property
    def length(self) -> int:
        """Return the response's length in tokens."""
        return int(self.record["length"])

    @property
    def samples(self) -> list[tuple[str, int]]:
        """Return (verdict, tokens) of each sample."""
        return list(zip(self.verdicts, self.lengths, strict=True))

    @property
    def num_right(self) -> int:
        """Return how many of the problem's responses are correct."""
        return self.verdicts.count("correct")

    @property
    def score(self) -> float:
        """Return the share of right samples."""
        return self.num_right / len(self.verdicts)

    @property
    def verdict_kind(self) -> str:
        """Return the style class of the verdict; an unknown one looks like a response that is cut."""
        verdict = str(self.record["verdict"])
        return verdict if verdict in VERDICT_MARKS else "cut"

    @property
    def verdict_mark(self) -> str:
        """Return the sign and words of the verdict."""
        verdict = str(self.record["verdict"])
        return VERDICT_MARKS.get(verdict, f"! {FLAGS['timeout'] if verdict in ('timeout', 'error') else verdict}")

    @property
    def is_cut(self) -> bool:
        """Tell whether the response was cut at the token limit."""
        return self.record["stop_reason"] == "length"

    @property
    def response(self) -> str:
        """Return the whole response."""
        return str(self.record["response"] or "")

    @property
    def stop_text(self) -> str:
        """Return why the response ended, for readers."""
        reason = str(self.record["stop_reason"])
        return "stopped by itself" if reason == "stop" else reason

    @property
    def parts(self) -> list[tuple[str, int]]:
        """Return (kind, tokens) of the parts of the length's bar."""
        if self.reasoning_tokens is None or self.earlier:
            return [("whole", self.length)]
        return [("reasoning", self.reasoning_tokens), ("rest", self.length - self.reasoning_tokens)]

    @property
    def split_text(self) -> str:
        """Return how the tokens divide into reasoning and answer."""
        if sampled := [turn for turn in self.earlier if not turn.is_start]:
            return f"sampled in {len(sampled) + 1} turns"
        if self.reasoning_tokens is None:
            return "in all (no tokenizer to split them)"
        return f"{self.reasoning_tokens:,} reasoning + {self.length - self.reasoning_tokens:,} answer"

    @property
    def reasoning(self) -> str | None:
        """Return the response's reasoning, or None if it has none."""
        return split_response(self.response)[0]

    @property
    def answer(self) -> str:
        """Return the response without its reasoning."""
        return split_response(self.response)[1]

    @property
    def earlier(self) -> list[StoredTurn]:
        """Return the turns of an episode before the last one, each with the environment's answer."""
        return read_turns(self.record.get("turns"))[:-1]

    @property
    def moves(self) -> list[str]:
        """Return how often the reasoning makes each move, for readers; those that it does not make are left out."""
        said = [
            f"{kind} {count} ×" for kind in MOVES if kind != "repetition" and (count := self.findings.count(kind))
        ]
        if self.findings.repeated:
            said.append(f"{share_text(self.findings.repeated)} of the words repeated")
        return said

    @property
    def extracted(self) -> str | None:
        """Return the answer that the grader read, or None if it found none."""
        return None if self.record["extracted"] is None else str(self.record["extracted"])

    @property
    def gold(self) -> str:
        """Return the gold; empty if the record has none."""
        return str(self.record["gold"] or "")

    @property
    def reason(self) -> str:
        """Return why the grader decided so; empty if the record does not say."""
        return str(self.record["reason"] or "")

    @property
    def rule(self) -> str:
        """Return the name of the rule that decided; empty if the record does not say."""
        return str(self.record["path"] or "")

    def moved_from(self, base: Column) -> tuple[str, str]:
        """Return how the score changed from the baseline's and the kind of its badge; empty without a change."""
        if self.score == base.score:
            return "", ""
        is_better = self.score > base.score
        if len(self.verdicts) > 1:
            text = "right more often" if is_better else "right less often"
        else:
            text = "became right" if is_better else "became wrong"
        return text, "correct" if is_better else "wrong"

    def length_change_from(self, base: Column) -> str:
        """Return the difference in tokens to the baseline's response, with its sign."""
        change = self.length - base.length
        if not change:
            return "same length"
        return f"{change:+,} token{'' if abs(change) == 1 else 's'}".replace("-", "−")


@dataclass(frozen=True, slots=True)
class Square:
    """One problem of the strip."""

    problem_id: str
    kind: str  # of _STRIP_KINDS
    is_shown: bool


@dataclass(frozen=True, slots=True)
class Strip:
    """What became of the problems, with a square for each one around the one that is shown."""

    squares: tuple[Square, ...]
    before: int  # problems to the left of it
    after: int
    compared: str
    counts: Mapping[str, int]  # of all problems that pass the filters, by kind
    kinds: Mapping[str, tuple[str, str]]


def problem_panel(state: PageState) -> Markup:
    """Return the problem that is shown, its columns, and the way to the previous and the next one."""
    if state.emptiness:
        return empty_panel(state)
    count = len(state.order)
    index = int(state.order[state.position])
    previous, following = (state.table.ids[state.order[(state.position + step) % count]] for step in (-1, 1))
    return render(
        "problem_panel",
        previous=previous,
        next=following,
        place=state.position + 1,
        count=count,
        problem_id=state.table.ids[index],
        orders=order_names(state),
        order=state.url.sort,
        is_folded=bool(state.url.fold),
        strip=strip_of(state.table, state.order, state.position),
        problem=problem_card(state, index),
        columns=columns_of(state, index),
        keys=KEYS,
    )


def empty_panel(state: PageState) -> Markup:
    """Return the sentence that says why there is nothing to show, with a button that helps where there is one."""
    return render("empty_panel", state=state)


def problem_card(state: PageState, index: int) -> ProblemCard:
    """Return the card of the problem at `index` of the table."""
    table = state.table
    base = table.checkpoints[0]
    record = base.responses.records(table.ids[index])[0]
    images = images_of(record, state.url.benchmark, base.sets)
    facts = [str(record["problem_id"])]
    if record["image_sha256"] and not images:
        facts.append("the image is neither stored with these results nor in a prepared set here")
    if record["category"]:
        facts.append(str(record["category"]))
    if difficulty := str(table.difficulty_P[index]):
        rate = float(table.base_rate_P[index])
        facts.append(f"{table.base_when}: {100 * rate:.0f} % right ({DIFFICULTIES[difficulty][1]})")
    return ProblemCard(
        images=tuple(data_uri(image) for image in images),
        question=name_images(str(record["question"] or ""), len(images)).strip(),
        gold=str(record["gold"] or ""),
        facts=tuple(facts),
    )


def columns_of(state: PageState, index: int) -> list[Column]:
    """Return the columns of the problem at `index` of the table, the baseline first."""
    columns = []
    for checkpoint in state.table.checkpoints:
        records = checkpoint.responses.records(state.table.ids[index])
        sample = min(state.url.sample, len(records) - 1)
        row = checkpoint.responses.row_of[state.table.ids[index]][sample]
        columns.append(
            Column(
                label=checkpoint.label,
                slot=state.slots[checkpoint.key],
                record=records[sample],
                sample=sample,
                lengths=tuple(int(record["length"]) for record in records),
                verdicts=tuple(str(record["verdict"]) for record in records),
                reasoning_tokens=_reasoning_tokens(checkpoint, records[sample]),
                findings=reasoning_at(checkpoint.responses, row),
            )
        )
    return columns


def _reasoning_tokens(checkpoint: EvaluatedCheckpoint, record: Mapping[str, Any]) -> int | None:
    counter = checkpoint.counter
    if counter is None:
        return None
    split = counter.split([record["response"] or ""], np.array([record["length"]]), prefill=checkpoint.prefill)
    return None if split is None else int(split.reasoning_R[0])


def strip_of(table: ProblemTable, order: np.ndarray, position: int) -> Strip:
    """Return the strip around a position: what became of each problem from the first to the last checkpoint."""
    start = max(0, min(position - _MAX_SQUARES // 2, len(order) - _MAX_SQUARES))
    before, after = table.score_CP[0, order], table.score_CP[-1, order]
    same = np.where(after >= 0.5, "right", "still")
    kinds = np.where(after > before, "up", np.where(after < before, "down", same))
    squares = tuple(
        Square(table.ids[order[place]], str(kinds[place]), place == position)
        for place in range(start, min(start + _MAX_SQUARES, len(order)))
    )
    return Strip(
        squares=squares,
        before=start,
        after=len(order) - start - len(squares),
        compared=f"{table.checkpoints[0].label} → {table.checkpoints[-1].label}",
        counts={kind: int((kinds == kind).sum()) for kind in _STRIP_KINDS},
        kinds=_STRIP_KINDS,
    )
