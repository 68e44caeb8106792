"""What a benchmark consists of, and what its rule works on: a problem, a response to it, and the verdict.

A benchmark's file reads an annotated row into a `Problem`, in one place. Preparation stores that problem, `vlm-rl
eval` asks and judges it, and `vlm-rl score` reads it from the authors' file. So all three see the same gold and
options.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from vlm_rl.evaluation.benchmarks.protocols import EvalProtocol, Stated
from vlm_rl.templates import Template
from vlm_rl.types import IMAGE_MARKER, Problem, Verdict, name_videos

Mode = Literal["strict", "official"]
RawRow = Mapping[str, Any]  # a row under the authors' own column names


@dataclass(frozen=True, slots=True)
class Response:
    """One response to a problem, with what its file says about it."""

    id: str  # of the problem, as its authors name it
    text: str
    sample: int = 0  # 0 .. k-1
    extraction: str | None = None  # what the authors' judge model extracted, where the file has it
    published: bool | None = None  # the file's own verdict
    gold: str | None = None  # the gold that the file states: shows responses to other problems
    length: int | None = None  # tokens
    stop_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict of a rule on one response."""

    verdict: Verdict
    extracted: str | None
    reason: str
    note: str = ""  # "free point", or why the authors' own code may judge this response differently


@dataclass(frozen=True, slots=True)
class JudgedResponse:
    """A response with its problem and its verdict: what every score is computed from."""

    problem: Problem
    response: Response
    judgement: Judgement
    has_box: bool
    cluster: str | None = None  # of the problem (Benchmark.cluster_of)

    @property
    def correct(self) -> bool:
        """Tell whether the verdict is `correct`; all others count as wrong."""
        return self.judgement.verdict == "correct"


@dataclass(frozen=True, slots=True)
class PublishedPrompt:
    """The authors' words before and after a question, sent with their system prompt, if they have one, or none.

    `by_kind` replaces `before`, and `after_by_kind` precedes `after`, for the kinds of answer that they name:
    "choice" (any problem with options), "list", or the type of the answer ("integer", "float"; "float 2" with
    stated decimals).
    """

    name: str
    source: str  # where it is published, and under which licence
    before: str
    after: str = ""
    system: str = ""
    by_kind: Mapping[str, str] = field(default_factory=dict)
    after_by_kind: Mapping[str, str] = field(default_factory=dict)

    @property
    def template(self) -> Template:
        """Return the template by which the strict rule finds the answer: in the last box, wherever it is."""
        return Template(name=self.name, system=self.system)

    def applied(self, problem: Problem) -> Problem:
        """Return the problem with the authors' words around its question."""
        kind = _kind_of_answer(problem)
        before, after = self.by_kind.get(kind, self.before), self.after_by_kind.get(kind, "") + self.after
        return replace(problem, question=f"{before}{problem.question}{after}")


def _kind_of_answer(problem: Problem) -> str:
    if problem.choices:
        return "choice"
    if problem.meta.get("answer_type") == "list":  # MathVista's lists are prepared as expressions
        return "list"
    decimals = problem.meta.get("precision")
    return problem.answer_type if decimals is None else f"{problem.answer_type} {decimals}"


def question_text(problem: Problem) -> str:
    """Return the question as text alone, for a judge model that sees no image."""
    return name_videos(problem.question, problem.videos).replace(IMAGE_MARKER, "").strip()


class UnreadableReplyError(Exception):
    """Raised by a dialogue for a reply of the judge that its rule does not read; the message says what it is."""


@dataclass(frozen=True, slots=True)
class PublishedJudge:
    """The judge model of a published rule: what its authors ask it, and what they make of the replies.

    `dialogue` yields each request as a text, is sent the reply, and returns the verdict in the end. It raises
    UnreadableReplyError for a reply that it cannot use.
    """

    model: str  # that the authors asked
    source: str  # of the words, with their licence
    dialogue: Callable[[Problem, Response], Generator[str, str, Judgement]]
    temperature: float = 0.0
    max_tokens: int = 256  # of a reply
    takes_extractions: bool = False  # the rule reads an extraction that a file ships as this model's reply


def one_image(*columns: str) -> Callable[[RawRow], Sequence[Any]]:
    """Return a reader of the one image of a row, which is under the first of `columns` that the row has."""
    return lambda row: [next((row[name] for name in columns if row.get(name) not in (None, "")), None)]


IMAGE_OF_ROW = one_image("decoded_image", "image")


def nothing(_: object) -> dict[str, Any]:
    """Return no facets and no parts: the default of a benchmark without them."""
    return {}


