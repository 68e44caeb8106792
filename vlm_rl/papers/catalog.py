"""The papers' tables: their runs, their columns, the numbers that a source at hand gives, and what differs here.

A published number is a share in percent, a length in tokens. Where no source at hand gives one, the cell says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from vlm_rl.evaluation.benchmarks.registry import BENCHMARKS


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A benchmark of a table."""

    benchmark: str
    title: str
    facet: tuple[str, str] | None = None  # only the problems with this value
    samples: int | None = None  # responses to each problem, where the paper takes others than the protocol

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
    changes: Sequence[str] = ()  # to the configuration, as key=value

    @property
    def title(self) -> str:
        """Return the run's name in tables and messages."""
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
    # Published numbers, by (model, rule).
    published: Mapping[tuple[str, str], Mapping[str, float]] = field(default_factory=dict)  # benchmark -> number
    averages: Mapping[tuple[str, str], float] = field(default_factory=dict)  # as printed
    has_own_average: bool = True  # whether its columns are those of the published averages
    lengths: Mapping[tuple[str, str], float] = field(default_factory=dict)  # mean tokens of a response
    lengths_of: str = ""  # the benchmark that these are of; "" for all columns

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


def _text_columns(*names: str, **samples: int) -> tuple[TableColumn, ...]:
    return tuple(TableColumn(name, _TEXT_TITLES[name], samples=samples.get(name)) for name in names)


def _numbers(columns: Sequence[TableColumn], *values: float) -> dict[str, float]:
    return dict(zip((column.benchmark for column in columns), values, strict=True))


_MIXTURE = "Qwen3-30B-A3B-Instruct-2507"
_HARNESS = "the paper names no harness and no template; here it is strict, by the protocols of vlm-rl eval protocols"


def _with_own_clip(run: PaperRun) -> PaperRun:
    """Return a run of GSPO with the clip of its own paper in place of LUSPO's."""
    out = f"runs/papers/luspo/{run.config.rpartition('/')[2].removesuffix('.yaml')}_own_clip"
    changes = ["algorithm.clip_low=3e-4", "algorithm.clip_high=4e-4", f"out={out}"]
    return replace(run, rule="GSPO, its own clip", changes=changes)


_CLIPS = (
    "one clip, 2e-3 / 2.5e-3, is printed for the experiments: GSPO and LUSPO have it. GRPO has the .2 / .2 of its "
    "own paper, since its ratio is that of a token. GSPO with the clip of its own paper has a row of its own"
)
_VL_GSPO = PaperRun(_VL, "GSPO", "papers/luspo/qwen2.5_vl_7b_gspo.yaml")

LUSPO_VL = Paper(
    key="luspo-vl",
    title="LUSPO, vision-language",
    arxiv="2602.05261",
    runs=[
        PaperRun(_VL, "GRPO", "papers/luspo/qwen2.5_vl_7b_grpo.yaml"),
        _VL_GSPO,
        _with_own_clip(_VL_GSPO),
        PaperRun(_VL, "LUSPO", "papers/luspo/qwen2.5_vl_7b_luspo.yaml"),
    ],
    columns=_VL_COLUMNS,
    training_sets=["virl39k"],
    source="Table 3 of arXiv 2602.05261",
    differs=[
        _HARNESS,
        "DynaMath is its worst case and WeMath its strict score, which the published level implies and does not say",
        _CLIPS,
        "700 steps are where the paper's curves of length end; AdamW's betas and the image sizes are ours",
        "one seed for each rule",
    ],
    published={
        (_VL, BASE): _numbers(_VL_COLUMNS, 67.4, 26.2, 41.1, 20.2, 34.5, 45.6),
        (_VL, "GRPO"): _numbers(_VL_COLUMNS, 72.8, 28.7, 46.8, 26.2, 43.3, 46.5),
        (_VL, "GSPO"): _numbers(_VL_COLUMNS, 73.9, 27.7, 45.6, 25.9, 40.7, 47.7),
        (_VL, "LUSPO"): _numbers(_VL_COLUMNS, 74.4, 28.0, 47.1, 24.6, 45.6, 53.7),
    },
    averages={(_VL, BASE): 39.2, (_VL, "GRPO"): 44.0, (_VL, "GSPO"): 43.6, (_VL, "LUSPO"): 45.6},
)

