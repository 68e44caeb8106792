"""Whole runs on a pretended GPU: to the end, and in float32 with the CPU's numbers.

Settings meet each other in pairs: every value of one setting runs beside every value of each other that it allows, in
any four days.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.helpers.own_environment import Pictures
from tests.helpers.prepared_sets import write_problems
from tests.helpers.rotation import todays
from tests.helpers.toy_runs import Toys, metrics_of
from vlm_rl.data.sets import load_set
from vlm_rl.errors import EXIT_STOPPED
from vlm_rl.run.directory import SFT_CONFIG, RunDirectory
from vlm_rl.toy.tiny_model import build_tiny_model

pytestmark = pytest.mark.slow

ON_GPU: dict[str, Any] = {"pretend_gpu": {}}
STOPPED_IN_STEP_2: dict[str, Any] = {"terminate_in": {"phase": "rollout", "step": 2}}
TRACE = "<think> I guess {0}. </think> <answer> \\boxed{{{0}}} </answer>"
Row = dict[str, str]


def on_the_host(*what: str) -> dict[str, Any]:
    """Return the settings that let DeepSpeed keep these on the host."""
    return {"train": {"deepspeed": {"zero_optimization": {name: {"device": "cpu"} for name in what}}}}


SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "stage": {str(n): {"train": {"zero_stage": n}} for n in range(4)},
    "dtype": {name: {"model": {"dtype": name}} for name in ("float32", "bfloat16")},
    "ranks": {"1": {}, "2": {}},
    "trains": {
        "all": {},
        "adapters": {"model": {"lora": {"rank": 4}}},
        "frozen tower": {"model": {"freeze": ["tower", "merger"]}},
    },
    "keeps": {
        "all": {},
        "layer inputs": {"model": {"gradient_checkpointing": True}},
        "layer inputs on the host": {"model": {"gradient_checkpointing": True, "offload_activations": True}},
    },
    "rows": {"packed": {}, "padded": {"model": {"rows": "padded"}}},
    "optimizer": {
        "on the card": {},
        "moved": {"rollout": {"offload_optimizer": True}},
        "on the host": on_the_host("offload_optimizer"),
        "weights too": on_the_host("offload_optimizer", "offload_param"),
    },
    "loss": {
        "grpo": {"algorithm": {"name": "grpo"}},
        "kl": {"algorithm": {"name": "grpo", "kl_coef": 0.01, "entropy_coef": 0.01}},
        "luspo, hadw": {"algorithm": {"name": "luspo", "hadw": {"enabled": True}}},
    },
    "batch": {
        "on policy": {},
        "dynamic": {"algorithm": {"dynamic_sampling": True}},
        "carried over": {"rollout": {"carry_over": 0.5}},
    },
    "end": {"whole": {}, "resumed": {}},
}


def is_allowed(row: Mapping[str, str]) -> bool:
    """Tell whether a configuration may hold these values together."""
    stage = row.get("stage", "3" if row.get("optimizer") == "weights too" else "2")
    return not (
        (row.get("dtype") == "bfloat16" and stage == "0")
        or (row.get("optimizer", "on the card") != "on the card" and stage in "01")
        or (row.get("optimizer") == "weights too" and stage != "3")
        or (row.get("loss") == "luspo, hadw" and row.get("batch") == "dynamic")
    )


def pairs_of(row: Row) -> Iterator[tuple[tuple[str, str], ...]]:
    return combinations(sorted(row.items()), 2)


def covering_rows() -> list[Row]:
    """Return few rows in which every allowed pair of values is: the best completion of each pair still missing."""
    names = list(SETTINGS)
    wanted = {
        pair
        for a, b in combinations(names, 2)
        for values in product(SETTINGS[a], SETTINGS[b])
        if is_allowed(dict(pair := tuple(sorted(zip((a, b), values, strict=True)))))
    }
    rows: list[Row] = []
    while wanted:
        row: Row = dict(min(wanted))
        for name in sorted((n for n in names if n not in row), key=lambda name: -len(SETTINGS[name])):
            choices = [{**row, name: value} for value in SETTINGS[name] if is_allowed({**row, name: value})]
            row = max(choices, key=lambda choice: sum(pair in wanted for pair in pairs_of(choice)))
        rows.append(row)
        wanted -= {*pairs_of(row)}
    return rows


def each_value_once(names: Sequence[str]) -> list[Row]:
    """Return a few rows of these settings that together hold every value; only a rollout moves the optimizer."""
    rows: list[Row] = []
    for row in ROWS:
        part = {name: row[name] for name in names}
        seen = {(name, value) for other in rows for name, value in other.items()}
        if part["optimizer"] != "moved" and part.items() - seen:
            rows.append(part)
    return rows


ROWS = covering_rows()
SFT_ROWS = each_value_once(("stage", "dtype", "ranks", "trains", "keeps", "rows", "optimizer"))


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for part in parts:
        for section, values in part.items():
            tree[section] = {**tree.get(section, {}), **values}
    return tree


def check_close(run: RunDirectory, expected: RunDirectory, *, only_first: bool = False) -> None:
    """Compare metrics: all steps to float32's rounding, or the first one to bfloat16's."""
    ours, theirs = metrics_of(run), metrics_of(expected)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    tolerance = {"rel_tol": 0.1, "abs_tol": 0.02} if only_first else {"rel_tol": 1e-3, "abs_tol": 1e-5}
    for row, wanted in zip(ours[:1] if only_first else ours, theirs, strict=not only_first):
        assert row.keys() == wanted.keys()
        different = {
            key: (value, wanted[key])
            for key, value in row.items()
            if value != wanted[key] and not math.isclose(value, wanted[key], **tolerance)
        }
        assert not different, (row["step"], different)


@pytest.mark.parametrize("row", todays(ROWS, days=6), ids=lambda row: ", ".join(row.values()))
def test_a_run_on_a_gpu_has_the_numbers_of_one_on_a_cpu(toys: Toys, row: Row) -> None:
    parts = [SETTINGS[name][value] for name, value in row.items()]
    data = {"data": {"train": [str(toys.train)], "eval": [str(toys.heldout)]}}
    changes = merged([data, {"eval": {"every": 2}, "train": {"steps": 2}}, *parts])
    number = ROWS.index(row)
    ranks = {"ranks": int(row["ranks"])}
    for name, faults in ((f"cpu-{number}", {}), (f"gpu-{number}", ON_GPU)):
        config, more = toys.config(name, **changes), []
        if faults and row["end"] == "resumed":
            stopped = toys.runner("train", config, faults={**faults, **STOPPED_IN_STEP_2}, **ranks)
            assert stopped.code == EXIT_STOPPED, stopped.output[-3000:]
            more = ["--resume"]
        result = toys.runner("train", config, *more, faults=faults, **ranks)
        assert result.code == 0, result.output[-3000:]
    check_close(toys.run(f"gpu-{number}"), toys.run(f"cpu-{number}"), only_first=row["dtype"] == "bfloat16")


@pytest.mark.turn(1, days=2)
def test_episodes_on_a_gpu_have_the_numbers_of_those_on_a_cpu(toys: Toys) -> None:
    """Pictures that a tool returns, in rows with adapters and recomputed layers."""
    tool = {"name": f"{Pictures.__module__}.Pictures", "allow_class": True, "options": {"most": 2}}
    changes: dict[str, Any] = {
        "environment": {**tool, "max_observed_tokens": 160, "max_pixels": 6272},
        "model": {"dtype": "float32", "gradient_checkpointing": True},
        "rollout": {"max_tokens": 42},
        "train": {"steps": 2, "zero_stage": 2, "micro_batch_tokens": 500},
    }
    for name, faults in (("cpu-episodes", {}), ("gpu-episodes", ON_GPU)):
        result = toys.runner("train", str(toys.config(name, **changes)), faults=faults)
        assert result.code == 0, result.output[-3000:]
    assert all(row["episode/images"] > 1 for row in metrics_of(toys.run("gpu-episodes")))
    check_close(toys.run("gpu-episodes"), toys.run("cpu-episodes"))


def test_a_learner_on_a_gpu_feeds_vllm(toys: Toys) -> None:
    """Weights go from the GPU into vLLM's engine, here on the CPU; checksum and probe of each sync hold.

    The engine rounds them to FP8, and the learner knows without it to which bits.
    """
    pytest.importorskip("vllm")
    fp8 = {"sampler": "vllm", "quantization": "fp8", "max_gap": 0.3}
    changes = merged([{"rollout": fp8}, {"model": {"dtype": "bfloat16"}, "train": {"steps": 2, "zero_stage": 2}}])
    result = toys.runner(
        "train", str(toys.config("gpu-vllm", **changes)), faults={"pretend_gpu": {"engine_on_cpu": True}}
    )
    assert result.code == 0, result.output[-3000:]
    assert [row["step"] for row in metrics_of(toys.run("gpu-vllm"))] == [1, 2]


def test_a_killed_run_resumes_on_a_gpu_with_the_numbers_of_one_on_a_cpu(toys: Toys) -> None:
    changes = {"model": {"dtype": "float32"}, "train": {"steps": 4, "zero_stage": 2}}
    toys.train_run("cpu-resumed", **changes)
    config = toys.config("gpu-resumed", **changes)
    killed = toys.runner("train", str(config), faults={**ON_GPU, "terminate_in": {"phase": "rollout", "step": 4}})
    assert killed.code == EXIT_STOPPED, killed.output[-3000:]
    resumed = toys.runner("train", str(toys.run("gpu-resumed").path), "--resume", faults=ON_GPU)
    assert resumed.code == 0, resumed.output[-3000:]
    check_close(toys.run("gpu-resumed"), toys.run("cpu-resumed"))
    for line in toys.run("gpu-resumed").metrics():
        assert {"speed/rollout_tokens", "speed/update_tokens", "memory/peak_over_planned"} <= line.keys()


@pytest.mark.parametrize("trains", ["all", "adapters"])
def test_a_checkpoint_is_evaluated_on_a_gpu(toys: Toys, trains: str) -> None:
    """In bfloat16, as a GPU evaluates by default: greedily, and every answer is there."""
    run = toys.train_run(
        f"evaluated-{trains}", **merged([{"train": {"steps": 2, "zero_stage": 2}}, SETTINGS["trains"][trains]])
    )
    out = toys.folder / f"on-gpu-{trains}"
    words = ["--model", run.path / "2", "--data", toys.heldout, "--sampler", "transformers", "--out", out]
    result = toys.runner("eval", *words, "--max-tokens", 14, faults=ON_GPU)
    assert result.code == 0, result.output[-3000:]
    (summary,) = (json.loads(path.read_text()) for path in out.rglob("step-*.json"))
    assert summary["num_problems"] == 4


@pytest.mark.parametrize("row", todays(SFT_ROWS, days=3), ids=lambda row: ", ".join(row.values()))
def test_supervised_training_on_a_gpu_has_the_numbers_of_one_on_a_cpu(toys: Toys, row: Row, tmp_path: Path) -> None:
    problems = [replace(problem, meta={"response": TRACE.format(problem.answer)}) for problem in load_set(toys.train)]
    prepared = write_problems(problems, tmp_path / "set", {"min_pixels": 3136, "max_pixels": 1_003_520})
    runs = []
    for name, faults in (("cpu", {}), ("gpu", ON_GPU)):
        tree = merged(
            [
                {
                    "model": {"path": str(toys.random_model)},
                    "data": {"train": [str(prepared)], "max_prompt_tokens": 160, "max_response_tokens": 40},
                    "train": {"steps": 3, "mini_batch_prompts": 4, "lr": 1e-3},
                },
                *(SETTINGS[setting][value] for setting, value in row.items()),
            ]
        )
        config = tmp_path / f"{name}.yaml"
        config.write_text(yaml.safe_dump({"out": str(tmp_path / name), **tree}))
        result = toys.runner("sft", str(config), faults=faults, ranks=int(row["ranks"]))
        assert result.code == 0, result.output[-3000:]
        runs.append(RunDirectory(tmp_path / name, config_file=SFT_CONFIG))
    check_close(runs[1], runs[0], only_first=row["dtype"] == "bfloat16")


def test_a_warm_start_on_a_gpu_takes_the_stage_that_bfloat16_allows(toys: Toys, tmp_path: Path) -> None:
    traces = tmp_path / "traces.json"
    traces.write_text(json.dumps([(problem.id, TRACE.format(problem.answer)) for problem in load_set(toys.train)]))
    job = {
        "model": str(toys.random_model),
        "train": str(toys.train),
        "traces": str(traces),
        "out": str(tmp_path / "warm"),
    }
    result = toys.runner(warm_start=job, faults=ON_GPU)
    assert result.code == 0, result.output[-3000:]
    weights = load_file(tmp_path / "warm" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_the_doctors_ranks_are_well_on_a_gpu(toys: Toys, tmp_path: Path) -> None:
    """Its ZeRO 3 was not, on the first GPU: what a tower's rotary embedding multiplies with was on the CPU."""
    build_tiny_model(tmp_path / "model", weight_std=0.1)
    job = {"module": "tests.helpers.doctor_worker", "ranks": 2, "faults": ON_GPU}
    result = toys.runner("vlm_rl.doctor.ranks", tmp_path, **job)
    lines = [json.loads(line) for line in (tmp_path / "vlm_rl.doctor.ranks.jsonl").read_text().splitlines()]
    outcomes = {line["name"]: line["outcome"] for line in lines if "outcome" in line}
    assert outcomes == dict.fromkeys(("collectives", "ZeRO 2", "ZeRO 3"), "ok"), (lines, result.output[-3000:])
