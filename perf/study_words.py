"""Ask the length question in real language: SmolLM2-135M, word problems and pictures, responses in four styles.

    python -m perf.study_words runs/words            # a GPU: five tasks, all rules, three seeds, 60 steps
    python -m perf.study_words runs/words --on-cpu --jobs 2   # two cores, an hour: one task, two rules, 12 steps
    python -m perf.study_words runs/words --on-cpu --rules vl_norm sapo   # two more rules, which join the tables
    python -m perf.study_words runs/words --tables   # from the runs that are there

Stop it anywhere: the same command goes on. docs/study/words.md says what is compared and why.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from perf import small_vlm
from vlm_rl.commands.real_quickstart import RealSizes, cold_start, sft_config
from vlm_rl.data_prep.picture_sets import make_styled_sets
from vlm_rl.data_prep.word_sets import make_word_sets
from vlm_rl.demo.numbers.reasoning import measure
from vlm_rl.devices import has_gpu
from vlm_rl.paired import Paired, pair, problem_scores
from vlm_rl.run.directory import RunDirectory
from vlm_rl.toy.drawn_pictures import PICTURE_TRACE_SHARE, picture_style_of
from vlm_rl.toy.smollm import make_smollm
from vlm_rl.toy.word_problems import LARGE, SMALL, STUDY_SHARE, STYLES, style_of

STUDY = Path(__file__).resolve().parents[1] / "configs" / "studies" / "words.yaml"
NUMBERS = {"small": SMALL, "large": LARGE}
PICTURES = "pictures"
SIZES = {"small": RealSizes(cold_steps=45), "large": RealSizes(cold_steps=60), PICTURES: RealSizes(cold_steps=60)}
WINDOW = 3  # steps at the beginning and at the end whose responses a row of the tables counts
BASELINE = "grpo"


@dataclass(frozen=True, slots=True)
class StudyTask:
    """The sets that it trains on, and what is rewarded."""

    sets: str  # key of SIZES
    reward: Mapping[str, float] = field(default_factory=dict)

    @property
    def styles(self) -> Sequence[str]:
        """Return the styles of its traces."""
        return list(PICTURE_TRACE_SHARE) if self.sets == PICTURES else STYLES

    @property
    def style_of(self) -> Callable[[str], str]:
        """Return the function that tells a response's style."""
        return picture_style_of if self.sets == PICTURES else style_of


TASKS = {
    "small": StudyTask("small"),
    "large": StudyTask("large"),
    "form": StudyTask("small", {"accuracy": 0, "format": 1}),
    "coin": StudyTask("small", {"accuracy": 0, "format": 0, "overlong_buffer": 0, "coin": 1}),
    "pictures": StudyTask(PICTURES),
}
CPU_TASKS, CPU_RULES = ("small",), ("grpo", "luspo")
CPU_CHANGES = (
    "seeds=[0]",
    "base.train.steps=12",
    "base.train.mini_batch_prompts=4",
    "base.train.micro_batch_tokens=2048",
    "base.rollout.prompts_per_step=8",
    "base.eval.every=12",
)


def run_task(
    folder: Path, name: str, *, rules: Sequence[str] | None = None, changes: Sequence[str] = (), jobs: int = 1
) -> None:
    """Make what the task needs, train its runs, and write its page; what is finished is kept.

    Args:
        folder: where everything is made.
        name: of the task.
        rules: of the study's file; None: all that the task tells apart. Without images every credit is uniform.
        changes: keys of the study's file with other values, as `vlm-rl study` takes them.
        jobs: runs at a time.

    Raises CalledProcessError if a run fails, whose log has been printed.
    """
    task = TASKS[name]
    start, sets = make_start(folder, task.sets), folder / task.sets
    study = yaml.safe_load(STUDY.read_text(encoding="utf-8"))
    if rules is None:
        seen = task.sets == PICTURES
        rules = [rule for rule, keys in study["rules"].items() if seen or "algorithm.credit" not in keys]
    study["rules"] = {rule: study["rules"][rule] for rule in dict.fromkeys([BASELINE, *rules])}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(study, sort_keys=False), encoding="utf-8")
    words = [
        f"base.data.train=[{sets / 'train'}]",
        f"base.data.eval=[{sets / 'heldout'}]",
        f"starts={{a: {start}}}",
        *(f"base.reward.{key}={value}" for key, value in task.reward.items()),
        *changes,
    ]
    command = [sys.executable, "-m", "vlm_rl", "study", file, *words, "--jobs", jobs, "--out", folder / "runs" / name]
    subprocess.run([str(word) for word in command], check=True)


def make_start(folder: Path, name: str) -> Path:
    """Make the sets of this name and the cold start on their traces; return its last checkpoint.

    The policy of pictures is the small vision-language model, which learns to see before.
    """
    sizes, made = SIZES[name], folder / name
    counts = {"traces": sizes.traces, "train": sizes.train, "heldout": sizes.heldout}
    if name == PICTURES:
        sets = make_styled_sets(made, **counts)
        seeing, _ = small_vlm.learn(folder / "small-vlm", small_vlm.SIZES[False])
        model = seeing.checkpoints()[-1][1]
    else:
        sets = make_word_sets(made, numbers=NUMBERS[name], shares=STUDY_SHARE, **counts)
        model = make_smollm(folder / "SmolLM2-135M-Instruct")
    return cold_start(sft_config(sets, model, made / "start", seed=0, sizes=sizes))