LUSPO_MIX = Paper(
    key="luspo-mix",
    title="LUSPO, vision-language and text",
    arxiv="2602.05261",
    runs=[
        PaperRun(_VL, "GSPO", "papers/luspo/qwen2.5_vl_7b_mix_gspo.yaml"),
        PaperRun(_VL, "LUSPO", "papers/luspo/qwen2.5_vl_7b_mix_luspo.yaml"),
    ],
    columns=_VL_COLUMNS,
    training_sets=["virl39k", "dapo_math_blank"],
    source="Table 5 of arXiv 2602.05261",
    differs=[
        _HARNESS,
        "DynaMath is its worst case and WeMath its strict score, which the published level implies and does not say",
        "500 steps are where the paper's curves end; the size of the blank image, AdamW's betas and the image sizes "
        "are ours",
        "one seed for each rule",
    ],
    published={
        (_VL, BASE): LUSPO_VL.published[_VL, BASE],
        (_VL, "GSPO"): _numbers(_VL_COLUMNS, 75.3, 28.3, 45.2, 24.4, 41.3, 47.2),
        (_VL, "LUSPO"): _numbers(_VL_COLUMNS, 75.8, 28.8, 49.9, 26.3, 45.2, 49.4),
    },
    averages={(_VL, BASE): 39.2, (_VL, "GSPO"): 43.6, (_VL, "LUSPO"): 45.9},
)


def _text_runs(model: str, stem: str, *, num_nodes: int) -> list[PaperRun]:
    luspo = PaperRun(model, "LUSPO", f"papers/luspo/{stem}_luspo.yaml", num_nodes)
    gspo = PaperRun(model, "GSPO", f"papers/luspo/{stem}_gspo.yaml", num_nodes)
    grpo = replace(luspo, rule="GRPO", changes=["algorithm.name=grpo", f"out=runs/papers/luspo/{stem}_grpo"])
    return [grpo, gspo, _with_own_clip(gspo), luspo]


_TEXT_COLUMNS = _text_columns("amc23", "aime24", "aime25", "math500")
LUSPO_TEXT = Paper(
    key="luspo-text",
    title="LUSPO, text",
    arxiv="2602.05261",
    runs=[*_text_runs("Qwen2.5-7B", "qwen2.5_7b", num_nodes=1), *_text_runs(_MIXTURE, "qwen3_30b_a3b", num_nodes=4)],
    columns=_TEXT_COLUMNS,
    training_sets=["dapo_math"],
    source="tables 2 and 4 of arXiv 2602.05261, which have no numbers of GRPO; the lengths are of its validation, "
    "for which the authors' repository names AIME 2024 alone",
    differs=[
        _HARNESS,
        "which Qwen3-30B-A3B-Instruct the paper means is our reading: the one of July 2025",
        _CLIPS,
        "140 and 50 steps are where the paper's curves of length end; AdamW's betas are ours",
    ],
    published={
        ("Qwen2.5-7B", BASE): _numbers(_TEXT_COLUMNS, 35.8, 1.6, 3.6, 60.8),
        ("Qwen2.5-7B", "GSPO"): _numbers(_TEXT_COLUMNS, 55.3, 11.8, 11.2, 71.0),
        ("Qwen2.5-7B", "LUSPO"): _numbers(_TEXT_COLUMNS, 58.3, 14.7, 13.9, 78.4),
        (_MIXTURE, BASE): _numbers(_TEXT_COLUMNS, 97.5, 60.0, 57.2, 96.2),
        (_MIXTURE, "GSPO"): {"aime24": 76.7, "aime25": 59.2},
        (_MIXTURE, "LUSPO"): {"aime24": 83.6, "aime25": 76.3},
    },
    averages={
        ("Qwen2.5-7B", BASE): 25.5,
        ("Qwen2.5-7B", "GSPO"): 37.3,
        ("Qwen2.5-7B", "LUSPO"): 41.3,
        (_MIXTURE, "GSPO"): 68.0,
        (_MIXTURE, "LUSPO"): 80.0,
    },
    lengths={
        ("Qwen2.5-7B", "GSPO"): 2611,
        ("Qwen2.5-7B", "LUSPO"): 3940,
        (_MIXTURE, "GSPO"): 6757,
        (_MIXTURE, "LUSPO"): 11014,
    },
    lengths_of="aime24",
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
        "the other three here are ours, so no average of ours stands beside the paper's",
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
    has_own_average=False,
)

