"""The papers' tables: their runs, their columns, the numbers that a source at hand gives, and what differs here.

A published number is a share in percent, a length in tokens. Where no source at hand gives one, the cell says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vlm_rl.evaluation.benchmarks.registry import BENCHMARKS


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A benchmark of a table."""

    benchmark: str
    title: str
    facet: tuple[str, str] | None = None  # only the problems with this value

    @property
    def folder(self) -> str:
        """Return the name of the prepared set: a split that is not a default has a folder of its own."""
        return f"{self.benchmark}_{self.split}" if self.split else self.benchmark

    @property
    def split(self) -> str:
        """Return the split to prepare; "" for the default one."""
        return "test" if self.benchmark == "mathvision" else ""


@dataclass(frozen=True, slots=True)
class PaperRun:
    """A trained row of a table."""

    model: str  # a key of downloads.MODELS
    rule: str  # as the paper calls it
    config: str  # below the folder of configurations
    num_nodes: int = 1  # of eight cards

    @property
    def title(self) -> str:
        """Return what tables and messages call the run."""
        return f"{self.model} {self.rule}"


@dataclass(frozen=True, slots=True)
class PublishedGain:
    """A difference of two rows that is published without the rows' own numbers."""

    model: str
    rule: str
    over: str  # the rule of the other row
    benchmark: str
    points: float


@dataclass(frozen=True, slots=True)
class Paper:
    """A table of a paper."""

    key: str
    title: str
    arxiv: str
    runs: Sequence[PaperRun]
    columns: Sequence[TableColumn]
    training_sets: Sequence[str]  # keys of downloads.TRAINING_SETS
    source: str  # of the published numbers, or why there are none
    differs: Sequence[str]
    # Published numbers, by (model, rule).
    published: Mapping[tuple[str, str], Mapping[str, float]] = field(default_factory=dict)  # benchmark -> number
    averages: Mapping[tuple[str, str], float] = field(default_factory=dict)  # where not all cells are known
    lengths: Mapping[tuple[str, str], float] = field(default_factory=dict)  # mean tokens of a response
    gains: Sequence[PublishedGain] = ()

    @property
    def models(self) -> list[str]:
        """Return the models that the runs start from, in their order."""
        return list(dict.fromkeys(run.model for run in self.runs))


BASE = "base"  # the rule of a row that is not trained

_VL = "Qwen2.5-VL-7B-Instruct"
_VL_COLUMNS = (
    TableColumn("mathvista", "MathVista"),
    TableColumn("mathvision", "MathVision"),
    TableColumn("mathverse", "MathVerse Vision Only", ("version", "Vision Only")),
    TableColumn("dynamath", "DynaMath"),
    TableColumn("wemath", "WeMath"),
    TableColumn("logicvista", "LogicVista"),
)
_TEXT_TITLES = {
    "amc23": "AMC23",
    "aime24": "AIME24",
    "aime25": "AIME25",
    "math500": "MATH500",
    "minerva": "Minerva",
    "olympiadbench": "OlympiadBench",
    "livecodebench": "LiveCodeBench",
}


def _text_columns(*names: str) -> tuple[TableColumn, ...]:
    return tuple(TableColumn(name, _TEXT_TITLES[name]) for name in names)


def _vl_numbers(*values: float) -> dict[str, float]:
    return dict(zip((column.benchmark for column in _VL_COLUMNS), values, strict=True))


_MIXTURE = "Qwen3-30B-A3B-Instruct-2507"
_HARNESS = "the paper names no harness and no template; here it is strict, by the protocols of vlm-rl eval protocols"

LUSPO_VL = Paper(
    key="luspo-vl",
    title="LUSPO, vision-language",
    arxiv="2602.05261",
    runs=[
        PaperRun(_VL, rule.upper(), f"papers/luspo/qwen2.5_vl_7b_{rule}.yaml") for rule in ("grpo", "gspo", "luspo")
    ],
    columns=_VL_COLUMNS,
    training_sets=["virl39k"],
    source="Table 3 of arXiv 2602.05261",
    differs=[
        _HARNESS,
        "DynaMath is its worst case and WeMath its strict score, which the published level implies and does not say",
        "the length of the training, AdamW's betas and the image sizes are ours",
        "one seed for each rule",
    ],
    published={
        (_VL, BASE): _vl_numbers(67.4, 26.2, 41.1, 20.2, 34.5, 45.6),
        (_VL, "GRPO"): _vl_numbers(72.8, 28.7, 46.8, 26.2, 43.3, 46.5),
        (_VL, "GSPO"): _vl_numbers(73.9, 27.7, 45.6, 25.9, 40.7, 47.7),
        (_VL, "LUSPO"): _vl_numbers(74.4, 28.0, 47.1, 24.6, 45.6, 53.7),
    },
)

