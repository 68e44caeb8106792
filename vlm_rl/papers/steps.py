"""The steps that make a paper's table, in order: each is a command, and says whether it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlm_rl.config import Config, load_config
from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.registry import BENCHMARKS
from vlm_rl.papers.catalog import BASE, Paper, PaperRun
from vlm_rl.papers.downloads import MODELS, TRAINING_SETS, Download, benchmark_download
from vlm_rl.run.directory import RunDirectory
from vlm_rl.run.terminal import start_command
from vlm_rl.study.launch import Launch
from vlm_rl.study.runs import StudyRun

RANKS_OF_A_NODE = 8
CODE_PROMPT_TOKENS = 2048  # ours: a program's question with its examples


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run of a paper with its configuration."""

    run: PaperRun
    file: Path  # its configuration
    changes: Sequence[str]  # to it, as key=value
    planned: StudyRun

    def command(self, ranks: int) -> str:
        """Return the command that trains it by hand."""
        return start_command(["train", str(self.file), *self.changes], ranks, num_nodes=self.run.num_nodes)


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of the table: a model before training, or a run."""

    model: str
    rule: str
    folder: Path  # the model's, or the run's
    results: Path  # of its evaluation
    config: Config  # whose template and limits are measured with


@dataclass(frozen=True, slots=True)
class Step:
    """A command of vlm-rl."""

    words: list[str]  # after vlm-rl
    done: bool

    def shown(self, ranks: int) -> str:
        """Return the command as one types it."""
        return start_command(self.words, ranks)

    def argv(self, ranks: int) -> list[str]:
        """Return the command of a process on this many ranks."""
        return Launch(ranks=ranks).words(self.words, slot=0)


def plan_runs(
    paper: Paper, configs: Path, changes: Callable[[int, Config], Sequence[str]] = lambda *_: ()
) -> list[PlannedRun]:
    """Return the runs of a paper with their configurations.

    Args:
        paper: the paper.
        configs: the folder of shipped configurations.
        changes: returns key=value for what a run's configuration is changed in besides its own changes, from its
            place among the paper's runs and the configuration.

    Raises UserError if a configuration is not there, or is not valid.
    """
    runs = []
    for place, run in enumerate(paper.runs):
        file = configs / run.config
        if not file.is_file():
            raise UserError(
                f"{file} is not there: run the command in the folder that holds configs/, or give --configs FOLDER"
            )
        config = load_config(file, run.changes)
        changed = [*run.changes, *changes(place, config)]
        if len(changed) > len(run.changes):
            config = load_config(file, changed)
        runs.append(PlannedRun(run, file, changed, StudyRun(run.title, config.seed, run.model, config)))
    return runs


def table_rows(paper: Paper, runs: Sequence[PlannedRun], out: Path) -> list[TableRow]:
    """Return the table's rows: each model before training, then its runs."""
    rows = []
    for model in paper.models:
        own = [paper_run for paper_run in runs if paper_run.run.model == model]
        config = own[0].planned.config
        rows.append(TableRow(model, BASE, Path(config.model.path), out / f"{model}-eval", config))
        for paper_run in own:
            folder = paper_run.planned.out
            results = folder.with_name(f"{folder.name}-eval")
            rows.append(TableRow(model, paper_run.run.rule, folder, results, paper_run.planned.config))
    return rows


def downloads(paper: Paper) -> list[Download]:
    """List the table's downloads from the hub: models, training sets, benchmarks."""
    return [
        *(MODELS[model] for model in paper.models),
        *(TRAINING_SETS[name].download for name in paper.training_sets),
        *(benchmark_download(column.benchmark) for column in paper.columns),
    ]


def prepare_steps(paper: Paper, data: Path) -> list[Step]:
    """Return the commands that prepare the training sets and the benchmarks."""
    trained = {name: TRAINING_SETS[name] for name in paper.training_sets}
    asked = [(of.source, of.download.folder, name, [*of.words]) for name, of in trained.items()]
    asked += [
        (
            column.benchmark,
            benchmark_download(column.benchmark).folder,
            column.folder,
            ["--split", column.split] if column.split else [],
        )
        for column in paper.columns
    ]
    if "virl39k" in paper.training_sets:  # what these runs evaluate on meanwhile
        folder = benchmark_download("mathvision").folder
        asked.append(("mathvision", folder, "mathvision", ["--split", "testmini"]))
    steps = []
    for source, raw, name, more in asked:
        out = data / name
        words = ["prepare", source, "--source", raw, "--out", str(out), *more]
        steps.append(Step(words, (out / "manifest.json").is_file()))
    return steps


def eval_steps(paper: Paper, row: TableRow, data: Path, extra: Sequence[str] = ()) -> list[Step]:
    """Return the commands that measure a row, with the limits of its run also where it is a model before training.

    Sets of programs have a command of their own: their questions are longer than the training's, and what their
    prompts take of the run's context is taken from the responses. So have sets of which the paper takes a number of
    responses of its own. A model that its run divides among ranks is divided here too.

    Args:
        paper: whose columns are measured.
        row: the model or run, and where its results go.
        data: folder of the prepared sets.
        extra: words that every command ends with.
    """
    config = row.config
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_tokens
    longer = max(prompt, min(CODE_PROMPT_TOKENS, (prompt + response) // 2))
    kinds: dict[tuple[bool, int | None], list[str]] = {}  # programs or not, responses -> sets
    for column in paper.columns:
        kind = (BENCHMARKS[column.benchmark].has_programs, column.samples)
        kinds.setdefault(kind, []).append(column.folder)
    limits = {
        False: ["--max-prompt-tokens", str(prompt)],
        True: ["--max-prompt-tokens", str(longer), "--max-tokens", str(prompt + response - longer)],
    }
    if row.rule == BASE:
        limits[False] += ["--template", config.data.prompt_template.name, "--max-tokens", str(response)]
    engine = []
    if (size := config.rollout.tensor_parallel) > 1:
        engine = ["--sampler", "vllm", "--tensor-parallel", str(size)]
    step = 0 if row.rule == BASE else config.train.steps
    measured = {result.benchmark for result in RunDirectory(row.results).evals() if result.step == step}
    steps = []
    for (has_programs, samples), names in kinds.items():
        command = ["eval", "--model", str(row.folder), "--data", *(str(data / name) for name in names)]
        command += ["--out", str(row.results), *limits[has_programs]]
        if samples is not None:
            # Greedy decoding gives one response; the protocol's top-p is that of another paper.
            command += ["--samples", str(samples), "--temperature", "1", "--top-p", "1"]
        steps.append(Step([*command, *engine, *extra], {*names} <= measured))
    return steps