def one_row(row: RawRow, _path: Path, _place: int) -> Mapping[str, RawRow]:
    """Return a row of a file as it is: the default of a benchmark without layouts of its own."""
    return {"": row}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkFiles:
    """Where a benchmark's annotations are published, and how they are divided."""

    hub: str  # repository on the Hugging Face hub
    hub_files: tuple[str, ...] = ("*.parquet", "**/*.parquet")  # what preparation needs of it
    tables: tuple[str, ...]  # where the annotated rows are: glob patterns, tried in order, which may hold {split}
    # split -> the files that make it, all of them; such a benchmark has no use for `tables` but a single file
    split_files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    splits: tuple[str, ...] = ("",)  # the first is the default; "" if there is only one
    num_rows: tuple[int, ...] = ()  # published numbers of rows, of each split or edition
    image_folder: str = ""  # where images that the rows name are, beside the table
    has_trials: bool = False  # every file that fits `tables` is a trial of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkRows:
    """How a row of annotations is read, and what a file of responses calls things.

    `read_row` returns the problem of an annotated row, without its images. Its `answer` is what the grader compares
    with; where the authors' gold is a different text, `meta["gold"]` holds that. A row without a question gives a
    problem without one, which can be scored but not asked. A row that cannot be judged raises UnusableRowError.

    `saved_rows` takes a row, its file and the file's place among several. It returns name -> row of what the row
    stands for in a layout of the authors' own, such as a table with a column per trial. The names are for messages.
    """

    read_row: Callable[[RawRow], Problem]
    images: Callable[[RawRow], Sequence[Any]] = IMAGE_OF_ROW  # a None in them: missing in the row
    saved_rows: Callable[[RawRow, Path, int], Mapping[str, RawRow]] = one_row
    needs_options: bool = False  # a row whose options cannot be told apart cannot be asked
    response_ids: tuple[str, ...]  # columns, or templates of columns, that name a response's problem
    short_answer: str = ""  # what the rule starts from: its key in a reply that is JSON; a file may hold it alone
    carries_annotations: bool = False  # files of responses hold the annotated rows' columns as well


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRule:
    """How the authors judge a response.

    `judgement` returns the published verdict, or a text that the grader compares with the gold. `needs_judge_model`
    says that the published rule asks a model, and `judge` is what it is asked, where the words are known. Without a
    judge model our rules take its place, the result is emulated, and `emulation` says how far such results have been
    from published ones.
    """

    judgement: Callable[[Problem, Response], Judgement | str]
    needs_judge_model: bool
    judge: PublishedJudge | None = None
    emulation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkReport:
    """What is reported of judged responses.

    `facets` returns what a problem's score is reported by; a value may be a list, as MathVista's skills are.

    `cluster_key` is the key of `meta` under which problems that were made from one problem have the same value. Their
    verdicts are not independent, so intervals are over such clusters.
    """

    facets: Callable[[Problem], Mapping[str, Any]] = nothing
    cluster_key: str = ""
    scores: Callable[[Sequence[JudgedResponse]], dict[str, Any]] | None = None  # None: accuracy and pass@k
    headline: str = "accuracy"  # the score that papers print
    headline_parts: Callable[[Sequence[JudgedResponse]], dict[str, float]] = nothing  # what it is the mean of


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """Everything that is particular to one benchmark: how it is read, asked, judged and reported."""

    name: str  # the problems' `source`, and the prefix of their ids
    license: str = ""  # of the data, where its authors state one
    protocol: EvalProtocol  # how it is measured where the command line says nothing
    files: BenchmarkFiles
    rows: BenchmarkRows
    rule: PublishedRule
    report: BenchmarkReport = BenchmarkReport()
    prompt: PublishedPrompt | None = None
    has_programs: bool = False  # an answer is a program, which no template that asks for a box can get

    @property
    def stated_template(self) -> Stated:
        """Return the template of models that are not checkpoints of a run, in official mode, with its source."""
        if self.prompt is None:
            return Stated("plain", "ours: its authors publish no prompt")
        return Stated(self.prompt.name, self.prompt.source)

    def own_id(self, problem: Problem) -> str:
        """Return the authors' id of a problem."""
        return problem.id.removeprefix(f"{self.name}-")

    def cluster_of(self, problem: Problem) -> str | None:
        """Return a name that problems made from the same one share, such as "seed 7"; None for one on its own."""
        value = problem.meta.get(self.report.cluster_key)
        return None if value is None else f"{self.report.cluster_key} {value}"

    def facet_values(self, problem: Problem) -> dict[str, tuple[str, ...]]:
        """Return facet -> the problem's values, as texts; one empty text where the row does not say."""
        return {
            facet: tuple(map(str, value)) if isinstance(value, list | tuple) else (str(value),)
            for facet, value in self.report.facets(problem).items()
        }


def authors_gold(problem: Problem) -> str:
    """Return the gold as its authors write it."""
    return str(problem.meta.get("gold", problem.answer))
