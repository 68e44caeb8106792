"""Whole GRPO steps beside TRL's on one card, and the learner alone.

    pip install trl==1.16                              # for this comparison alone
    python perf/gpu_versus_trl.py                      # on a card: the shape of 3B, vLLM in the process on both sides
    python perf/gpu_versus_trl.py --device cpu         # the tiny model; TRL generates with transformers

Both sides have the same model, images, questions, responses a prompt, mini-batches, optimizer and dtype. They run one
after the other, since one card does not hold both. TRL takes vLLM's colocated mode with its sleep mode. The first
step warms up. The versions, and what TRL says of that of vLLM, come before the table.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_parts import (
    FASTEST,
    HERE,
    STEPS,
    Setting,
    build_model,
    build_set,
    command,
    leave_at_signals,
    print_about,
    step,
    step_config,
)
from versus_trl_step import parity

MINI_BATCHES = 2  # of a step
LIMIT = 1800  # seconds of a side
ROWS = 4  # of a forward pass of TRL's


def ours(at: Setting) -> dict[str, float]:
    """Train as step-3b of perf/gpu.sh does, by GRPO with images."""
    return step(at, "3b", "algorithm.name=grpo", *FASTEST * at.on_card)


def theirs(at: Setting) -> dict[str, float]:
    """Run TRL's trainer in a process of its own."""
    words = (__file__, "--device", at.device, "--work", at.work, "--trl")
    said = command(at, *words, log="trl.txt")
    for line in sorted(set(re.findall(r".*vLLM.*(?:support|version).*", said))):
        print(f"TRL says: {line.strip()}")
    found = [line for line in said.splitlines() if line.startswith('{"seconds')]
    return json.loads(found[-1]) if found else {}


def train_trl(at: Setting) -> None:
    """Train with TRL's GRPOTrainer, and print the seconds and generated tokens of whole steps as JSON."""
    if not at.on_card:
        sys.modules["vllm"] = None  # type: ignore[assignment]  # to TRL it is not installed
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from vlm_rl.data.prompts import PromptBuilder
    from vlm_rl.templates import TEMPLATES

    model = build_model(at.work / "model", at.size("3b"))
    side, text = (784, 20) if at.on_card else (56, 4)
    data = build_set(at.work / "set", problems=32 if at.on_card else 4, side=side, words=text)
    rollout = step_config(at, model, data, at.work)["rollout"]
    prompts, responses = rollout["prompts_per_step"], rollout["responses_per_prompt"]
    template = TEMPLATES["think_box"]
    banned = PromptBuilder(model, template=template, min_pixels=3136, max_pixels=1_003_520).banned_ids

    def messages(row: dict[str, Any]) -> dict[str, Any]:
        question = {"role": "user", "content": row["question"].replace("<image>", "")}
        return {"prompt": [{"role": "system", "content": template.system}, question]}

    rows = load_dataset("parquet", data_files=str(data / "*.parquet"), split="train")
    problems = rows.map(messages).select_columns(["prompt", "images"])

    class Watch(TrainerCallback):
        """The seconds of whole steps: each generates once, and has MINI_BATCHES of TRL's optimizer steps."""

        def __init__(self) -> None:
            self.begun, self.seconds, self.tokens = 0.0, list[float](), list[float]()

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % MINI_BATCHES == 0:
                self.begun = time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if at.on_card:
                torch.cuda.synchronize()
            if state.global_step % MINI_BATCHES == 0:
                self.seconds.append(time.monotonic() - self.begun)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            if logs and "completions/mean_length" in logs:  # once a step
                self.tokens.append(logs["completions/mean_length"] * prompts * responses)

    of_mini_batch = prompts * responses // MINI_BATCHES
    rows_at_once = min(ROWS, of_mini_batch)
    vllm: dict[str, Any] = {"generation_kwargs": {"suppress_tokens": list(banned)}}
    if at.on_card:
        vllm = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.45,
            "vllm_enable_sleep_mode": True,
            "generation_kwargs": {"logit_bias": dict.fromkeys(banned, -100.0)},
        }
    settings = GRPOConfig(
        output_dir=str(at.work / "out"),
        use_cpu=not at.on_card,
        bf16=at.on_card,
        beta=0.0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        loss_type="grpo",
        optim="adamw_torch",
        gradient_checkpointing=True,
        per_device_train_batch_size=rows_at_once,
        gradient_accumulation_steps=of_mini_batch // rows_at_once,
        steps_per_generation=prompts * responses // rows_at_once,
        num_generations=responses,
        max_completion_length=rollout["max_tokens"],
        max_steps=STEPS * MINI_BATCHES,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **vllm,
    )
    dtype = torch.bfloat16 if at.on_card else torch.float32
    watch = Watch()
    trainer = GRPOTrainer(
        model=AutoModelForImageTextToText.from_pretrained(model, dtype=dtype, attn_implementation="sdpa"),
        reward_funcs=lambda completions, **_: [parity(None, said[0]["content"], None, 0) for said in completions],
        args=settings,
        train_dataset=problems,
        processing_class=AutoProcessor.from_pretrained(model),
        callbacks=[watch],
    )
    trainer.train()
    later = statistics.fmean(watch.seconds[1:])
    print(json.dumps({"seconds of a step": later, "tokens a step": statistics.fmean(watch.tokens[1:])}))


def learners(at: Setting) -> dict[str, float]:
    """Return the seconds of a step of our learner, and of one through TRL's output head on padded rows."""
    shape = ("--size", at.size("3b"), "--prompts", "2", "--rounds", "2", "--checkpointing")
    words = ("--device", at.device, "--speed", "--ways", "auto", "trl", *shape)
    said = command(at, HERE / "gpu_learner.py", *words, log="learners.txt")
    return {way: float(value) for way, value in re.findall(r"^\| (auto|trl) \| ([\d.]+) \|", said, re.MULTILINE)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--work", type=Path, help="a new folder (default: a temporary one)")
    parser.add_argument("--trl", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trl:
        train_trl(Setting(options.device, options.work))
        return
    if importlib.util.find_spec("trl") is None:
        sys.exit("TRL is not installed: pip install trl==1.16")
    leave_at_signals()
    print_about()
    with tempfile.TemporaryDirectory() as folder:
        for name, of_ours, of_trl in measured(options.device, options.work or Path(folder)):
            print("\n| seconds | ours | TRL | times |\n|---|---|---|---|")
            print(f"| {name} | {of_ours:.2f} | {of_trl:.2f} | {of_trl / of_ours:.2f} |", flush=True)


def measured(device: str, work: Path) -> Iterator[tuple[str, float, float]]:
    """Yield what is compared and the seconds of both sides, as soon as they are there; NaN for one that failed."""

    def at(name: str) -> Setting:
        (work / name).mkdir(parents=True)
        return Setting(device, work / name, limit=LIMIT)

    key, missing = "seconds of a step", float("nan")
    mine, trl = ours(at("ours")), theirs(at("theirs"))
    yield "a whole step", mine.get(key, missing), trl.get(key, missing)
    alone = learners(at("learners"))
    yield "the learner", alone.get("auto", missing), alone.get("trl", missing)


if __name__ == "__main__":
    main()
