"""The panel of one problem: its image and question once, and what each checkpoint made of it, as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import numpy as np

from vlm_rl.demo.library import Checkpoint
from vlm_rl.demo.mathtext import math_html, value_html
from vlm_rl.demo.table import DIFFICULTIES, Table
from vlm_rl.demo.url_state import FLAGS, View
from vlm_rl.report.html import VERDICT_MARKS, data_uri, escape, name_images, split_response

_PIPS = 200  # problems of the strip at a time


@dataclass(frozen=True, slots=True)
class Column:
    """What one checkpoint answered, ready to be shown."""

    label: str
    slot: int
    record: Mapping[str, Any]
    lengths: tuple[int, ...]  # of all samples
    verdicts: tuple[str, ...]
    reasoning_tokens: int | None  # None: the model's tokenizer is not at hand
    score: float  # share of right samples

    @property
    def length(self) -> int:
        return int(self.record["length"])


def columns_of(table: Table, slots: Mapping[str, int], problem_id: str, sample: int) -> list[Column]:
    """The columns of a problem that all checkpoints of the table share, the baseline first."""
    found = []
    for checkpoint in table.checkpoints:
        records = checkpoint.responses.records(problem_id)
        record = records[min(sample, len(records) - 1)]
        verdicts = tuple(str(one["verdict"]) for one in records)
        found.append(
            Column(
                label=checkpoint.label,
                slot=slots[checkpoint.key],
                record=record,
                lengths=tuple(int(one["length"]) for one in records),
                verdicts=verdicts,
                reasoning_tokens=_reasoning_tokens(checkpoint, record),
                score=sum(verdict == "correct" for verdict in verdicts) / len(verdicts),
            )
        )
    return found


def _reasoning_tokens(checkpoint: Checkpoint, record: Mapping[str, Any]) -> int | None:
    counter = checkpoint.counter
    if counter is None:
        return None
    split = counter.split([record["response"] or ""], np.array([record["length"]]), prefill=checkpoint.prefill)
    return int(split.reasoning_R[0])


# -- the problem ---------------------------------------------------------------------------------


def problem_html(
    record: Mapping[str, Any], images: Sequence[bytes], *, base_rate: float, base_when: str, difficulty: str
) -> str:
    """Images, question, right answer, once for all columns."""
    pictures = "".join(_picture(image, number) for number, image in enumerate(images, 1))
    missing = "the image is neither stored with these results nor in a prepared set here"
    question = str(record["question"] or "")
    question = name_images(question, len(images))
    facts = [escape(str(record["problem_id"])), *([missing] if record["image_sha256"] and not images else [])]
    if record["category"]:
        facts.append(escape(str(record["category"])))
    if difficulty:
        facts.append(f"{escape(base_when)}: {100 * base_rate:.0f} % right ({DIFFICULTIES[difficulty][1]})")
    side = f"<div class='pictures'>{pictures}</div>" if pictures else ""
    return (
        f"<div class='card problem'>{side}<div class='asked'>"
        f"<p class='question'>{math_html(question.strip())}</p>"
        f"<p class='gold'><span class='label'>right answer</span> <b>{value_html(str(record['gold'] or ''))}</b></p>"
        f"<p class='quiet id'>{' · '.join(facts)}</p></div></div>"
    )


def _picture(image: bytes, number: int) -> str:
    address = data_uri(image)
    if address is None:
        return f"<p class='quiet'>image {number} does not open</p>"
    return f"<img src='{address}' alt='image {number} of the problem'>"


# -- the columns ---------------------------------------------------------------------------------


def columns_html(columns: Sequence[Column], view: View) -> str:
    """The checkpoints side by side; lengths are drawn on one scale."""
    longest = max(max(column.length for column in columns), 1)
    cards = "".join(_column(column, columns[0], longest, view) for column in columns)
    return f"<div class='columns n{len(columns)}'>{cards}</div>"


def _column(column: Column, base: Column, longest: int, view: View) -> str:
    record = column.record
    reasoning, answer = split_response(record["response"] or "")
    title = "baseline" if column is base else "checkpoint"
    return (
        f"<article class='card ckpt k{column.slot}'>"
        f"<header><span class='kind'>{title}</span><h3>{escape(column.label)}</h3></header>"
        f"<div class='badges'>{_verdict(record)}{_change(column, base)}{_stop(record)}</div>"
        f"{_tokens(column, base, longest)}<div>{_samples(column, view)}</div>"
        f"<div>{_reasoning(reasoning, column, folded=bool(view.fold))}</div>"
        f"<div><p class='label'>answer</p><div class='text answer' tabindex='0'>"
        f"{math_html(answer) or '<i>nothing after the reasoning</i>'}</div></div>"
        f"{_grading(record)}</article>"
    )


def _verdict(record: Mapping[str, Any]) -> str:
    verdict = str(record["verdict"])
    mark = VERDICT_MARKS.get(verdict, f"! {FLAGS['timeout'] if verdict in ('timeout', 'error') else verdict}")
    kind = verdict if verdict in VERDICT_MARKS else "cut"
    return f"<span class='chip {kind}'>{escape(mark)}</span>"


def _change(column: Column, base: Column) -> str:
    """The badges against the baseline: verdict and tokens; none for the baseline itself."""
    if column is base:
        return ""
    if column.score == base.score:
        moved, kind = "", ""
    else:
        moved, kind = ("became right", "correct") if column.score > base.score else ("became wrong", "wrong")
        if len(column.verdicts) > 1:
            moved = moved.replace("became right", "right more often").replace("became wrong", "right less often")
    chip = f"<span class='chip {kind}'>{moved}</span>" if moved else ""
    change = column.length - base.length
    tokens = "same length" if not change else f"{change:+,} token{'' if abs(change) == 1 else 's'}".replace("-", "−")
    return f"{chip}<span class='chip change'>{tokens}</span>"


def _stop(record: Mapping[str, Any]) -> str:
    if record["stop_reason"] == "length":
        return "<span class='chip cut'>cut at the limit</span>"
    reason = "stopped by itself" if record["stop_reason"] == "stop" else str(record["stop_reason"])
    return f"<span class='chip'>{escape(reason)}</span>"


def _tokens(column: Column, base: Column, longest: int) -> str:
    """The length as a bar, reasoning and answer apart; a mark where the baseline ended."""
    total, reasoning = column.length, column.reasoning_tokens
    if reasoning is None:
        parts, said = [(total, "whole")], "in all; to split them takes the model's tokenizer"
    else:
        parts = [(reasoning, "reasoning"), (total - reasoning, "rest")]
        said = f"{reasoning:,} reasoning + {total - reasoning:,} answer"
    bars = "".join(f"<i class='{kind}' style='width:{100 * n / longest:.2f}%'></i>" for n, kind in parts)
    mark = "" if column is base else f"<b style='left:{100 * base.length / longest:.2f}%' title='baseline'></b>"
    return (
        f"<div class='tokens'><p><strong>{total:,}</strong> token{'' if total == 1 else 's'}"
        f"<span class='quiet'> {said}</span></p><div class='meter'>{bars}{mark}</div></div>"
    )


def _samples(column: Column, view: View) -> str:
    """With several samples: one button each, and how many are right."""
    if len(column.verdicts) < 2:
        return ""
    shown = min(view.sample, len(column.verdicts) - 1)
    buttons = "".join(
        f"<button class='sample {'right' if verdict == 'correct' else 'not'}{' here' if index == shown else ''}' "
        f"data-go='{urlencode({'sample': index})}' title='sample {index + 1}: {length:,} tokens'>{index + 1}</button>"
        for index, (verdict, length) in enumerate(zip(column.verdicts, column.lengths, strict=True))
    )
    right = sum(verdict == "correct" for verdict in column.verdicts)
    return f"<p class='samples-row'>{buttons}<span class='quiet'>{right} of {len(column.verdicts)} right</span></p>"


def _reasoning(reasoning: str | None, column: Column, *, folded: bool) -> str:
    if reasoning is None:
        return "<p class='quiet none'>No reasoning block.</p>"
    tokens = "" if column.reasoning_tokens is None else f" · {column.reasoning_tokens:,} tokens"
    body = math_html(reasoning) or "<i>empty</i>"
    return (
        f"<details{'' if folded else ' open'}><summary><span class='label'>reasoning</span>"
        f"<span class='quiet'>{tokens}</span></summary>"
        f"<div class='text reasoning' tabindex='0'>{body}</div></details>"
    )


def _grading(record: Mapping[str, Any]) -> str:
    """What the grader read, what it compared with, and why it decided so."""
    extracted = record["extracted"]
    found = "<i>no answer found</i>" if extracted is None else f"<b>{value_html(str(extracted))}</b>"
    rule = f" <span class='quiet'>by rule “{escape(str(record['path']))}”</span>" if record["path"] else ""
    return (
        f"<dl class='grading'><dt>extracted</dt><dd>{found}</dd>"
        f"<dt>right</dt><dd>{value_html(str(record['gold'] or ''))}</dd>"
        f"<dt>grader</dt><dd>{escape(str(record['reason'] or '–'))}{rule}</dd></dl>"
    )


# -- the strip of problems -----------------------------------------------------------------------


def strip_html(table: Table, order: np.ndarray, position: int) -> str:
    """One small square per problem around the one shown, coloured by what became of it; each leads to its problem."""
    start = max(0, min(position - _PIPS // 2, len(order) - _PIPS))
    shown = order[start : start + _PIPS]
    before, after = table.score_CP[0], table.score_CP[-1]
    cells = []
    for place, p in enumerate(shown.tolist(), start):
        if after[p] == before[p]:
            kind = "right" if after[p] >= 0.5 else "still"
        else:
            kind = "up" if after[p] > before[p] else "down"
        here = " here" if place == position else ""
        go = urlencode({"at": table.ids[p]})
        cells.append(f"<i class='{kind}{here}' data-go='{escape(go)}' title='{escape(table.ids[p])}'></i>")
    left = f"<span class='quiet'>{start:,} before</span>" if start else ""
    rest = len(order) - start - len(shown)
    right = f"<span class='quiet'>{rest:,} after</span>" if rest > 0 else ""
    legend = "".join(
        f"<span><i class='{kind}'></i>{text}</span>"
        for kind, text in (
            ("up", "became right"),
            ("down", "became wrong"),
            ("right", "right in both"),
            ("still", "wrong in both"),
        )
    )
    against = f"{escape(table.checkpoints[0].label)} → {escape(table.checkpoints[-1].label)}"
    return f"<div class='strip'>{left}{''.join(cells)}{right}</div><p class='strip-key quiet'>{against}: {legend}</p>"
