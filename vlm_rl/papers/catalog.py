"""The papers' tables: their runs, their columns, the numbers that a source at hand gives, and what differs here.

A published number is a share in percent, a length in tokens. Where no source at hand gives one, the cell says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vlm_rl.evaluation.benchmarks.protocols import PROTOCOLS


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A benchmark of a table."""

    benchmark: str
    title: str
    facet: tuple[str, str] | None = None  # only the problems with this value

    @property
    def folder(self) -> str:
        """Return the name of the prepared set: a split that is no default has a folder of its own."""
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
    published: Mapping[tuple[str, str], Mapping[str, float]] = field(
        default_factory=dict
    )  # (model, rule) -> benchmark

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
}


def _text_columns(*names: str) -> tuple[TableColumn, ...]:
    return tuple(TableColumn(name, _TEXT_TITLES[name]) for name in names)


def _vl_numbers(*values: float) -> dict[str, float]:
    return dict(zip((column.benchmark for column in _VL_COLUMNS), values, strict=True))


_HARNESS = "the paper names no harness and no template; here it is strict, by the protocols of vlm-rl eval protocols"

LUSPO_VL = Paper(
    key="luspo-vl",
    title="LUSPO, vision-language",
    arxiv="2602.05261",
    runs=[PaperRun(_VL, rule.upper(), f"virl39k_{rule}_7b.yaml") for rule in ("grpo", "gspo", "luspo")],
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
        *(
            PaperRun("Qwen2.5-7B", rule.upper(), f"dapo_math_{rule}_qwen2.5_7b_text.yaml")
            for rule in ("gspo", "luspo")
        ),
        *(
            PaperRun(
                "Qwen3-30B-A3B-Instruct-2507", rule.upper(), f"papers/luspo/qwen3_30b_a3b_{rule}.yaml", num_nodes=2
            )
            for rule in ("gspo", "luspo")
        ),
    ],
    columns=_text_columns("amc23", "aime24", "aime25", "math500"),
    training_sets=["dapo_math"],
    source="no source at hand gives the cells of this table",
    differs=[
        _HARNESS,
        "which Qwen3-30B-A3B-Instruct the paper means is our reading: the one of July 2025",
        "the length of the training and AdamW's betas are ours",
    ],
)

BA = Paper(
    key="ba",
    title="Balanced Aggregation",
    arxiv="2605.04077",
    runs=[
        PaperRun(model, f"{data} {rule}", f"papers/ba/{stem}_{data.lower()}_{rule}.yaml")
        for model, stem in (("Qwen2.5-Math-7B", "qwen2.5_math_7b"), ("Qwen3-1.7B", "qwen3_1.7b"))
        for data in ("DAPO", "Polaris")
        for rule in ("sequence", "token", "balanced")
    ],
    columns=_text_columns("math500", "aime24", "aime25", "amc23", "minerva", "olympiadbench"),
    training_sets=["dapo_math", "polaris"],
    source="no source at hand gives the cells of this table",
    differs=[
        _HARNESS,
        "the paper has six reasoning and coding benchmarks; which is not at hand, these six of mathematics are ours; "
        "humaneval_plus, mbpp_plus and livecodebench are measured by vlm-rl eval (docs/code.md)",
        "the hyper-parameters of the paper are not public: all but models, data and aggregations are ours",
    ],
)

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
    columns=_text_columns("math500", "aime25", "amc23", "minerva", "olympiadbench"),
    training_sets=["math"],
    source="no source at hand gives the cells of this table",
    differs=[
        _HARNESS,
        "the paper has five benchmarks of mathematics; which is not at hand, these five are ours",
        "what HA-DW leaves open is ours (docs/algorithms/hadw.md), and so is the template",
    ],
)

PAPERS: dict[str, Paper] = {paper.key: paper for paper in (LUSPO_VL, LUSPO_TEXT, BA, HADW)}
assert all(column.benchmark in PROTOCOLS for paper in PAPERS.values() for column in paper.columns)