def table_of(folder: Path, task: StudyTask) -> str:
    """Return the tables of a task's runs in Markdown: sampled responses, their styles, held-out problems."""
    runs = {rule.name: _runs_of(rule) for rule in sorted(folder.iterdir()) if rule.is_dir() and _runs_of(rule)}
    baselines = {run.path.name: run for run in runs.get(BASELINE, [])}
    sampled = [
        "| rule | steps | accuracy | length | of right | of wrong | after the first right statement |",
        "|---" * 7 + "|",
    ]
    styles = ["| rule | steps | " + " | ".join(task.styles) + " |", "|---" * (2 + len(task.styles)) + "|"]
    greedy = ["| rule | seed | accuracy | length | minus grpo: points | tokens |", "|---" * 6 + "|"]
    for name in sorted(runs, key=lambda name: name != BASELINE):  # the baseline first
        for window in ("first", "last"):
            rows = [row for run in runs[name] for row in _sampled(run, last=window == "last")]
            sampled.append(f"| `{name}` | {window} | {_sampled_cells(rows)} |")
            cells = [
                _style_cell([row for row in rows if task.style_of(row["text"]) == style], len(rows))
                for style in task.styles
            ]
            styles.append(f"| `{name}` | {window} | {' | '.join(cells)} |")
        greedy += _greedy_rows(name, runs[name], baselines)
    return "\n\n".join("\n".join(lines) for lines in (sampled, styles, greedy))


def _runs_of(rule: Path) -> list[RunDirectory]:
    """Return the rule's finished runs: those that were evaluated after their last step."""
    found = [RunDirectory(path) for path in sorted(rule.glob("seed-*")) if path.is_dir()]
    return [run for run in found if run.evals() and run.evals()[-1].step == run.config().train.steps]


def _sampled(run: RunDirectory, *, last: bool) -> list[dict[str, Any]]:
    """Return the sampled responses of the first or the last WINDOW steps, each with the gold of its problem."""
    steps = run.rollout_steps()
    rows: list[dict[str, Any]] = []
    for step in steps[-WINDOW:] if last else steps[:WINDOW]:
        rows += run.rollouts(step, ["text", "verdict", "length", "extracted"]).to_pylist()
    return rows


def _sampled_cells(rows: Sequence[Mapping[str, Any]]) -> str:
    right = [row for row in rows if row["verdict"] == "correct"]
    wrong = [row for row in rows if row["verdict"] != "correct"]
    after = [
        measure(row["text"], row["extracted"]).share_after for row in right
    ]  # a right one's own answer is the gold
    stated = [share for share in after if share is not None]
    lengths = " | ".join(f"{_mean([row['length'] for row in part]):.0f}" for part in (rows, right, wrong))
    return f"{len(right) / len(rows):.1%} | {lengths} | {_mean(stated):.0%}"


def _style_cell(rows: Sequence[Mapping[str, Any]], count: int) -> str:
    """Say which share of `count` responses the rows of a style are, how many of them are right, and their length."""
    if not rows:
        return "0 %"
    right = _mean([row["verdict"] == "correct" for row in rows])
    return f"{len(rows) / count:.0%}, {right:.0%} right, {_mean([row['length'] for row in rows]):.0f} tokens"


def _greedy_rows(name: str, runs: Sequence[RunDirectory], baselines: Mapping[str, RunDirectory]) -> list[str]:
    lines = []
    for run in runs:
        first, last = (problem_scores(run.evals()[at].rows().to_pylist()) for at in (0, -1))
        change = pair(first, last)
        assert change is not None, "both are of one set"
        text = f"{change.score_a:.3f} to {change.score_b:.3f} | {change.length_a:.0f} to {change.length_b:.0f}"
        against = "- | -"
        if name != BASELINE and run.path.name in baselines:
            other = pair(problem_scores(baselines[run.path.name].evals()[-1].rows().to_pylist()), last)
            assert other is not None, "both are of one set"
            against = _differences(other)
        lines.append(f"| `{name}` | {run.path.name.removeprefix('seed-')} | {text} | {against} |")
    return lines


def _differences(change: Paired) -> str:
    """Return B minus A with 95 % intervals over the problems: points of accuracy, tokens."""
    low, high = (100 * bound for bound in change.interval)
    points = f"{100 * change.difference:+.1f} ({low:+.1f} to {high:+.1f})"
    if change.length_interval is None or change.length_a is None or change.length_b is None:
        return f"{points} | -"
    tokens = change.length_b - change.length_a
    return f"{points} | {tokens:+.1f} ({change.length_interval[0]:+.1f} to {change.length_interval[1]:+.1f})"


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def _rules() -> list[str]:
    return [*yaml.safe_load(STUDY.read_text(encoding="utf-8"))["rules"]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where everything is made")
    parser.add_argument("--on-cpu", action="store_true", help="the size for two cores")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, help="these only, in this order")
    parser.add_argument("--rules", nargs="+", choices=_rules(), metavar="RULE", help="these and grpo, of words.yaml")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; 2 where each has a core")
    parser.add_argument("--tables", action="store_true", help="train nothing")
    options = parser.parse_args(arguments)
    if not (options.on_cpu or options.tables or has_gpu()):
        parser.error("no GPU is here, and this size would take days without one: give --on-cpu")
    for name in options.tasks or (CPU_TASKS if options.on_cpu else TASKS):
        if not options.tables:
            rules, changes = (options.rules or CPU_RULES, CPU_CHANGES) if options.on_cpu else (options.rules, ())
            run_task(options.folder, name, rules=rules, changes=changes, jobs=options.jobs)
        if (runs := options.folder / "runs" / name).is_dir():
            print(f"\n## {name}\n\n{table_of(runs, TASKS[name])}", flush=True)


if __name__ == "__main__":
    main()