LUSPO_TEXT = Paper(
    key="luspo-text",
    title="LUSPO, text",
    arxiv="2602.05261",
    runs=[
        *(PaperRun("Qwen2.5-7B", rule.upper(), f"papers/luspo/qwen2.5_7b_{rule}.yaml") for rule in ("gspo", "luspo")),
        *(
            PaperRun(_MIXTURE, rule.upper(), f"papers/luspo/qwen3_30b_a3b_{rule}.yaml", num_nodes=2)
            for rule in ("gspo", "luspo")
        ),
    ],
    columns=_text_columns("amc23", "aime24", "aime25", "math500"),
    training_sets=["dapo_math"],
    source="public summaries of arXiv 2602.05261, not its tables; the lengths are of its validation, on a set that "
    "they do not name",
    differs=[
        _HARNESS,
        "which Qwen3-30B-A3B-Instruct the paper means is our reading: the one of July 2025",
        "the length of the training and AdamW's betas are ours",
    ],
    published={(_MIXTURE, "GSPO"): {"aime25": 59.2}, (_MIXTURE, "LUSPO"): {"aime25": 76.3}},
    lengths={
        ("Qwen2.5-7B", "GSPO"): 2611,
        ("Qwen2.5-7B", "LUSPO"): 3940,
        (_MIXTURE, "GSPO"): 6757,
        (_MIXTURE, "LUSPO"): 11014,
    },
    gains=[
        PublishedGain("Qwen2.5-7B", "LUSPO", "GSPO", "aime24", 2.9),
        PublishedGain("Qwen2.5-7B", "LUSPO", "GSPO", "aime25", 2.7),
        PublishedGain("Qwen2.5-7B", "LUSPO", "GSPO", "math500", 7.4),
        PublishedGain(_MIXTURE, "LUSPO", "GSPO", "aime24", 6.9),
    ],
)

_AGGREGATIONS = ("sequence", "token", "balanced")

BA = Paper(
    key="ba",
    title="Balanced Aggregation",
    arxiv="2605.04077",
    runs=[
        PaperRun(model, f"{data} {rule}", f"papers/ba/{stem}_{data.lower()}_{rule}.yaml")
        for model, stem in (("Qwen2.5-Math-7B", "qwen2.5_math_7b"), ("Qwen3-1.7B", "qwen3_1.7b"))
        for data in ("DAPO", "Polaris")
        for rule in _AGGREGATIONS
    ],
    columns=_text_columns("math500", "aime24", "aime25", "livecodebench", "amc23", "minerva", "olympiadbench"),
    training_sets=["dapo_math", "polaris"],
    source="table 1 of arXiv 2605.04077 as public summaries give it: means of its six benchmarks at the last step",
    differs=[
        _HARNESS,
        "the paper has six reasoning and coding benchmarks, MATH500, AIME24, AIME25 and LiveCodeBench among them; "
        "the other three here are ours, so the averages are not the paper's",
        "which release of LiveCodeBench the paper takes is not at hand: here release_v6, official, its own prompt; "
        "its questions may take 2,048 tokens of the run's context",
        "the hyper-parameters of the paper are not public: all but models, data and aggregations are ours",
    ],
    averages={
        (model, f"{data} {rule}"): mean
        for (model, data), means in {
            ("Qwen2.5-Math-7B", "DAPO"): (34.5, 33.6, 34.2),
            ("Qwen2.5-Math-7B", "Polaris"): (31.7, 32.9, 33.2),
            ("Qwen3-1.7B", "DAPO"): (44.8, 43.6, 47.0),
            ("Qwen3-1.7B", "Polaris"): (46.1, 43.5, 46.4),
        }.items()
        for rule, mean in zip(_AGGREGATIONS, means, strict=True)
    },
)

