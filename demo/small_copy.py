"""Make a run small enough to ship or to send: `python -m vlm_rl.demo.small_copy RUN OUT [--problems N]`.

Kept: configuration, metrics, the evaluations of the first N problems with their images, the rollouts without
token ids and log-probs, the tokenizer. Left out: the weights. Everything kept is unchanged.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from vlm_rl.demo.token_counts import tokenizer_file
from vlm_rl.errors import UserError
from vlm_rl.run.directory import RunDirectory

_DROPPED = ("token_ids", "logprobs")  # of a rollout: nine tenths of its bytes


def copy_small(run: RunDirectory, out: Path, *, num_problems: int = 64, rollouts_every: int = 4) -> Path:
    """Write the small copy to `out`, which must not exist. Raises UserError where the run cannot be read."""
    run.open()
    if out.exists():
        raise UserError(f"{out} exists already; remove it or choose a different folder")
    out.mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl", "controls.json", "CONTAMINATED.json"):
        if (run.path / name).exists():
            shutil.copy(run.path / name, out / name)
    tokenizer = tokenizer_file(run.path, 0, run.config().model.path)
    if tokenizer is not None:
        shutil.copy(tokenizer, out / "tokenizer.json")
    for result in run.evals():
        table = result.rows()
        ids = table["problem_id"].to_pylist()
        kept = set(list(dict.fromkeys(ids))[:num_problems])
        place = out / "eval" / result.benchmark / result.path.name
        place.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.filter(pa.array([name in kept for name in ids])), place, compression="zstd")
        shutil.copy(result.path.with_suffix(".json"), place.with_suffix(".json"))
    steps = run.rollout_steps()
    for step in [*steps[: len(steps) - 1 : rollouts_every], *steps[-1:]]:
        _rollouts(run, step, out)
    return out


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
