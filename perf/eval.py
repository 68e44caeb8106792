"""Measure how fast an evaluation is, and how much of its time is not generation.

    python perf/eval.py --problems 256 --samples 1 --sampler transformers
    python perf/eval.py --model DIR --data PREPARED --sampler vllm --max-tokens 2048
    python perf/eval.py --data PREPARED --engine-ms 60     # an engine that leaves the CPU alone

Without --model a random tiny policy answers toy pictures: its generation is nearly free, so that the share of
everything else (prompts and pictures, grading, records, journal, summary) is an upper bound. On a CPU the engine
and everything else share the cores, so that work beside the generation slows it. With --engine-ms the policy
answers everything beforehand; then an engine gives these answers that only waits so many milliseconds a response.
To this side of it, an accelerator does the same. Load time is printed apart. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.sets import load_set
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.devices import default_device, model_dtype
from vlm_rl.evaluation.evaluate import evaluate
from vlm_rl.evaluation.journal import Journal
from vlm_rl.grading.grader import Grader
from vlm_rl.samplers.base import OnGroup, Sampler, SamplingParams
from vlm_rl.samplers.factory import make_sampler
from vlm_rl.templates import TEMPLATES
from vlm_rl.toy.counting_squares import SQUARES
from vlm_rl.toy.tiny_model import build_tiny_model
from vlm_rl.types import Problem, Prompt, Rollout


class Timed:
    """A sampler that keeps the time spent in it."""

    def __init__(self, sampler: Sampler) -> None:
        self.inner, self.name, self.policy_version = sampler, sampler.name, sampler.policy_version
        self.seconds, self.tokens = 0.0, 0
        self.known: dict[str, list[Rollout]] = {}
        self.wait_s = 0.0

    def remember(self, prompts: Sequence[Prompt], params: SamplingParams, *, wait_s: float) -> None:
        """Answer these now; from then on give those answers, after `wait_s` seconds each."""
        groups = self.inner.generate(prompts, params, seed=0, step=0)
        self.known = {prompt.problem_id: group for prompt, group in zip(prompts, groups, strict=True)}
        self.wait_s = wait_s

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        seed: int,
        step: int,
        on_group: OnGroup | None = None,
    ) -> list[list[Rollout]]:
        begun = time.perf_counter()
        if self.known:
            time.sleep(self.wait_s * len(prompts) * params.responses)
            groups = [self.known[prompt.problem_id] for prompt in prompts]
            if on_group:
                for index, group in enumerate(groups):
                    on_group(index, group)
        else:
            groups = self.inner.generate(prompts, params, seed=seed, step=step, on_group=on_group)
        self.seconds += time.perf_counter() - begun
        self.tokens += sum(len(rollout.ids) for group in groups for rollout in group)
        return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--sampler", choices=["auto", "vllm", "transformers"], default="auto")
    parser.add_argument("--problems", type=int, default=256)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument(
        "--engine-ms", type=float, help="wait this many milliseconds a response instead of generating"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(measure(options, Path(scratch))))


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    begun = time.perf_counter()
    model = options.model or build_tiny_model(scratch / "tiny", tokenizer_texts=SQUARES.tokenizer_texts())
    data = options.data or toy_set(scratch, options.problems)
    problems: Sequence[Problem] = load_set(data)[: options.problems]
    builder = PromptBuilder(model, template=TEMPLATES["think_answer"])
    sampler = make_sampler(
        options.sampler,
        model_path=str(model),
        builder=builder,
        max_model_len=4096 + options.max_tokens,
        batch_size=options.batch_size,
        dtype=model_dtype(default_device()),
    )
    params = SamplingParams(temperature=1.0, max_tokens=options.max_tokens, responses=options.samples)
    timed: Any = Timed(sampler)
    with Grader() as grader, Journal.open(scratch / "journal.jsonl", {}) as journal:
        keys: dict[str, Any] = {"builder": builder, "grader": grader, "params": params, "seed": 0, "step": 0}
        evaluate(problems[:2], sampler=timed, **keys)  # the workers start, the engine warms up
        if options.engine_ms is not None:
            timed.remember([builder.build(problem) for problem in problems], params, wait_s=options.engine_ms / 1000)
        loaded = time.perf_counter() - begun
        timed.seconds, timed.tokens, begun = 0.0, 0, time.perf_counter()
        batch = max(1, options.batch_size // options.samples)
        evaluate(problems, sampler=timed, batch_size=batch, journal=journal, **keys)
        seconds = time.perf_counter() - begun
    sampler.close()
    return {
        "sampler": sampler.name if options.engine_ms is None else f"waits {options.engine_ms:g} ms a response",
        "problems": len(problems),
        "responses": len(problems) * options.samples,
        "tokens": timed.tokens,
        "load_s": round(loaded, 1),
        "seconds": round(seconds, 2),
        "prompts_per_s": round(len(problems) / seconds, 2),
        "tokens_per_s": round(timed.tokens / seconds, 1),
        "outside_generation_share": round(1 - timed.seconds / seconds, 4),
        "outside_generation_ms_per_response": round(
            1e3 * (seconds - timed.seconds) / (len(problems) * options.samples), 2
        ),
    }


def toy_set(scratch: Path, count: int) -> Path:
    raw = SQUARES.write(scratch / "raw", seed=0, train=1, heldout=count, warm=1, mixture=1)
    prepare("virl39k", raw / "heldout", scratch / "heldout")
    return scratch / "heldout"


if __name__ == "__main__":
    main()
