"""Read one evaluation's records as columns.

R: responses in their stored order. P: problems in their order of appearance.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute

from vlm_rl.demo.numbers.token_counts import Split, TokenCounter
from vlm_rl.errors import UserError
from vlm_rl.run.directory import EvalResult
from vlm_rl.run.eval_record import cluster_labels
from vlm_rl.run.turn_record import read_turns

_LIGHT = ["problem_id", "sample_index", "length", "stop_reason", "verdict", "has_box", "category", "cluster"]
_FAILED = ("timeout", "error")
FileStamp: TypeAlias = tuple[int, int, int]
_compute: Any = pyarrow.compute  # it makes its functions when it is imported: a type checker does not see them


@dataclass(frozen=True, eq=False)
class Responses:
    """Columns of numbers are read at once, texts when they are first asked for."""

    results: tuple[EvalResult, ...]
    stamps: tuple[FileStamp, ...]  # of their files, when the numbers were read
    ids: list[str]  # P
    row_of: dict[str, list[int]]  # problem -> its rows, by sample
    problem_R: np.ndarray  # index into ids
    length_R: np.ndarray  # tokens, as the sampler counted them
    correct_R: np.ndarray
    cut_R: np.ndarray  # ended at the token limit
    no_answer_R: np.ndarray
    failed_R: np.ndarray  # the verifier did not come to a verdict
    category_P: np.ndarray
    cluster_P: np.ndarray  # label shared by problems that were made from one

    def mean_P(self, values_R: np.ndarray) -> np.ndarray:
        """Return the mean over each problem's samples."""
        count = np.bincount(self.problem_R, minlength=len(self.ids))
        return np.bincount(self.problem_R, weights=values_R, minlength=len(self.ids)) / count

    def any_P(self, mask_R: np.ndarray) -> np.ndarray:
        """Say for each problem whether the mask holds for one of its samples."""
        holds = np.zeros(len(self.ids), dtype=bool)
        holds[self.problem_R[mask_R]] = True
        return holds

    @cached_property
    def score_P(self) -> np.ndarray:
        """Return the share of each problem's samples that are right."""
        return self.mean_P(self.correct_R)

    @cached_property
    def texts(self) -> pa.Table:
        """Return id, question, response, extracted answer and gold of every record."""
        return self.rows(["problem_id", "question", "response", "extracted", "gold"])

    @cached_property
    def question_P(self) -> list[str]:
        """Return the question of each problem; empty if the records have none."""
        questions = self.rows(["question"])["question"]
        return [text or "" for text in questions.take([self.row_of[name][0] for name in self.ids]).to_pylist()]

    @cached_property
    def earlier_R(self) -> np.ndarray:
        """Return the tokens of each episode's turns before the last one, whose text alone is its response; else 0."""
        stored = self.rows(["problem_id", "turns"])  # an older file lacks the turns
        turns = stored["turns"].to_pylist() if "turns" in stored.column_names else [None] * len(stored)
        return np.array([sum(turn.num_tokens for turn in read_turns(text)[:-1]) for text in turns], dtype=np.int64)

    def rows(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the stored records, of several runs one after the other.

        Raises UserError as read_records does, and for a file that is no longer the one that the numbers are from.
        """
        table = read_records(self.results, columns)
        for result, stamp in zip(self.results, self.stamps, strict=True):
            if _stamp(result.path) != stamp:
                raise UserError(f"{result.path} was written again since the demo read it; start the demo again")
        return table

    @cached_property
    def format_fault_R(self) -> np.ndarray:
        """Mark the responses that break the form that their template asks for."""
        template = self.results[0].template
        if template is None or not template.has_form:
            return ~self.rows(["has_box"])["has_box"].to_numpy()
        return np.array(
            [not template.is_well_formed(text or "") for text in self.texts["response"].to_pylist()], bool
        )

    def holds_text_R(self, text: str) -> np.ndarray:
        """Mark the responses whose id, question, text, extracted answer or gold contain `text` in any case."""
        holds = np.zeros(len(self.problem_R), dtype=bool)
        for name in self.texts.column_names:
            column = _compute.match_substring(self.texts[name], text, ignore_case=True)
            holds |= _compute.fill_null(column, False).to_numpy()
        return holds

    def says_R(self, phrases: tuple[str, ...]) -> np.ndarray:
        """Mark the responses that say each phrase as whole words in any case, bool [R, phrases]; found once."""
        if phrases not in self._says:
            texts = _compute.utf8_lower(_compute.fill_null(self.texts["response"], ""))
            says = np.stack([_compute.match_substring(texts, phrase).to_numpy() for phrase in phrases], axis=1)
            for place, phrase in enumerate(phrases):  # the slower search where the faster one has found something
                rows = np.flatnonzero(says[:, place])
                whole = _compute.match_substring_regex(texts.take(rows), rf"\b{re.escape(phrase)}\b")
                says[rows, place] = whole.to_numpy()
            self._says[phrases] = says
        return self._says[phrases]

    @cached_property
    def _says(self) -> dict[tuple[str, ...], np.ndarray]:
        return {}

    def records(self, problem_id: str) -> list[dict[str, Any]]:
        """Return a problem's whole records, by sample."""
        rows = self.row_of.get(problem_id, [])
        return self._whole.take(rows).to_pylist() if rows else []

    @cached_property
    def _whole(self) -> pa.Table:
        return self.rows()

    @cached_property
    def split_cache(self) -> dict[str, Split | None]:
        """Hold the split of all responses, by tokenizer."""
        return {}

    @cached_property
    def reasoning_cache(self) -> dict[int, Any]:
        """Hold what was found in the reasoning of single responses, by row (demo/numbers/reasoning.py)."""
        return {}

    def split_R(self, counter: TokenCounter, prefill: str = "") -> Split | None:
        """Return the tokens of reasoning and answer of every response.

        None if the tokenizer cannot be used, or if a response was sampled in several turns, each with its reasoning.
        """
        if self.earlier_R.any():
            return None
        if counter.name not in self.split_cache:
            texts = self.texts["response"].to_pylist()
            self.split_cache[counter.name] = counter.split(texts, self.length_R, prefill=prefill)
        return self.split_cache[counter.name]


def read_records(results: Sequence[EvalResult], columns: Sequence[str] | None = None) -> pa.Table:
    """Return the records of several evaluations of one benchmark, one after the other, in the types of EvalRecord.

    Raises UserError as EvalResult.rows does.
    """
    tables = [result.rows(columns) for result in results]
    return pa.concat_tables(tables, promote_options="default").combine_chunks()


def read_responses(results: Sequence[EvalResult]) -> Responses:
    """Read an evaluation's numbers; of several runs, each run's answers are further samples.

    Raises OSError, KeyError, ArrowException or UserError where a file is broken.
    """
    stamps = tuple(_stamp(result.path) for result in results)
    table = read_records(results, _LIGHT)
    ids = table["problem_id"].to_pylist()
    verdict = table["verdict"].to_numpy()
    order = np.argsort(table["sample_index"].to_numpy(), kind="stable")
    index = {name: place for place, name in enumerate(dict.fromkeys(ids))}
    row_of: dict[str, list[int]] = {}
    for row in order.tolist():
        row_of.setdefault(ids[row], []).append(row)
    names = list(index)
    category = table["category"].to_pylist()
    first_P = pa.array([row_of[name][0] for name in names], pa.int64())
    return Responses(
        results=tuple(results),
        stamps=stamps,
        ids=names,
        row_of=row_of,
        problem_R=np.array([index[name] for name in ids], dtype=np.int64),
        length_R=table["length"].to_numpy().astype(np.int64),
        correct_R=verdict == "correct",
        cut_R=table["stop_reason"].to_numpy() == "length",
        no_answer_R=verdict == "no_answer",
        failed_R=np.isin(verdict.astype(str), _FAILED),
        category_P=np.array([category[row_of[name][0]] or "" for name in names], dtype=object),
        cluster_P=np.array(cluster_labels(table.take(first_P)), dtype=object),
    )


def _stamp(path: Path) -> FileStamp:
    """Return what differs where a file was written again, perhaps within one tick of the clock."""
    known = path.stat()
    return known.st_mtime_ns, known.st_ino, known.st_size


def positions(ids: Sequence[str], wanted: Sequence[str]) -> np.ndarray:
    """Return the place of each wanted id in `ids`; all of them must be there."""
    index = {name: place for place, name in enumerate(ids)}
    return np.array([index[name] for name in wanted], dtype=np.int64)