_HADW_COLUMNS = _text_columns("math500", "aime25", "amc23", "minerva", "olympiadbench", aime25=16, amc23=16)
_HADW_DIFFERS = [
    "the authors' repository ends each question with \"Let's think step by step and output the final answer within "
    '\\boxed{}."; here the system prompt of the template plain asks, in words of ours',
    "the 16 responses to a problem of AIME25 and AMC23 are the paper's, their temperature and top-p of 1 ours",
    "what HA-DW leaves open is ours (docs/algorithms/hadw.md)",
    "one seed for each rule",
]
_HADW_RULES = [f"{rule}{' + HA-DW' * weighted}" for rule in ("GRPO", "GSPO", "DAPO") for weighted in (False, True)]
_HADW_AVERAGES = {
    "Qwen3-4B-Base": (46.5, 48.7, 47.1, 49.2, 46.8, 49.5),
    "Qwen3-8B-Base": (49.6, 52.5, 50.2, 51.7, 50.7, 53.4),
    "Llama-3.2-3B-Instruct": (25.7, 27.1, 24.9, 25.8, 26.5, 28.1),
}

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
        "DAPO trains 264 steps, 9 epochs if no group is dropped; whether the paper counts dropped groups is not said",
        *_HADW_DIFFERS,
    ],
    published={
        ("Qwen3-4B-Base", "GRPO"): _numbers(_HADW_COLUMNS, 75.4, 19.6, 60.3, 33.8, 43.5),
        ("Qwen3-4B-Base", "GRPO + HA-DW"): _numbers(_HADW_COLUMNS, 78.0, 20.4, 63.4, 36.8, 44.7),
        ("Qwen3-4B-Base", "GSPO"): _numbers(_HADW_COLUMNS, 75.8, 20.0, 62.2, 35.3, 42.3),
        ("Qwen3-4B-Base", "GSPO + HA-DW"): _numbers(_HADW_COLUMNS, 77.6, 19.6, 68.6, 37.1, 43.2),
        ("Qwen3-4B-Base", "DAPO"): _numbers(_HADW_COLUMNS, 76.8, 18.3, 60.0, 35.7, 43.2),
        ("Qwen3-4B-Base", "DAPO + HA-DW"): _numbers(_HADW_COLUMNS, 78.6, 21.3, 65.0, 37.5, 45.3),
        ("Qwen3-8B-Base", "GRPO"): _numbers(_HADW_COLUMNS, 78.8, 20.4, 64.2, 38.2, 46.4),
        ("Qwen3-8B-Base", "GRPO + HA-DW"): _numbers(_HADW_COLUMNS, 80.0, 22.9, 72.8, 39.7, 47.1),
        ("Qwen3-8B-Base", "GSPO"): _numbers(_HADW_COLUMNS, 78.6, 21.7, 67.0, 37.9, 45.9),
        ("Qwen3-8B-Base", "GSPO + HA-DW"): _numbers(_HADW_COLUMNS, 80.2, 22.1, 66.5, 41.9, 47.6),
        ("Qwen3-8B-Base", "DAPO"): _numbers(_HADW_COLUMNS, 79.2, 20.4, 67.5, 39.3, 47.2),
        ("Qwen3-8B-Base", "DAPO + HA-DW"): _numbers(_HADW_COLUMNS, 82.8, 23.3, 70.0, 40.8, 50.0),
        ("Llama-3.2-3B-Instruct", "GRPO"): _numbers(_HADW_COLUMNS, 51.4, 2.7, 31.7, 22.8, 19.9),
        ("Llama-3.2-3B-Instruct", "GRPO + HA-DW"): _numbers(_HADW_COLUMNS, 53.2, 3.3, 35.0, 23.9, 20.1),
        ("Llama-3.2-3B-Instruct", "GSPO"): _numbers(_HADW_COLUMNS, 48.6, 1.9, 30.9, 23.2, 19.8),
        ("Llama-3.2-3B-Instruct", "GSPO + HA-DW"): _numbers(_HADW_COLUMNS, 50.4, 2.3, 32.7, 22.4, 21.0),
        ("Llama-3.2-3B-Instruct", "DAPO"): _numbers(_HADW_COLUMNS, 52.4, 2.5, 35.0, 22.4, 20.2),
        ("Llama-3.2-3B-Instruct", "DAPO + HA-DW"): _numbers(_HADW_COLUMNS, 53.2, 3.1, 37.5, 24.6, 22.3),
    },
    averages={
        (model, rule): mean
        for model, means in _HADW_AVERAGES.items()
        for rule, mean in zip(_HADW_RULES, means, strict=True)
    },
)