_HADW_COLUMNS = _text_columns("math500", "aime25", "amc23", "minerva", "olympiadbench")


def _hadw_numbers(*values: float) -> dict[str, float]:
    return dict(zip((column.benchmark for column in _HADW_COLUMNS), values, strict=True))


HADW = Paper(
    key="hadw",
    title="HA-DW",
    arxiv="2601.08521",
    runs=[
        PaperRun(
            model, f"{rule.upper()}{' + HA-DW' * weighted}", f"papers/hadw/{stem}_{rule}{'_hadw' * weighted}.yaml"
        )
        for model, stem in (
            ("Qwen3-4B-Base", "qwen3_4b"),
            ("Qwen3-8B-Base", "qwen3_8b"),
            ("Llama-3.2-3B-Instruct", "llama3.2_3b"),
        )
        for rule in ("grpo", "gspo", "dapo")
        for weighted in (False, True)
    ],
    columns=_HADW_COLUMNS,
    training_sets=["math"],
    source="Table 1 of arXiv 2601.08521v2",
    differs=[
        "AIME25 and AMC23 are averages of 16 responses in the paper, of 32 here",
        "the paper asks for the answer after each question, here the system prompt of the template plain does",
        "what HA-DW leaves open is ours (docs/algorithms/hadw.md)",
        "one seed for each rule",
    ],
    published={
        ("Qwen3-4B-Base", "GRPO"): _hadw_numbers(75.4, 19.6, 60.3, 33.8, 43.5),
        ("Qwen3-4B-Base", "GRPO + HA-DW"): _hadw_numbers(78.0, 20.4, 63.4, 36.8, 44.7),
        ("Qwen3-4B-Base", "GSPO"): _hadw_numbers(75.8, 20.0, 62.2, 35.3, 42.3),
        ("Qwen3-4B-Base", "GSPO + HA-DW"): _hadw_numbers(77.6, 19.6, 68.6, 37.1, 43.2),
        ("Qwen3-4B-Base", "DAPO"): _hadw_numbers(76.8, 18.3, 60.0, 35.7, 43.2),
        ("Qwen3-4B-Base", "DAPO + HA-DW"): _hadw_numbers(78.6, 21.3, 65.0, 37.5, 45.3),
        ("Qwen3-8B-Base", "GRPO"): _hadw_numbers(78.8, 20.4, 64.2, 38.2, 46.4),
        ("Qwen3-8B-Base", "GRPO + HA-DW"): _hadw_numbers(80.0, 22.9, 72.8, 39.7, 47.1),
        ("Qwen3-8B-Base", "GSPO"): _hadw_numbers(78.6, 21.7, 67.0, 37.9, 45.9),
        ("Qwen3-8B-Base", "GSPO + HA-DW"): _hadw_numbers(80.2, 22.1, 66.5, 41.9, 47.6),
        ("Qwen3-8B-Base", "DAPO"): _hadw_numbers(79.2, 20.4, 67.5, 39.3, 47.2),
        ("Qwen3-8B-Base", "DAPO + HA-DW"): _hadw_numbers(82.8, 23.3, 70.0, 40.8, 50.0),
        ("Llama-3.2-3B-Instruct", "GRPO"): _hadw_numbers(51.4, 2.7, 31.7, 22.8, 19.9),
        ("Llama-3.2-3B-Instruct", "GRPO + HA-DW"): _hadw_numbers(53.2, 3.3, 35.0, 23.9, 20.1),
        ("Llama-3.2-3B-Instruct", "GSPO"): _hadw_numbers(48.6, 1.9, 30.9, 23.2, 19.8),
        ("Llama-3.2-3B-Instruct", "GSPO + HA-DW"): _hadw_numbers(50.4, 2.3, 32.7, 22.4, 21.0),
        ("Llama-3.2-3B-Instruct", "DAPO"): _hadw_numbers(52.4, 2.5, 35.0, 22.4, 20.2),
        ("Llama-3.2-3B-Instruct", "DAPO + HA-DW"): _hadw_numbers(53.2, 3.1, 37.5, 24.6, 22.3),
    },
)

PAPERS: dict[str, Paper] = {paper.key: paper for paper in (LUSPO_VL, LUSPO_TEXT, BA, HADW)}
assert all(column.benchmark in BENCHMARKS for paper in PAPERS.values() for column in paper.columns)
