"""Make a run small enough to ship or to send: `python -m vlm_rl.demo.files.small_copy RUN OUT [--problems N]`.

Kept: configuration, metrics, the evaluations of the first N problems with their images, the rollouts without
token ids and log-probs, and the tokenizer as far as the kept responses use it. Left out: the weights. What is kept is
unchanged, except for the summaries of evaluations that lost problems: they are counted again, over the responses that
are left.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlm_rl.demo.files.small_tokenizer import cut_tokenizer
from vlm_rl.demo.numbers.token_counts import tokenizer_file
from vlm_rl.errors import UserError
from vlm_rl.evaluation.scores import summarise
from vlm_rl.run.directory import EvalResult, RunDirectory
from vlm_rl.run.eval_record import LATER_COLUMNS, EvalRecord

_DROPPED = ("token_ids", "logprobs")  # of a rollout: nine tenths of its bytes
_OF_THE_WHOLE_SET = ("headline", "scores", "headline_parts", "by")  # of a summary: a benchmark's own numbers


def copy_small(run: RunDirectory, out: Path, *, num_problems: int = 64, rollouts_every: int = 4) -> Path:
    """Write the small copy and return its folder.

    Args:
        run: the run to copy.
        out: the new folder.
        num_problems: of each evaluation, the first ones.
        rollouts_every: one in so many stored steps keeps its rollouts, and so does the last.

    Raises UserError if the run cannot be read, or `out` exists.
    """
    run.open()
    if out.exists():
        raise UserError(f"{out} exists already; remove it or choose a different folder")
    out.mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl", "controls.json", "CONTAMINATED.json"):
        if (run.path / name).exists():
            shutil.copy(run.path / name, out / name)
    responses: list[str] = []
    for result in run.evals():
        rows, summary = _first_problems(result, num_problems)
        RunDirectory(out).write_eval(result.benchmark, result.step, rows, summary)
        responses += [row["response"] for row in rows]
    tokenizer = tokenizer_file(run.path, 0, run.config().model.path)
    if tokenizer is not None:
        tree = cut_tokenizer(json.loads(tokenizer.read_text(encoding="utf-8")), responses)
        compact = json.dumps(tree, ensure_ascii=False, separators=(",", ":"))  # of many lines it makes one
        (out / "tokenizer.json").write_text(compact, encoding="utf-8")
    steps = run.rollout_steps()
    for step in [*steps[: len(steps) - 1 : rollouts_every], *steps[-1:]]:
        _rollouts(run, step, out)
    return out


def _first_problems(result: EvalResult, count: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the records of the first problems, and the summary of these records."""
    rows = [LATER_COLUMNS | row for row in result.rows().to_pylist()]
    names = list(dict.fromkeys(row["problem_id"] for row in rows))
    if len(names) <= count:
        return rows, dict(result.summary)
    kept = set(names[:count])
    rows = [row for row in rows if row["problem_id"] in kept]
    summary = {key: value for key, value in result.summary.items() if key not in _OF_THE_WHOLE_SET}
    return rows, summary | summarise([EvalRecord(**row) for row in rows])


def _rollouts(run: RunDirectory, step: int, out: Path) -> None:
    table = run.rollouts(step)
    for name in _DROPPED:
        empty = pa.array([[]] * table.num_rows, type=table.schema.field(name).type)
        table = table.set_column(table.schema.get_field_index(name), name, empty)
    place = out / "rollouts" / f"step-{step:06d}.parquet"
    place.parent.mkdir(exist_ok=True)
    pq.write_table(table, place, compression="zstd")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--problems", type=int, default=64)
    options = parser.parse_args()
    print(copy_small(RunDirectory(options.run), options.out, num_problems=options.problems))