def _ablation(rule: str, name: str, *changes: str, weighted: bool = True) -> PaperRun:
    """Return a run of GRPO, with HA-DW if `weighted`, that differs in these keys and writes to a folder `name`."""
    stem = f"qwen3_4b_grpo{'_hadw' * weighted}"
    config = f"papers/hadw/{stem}.yaml"
    return PaperRun("Qwen3-4B-Base", rule, config, changes=[*changes, f"out=runs/papers/hadw/{stem}_{name}"])


_SCALES = {  # lambda -> the row of table 7
    "0.5": (75.4, 18.1, 61.1, 34.2, 43.7, 46.5),
    "0.8": (76.8, 19.2, 61.3, 34.9, 43.7, 47.2),
    "1.0": (76.8, 18.5, 61.6, 36.0, 44.3, 47.4),
    "1.5": (77.8, 20.8, 63.1, 37.1, 44.0, 48.6),
    "1.7": (76.4, 20.0, 63.4, 36.4, 44.3, 48.1),
    "2.0": (76.8, 19.0, 61.9, 35.3, 43.5, 47.3),
}
_THRESHOLDS = {  # fixed belief -> the row of table 2
    "0.4": (77.0, 18.5, 63.1, 37.5, 44.3, 48.1),
    "0.5": (76.6, 20.0, 62.7, 35.7, 44.0, 47.8),
    "0.6": (76.8, 21.3, 61.1, 36.4, 44.3, 48.0),
}
_ABLATED = {
    "GRPO": (75.4, 19.6, 60.3, 33.8, 43.5, 46.5),
    "GRPO, 16 responses": (76.2, 19.2, 61.6, 34.2, 43.9),  # its average is not at hand
    "GRPO + HA-DW": (78.0, 20.4, 63.4, 36.8, 44.7, 48.7),
    **{f"HA-DW, belief {threshold}": row for threshold, row in _THRESHOLDS.items()},
    **{f"HA-DW, lambda {scale}": row for scale, row in _SCALES.items()},
}

HADW_ABLATIONS = Paper(
    key="hadw-ablations",
    title="HA-DW, ablations",
    arxiv="2601.08521",
    runs=[
        *(run for run in HADW.runs if run.model == "Qwen3-4B-Base" and run.rule in ("GRPO", "GRPO + HA-DW")),
        _ablation("GRPO, 16 responses", "16", "rollout.responses_per_prompt=16", weighted=False),
        *(
            _ablation(
                f"HA-DW, belief {threshold}",
                f"belief_{threshold}",
                "algorithm.hadw.variant=constant",
                f"algorithm.hadw.threshold={threshold}",
            )
            for threshold in _THRESHOLDS
        ),
        *(
            _ablation(f"HA-DW, lambda {scale}", f"lambda_{scale}", f"algorithm.hadw.scale={scale}")
            for scale in _SCALES
        ),
        _ablation("HA-DW, published code", "published_code", "algorithm.hadw.variant=published_code"),
    ],
    columns=_HADW_COLUMNS,
    training_sets=["math"],
    source="tables 2, 3 and 7 of arXiv 2601.08521 as a public summary gives them; none is of the published code",
    differs=_HADW_DIFFERS,
    published={("Qwen3-4B-Base", rule): _numbers(_HADW_COLUMNS, *row[:5]) for rule, row in _ABLATED.items()},
    averages={("Qwen3-4B-Base", rule): row[5] for rule, row in _ABLATED.items() if len(row) > 5},
)

PAPERS: dict[str, Paper] = {paper.key: paper for paper in (LUSPO_VL, LUSPO_TEXT, LUSPO_MIX, BA, HADW, HADW_ABLATIONS)}
assert all(column.benchmark in BENCHMARKS for paper in PAPERS.values() for column in paper.columns)
