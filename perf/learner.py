"""Shared-prefix rows against padded one-response rows: seconds and peak memory per optimizer step.

    OMP_NUM_THREADS=1 python perf/learner.py
    OMP_NUM_THREADS=1 python perf/learner.py --shape 500 8 200 --rounds 9

Both sides take the same weights and the same groups through forward, backward and an AdamW step.
The padded side is the unmodified transformers model (sdpa), one row per response with a copy of the
prompt and its image, logits of the response's positions only, in micro-batches of 2, 4 and 8 rows. The
shared side does one group at a time. Each shape runs twice: with responses of equal length, where
padded rows hold no padding, and with lengths spread from a quarter to the whole.

Every variant runs in a fresh process of its own, whose peak memory is ru_maxrss; most of it is the
libraries, so the part that came with the first step is given beside it. The variants take turns step by
step and medians are reported. Ratios are of processor time: on a machine that does other things the
clock says more about those. Before the first update log-probs and gradients are compared.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from floor import MODELS, gain

# prompt tokens, responses per prompt, tokens of the longest response
SIZES = ((340, 8, 100), (1000, 8, 300), (1000, 8, 1000), (250, 8, 2000))
PADDED_ROWS = (2, 4, 8)
GROUPS = 2  # prompts of the optimizer step
PATCH = 28  # pixels of a visual token's side
IMAGE_SHARE = 0.75  # of the prompt's tokens, about
SHARPNESS = 4  # times the random weights: at their usual size all tokens are about equally likely
MIB = 2**20


@dataclass(frozen=True)
class Shape:
    """The groups of one optimizer step."""

    prompt: int
    responses: int
    longest: int
    spread: bool  # response lengths from a quarter of the longest to the longest, else all the longest
    images: int = 1  # of a prompt; together they take the same share of it

    @property
    def lengths(self) -> list[int]:
        if not self.spread or self.responses == 1:
            return [self.longest] * self.responses
        steps = 3 * self.longest / (4 * (self.responses - 1))
        return [round(self.longest / 4 + index * steps) for index in range(self.responses)]

    def __str__(self) -> str:
        lengths = f"{min(self.lengths)} to {self.longest}" if self.spread else f"{self.longest}"
        return f"prompt {self.prompt}, {self.responses} x {lengths} tokens"


# --- the parent: starts the workers and takes turns between them. It never imports torch, because a
# child starts with its parent's ru_maxrss -------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """One variant's result."""

    name: str
    wall: float  # seconds of an optimizer step, median
    cpu: float
    peak: float  # MiB, of the whole process
    growth: float  # MiB of that peak above the process before its first step


class LayoutWorker:
    """One variant in a process of its own, which makes an optimizer step whenever it is told to."""

    def __init__(self, variant: str, shape: Shape, folder: Path) -> None:
        self.variant = variant
        self.seconds: list[tuple[float, float]] = []
        self.result = folder / f"{variant}.npz"
        command = [sys.executable, __file__, "--worker", variant, "--folder", str(folder), *_arguments(shape)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def tell(self, word: str) -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker {self.variant} ended with exit code {self.process.wait()}")
        return json.loads(line)

    def finish(self) -> Measured:
        peak, before = self.tell("memory")
        self.process.communicate()
        wall, cpu = (statistics.median(column) for column in zip(*self.seconds, strict=True))
        return Measured(self.variant, wall, cpu, peak, peak - before)


def _arguments(shape: Shape) -> list[str]:
    numbers = map(str, (shape.prompt, shape.responses, shape.longest))
    return ["--shape", *numbers, *(["--spread"] if shape.spread else [])]


def measure(shape: Shape, *, rounds: int, folder: Path) -> tuple[list[Measured], float, float]:
    """Measure all variants of one shape, the shared one first, then the gaps in log-probs and gradients."""
    workers = [LayoutWorker(name, shape, folder) for name in ("shared", *(f"padded-{rows}" for rows in PADDED_ROWS))]
    try:
        for worker in workers:
            worker.tell("warm up")
        for _ in range(rounds):
            for worker in workers:
                worker.seconds.append(worker.tell("step"))
        logp_gap, gradient_gap = gaps(workers[0].result, workers[-1].result)
        return [worker.finish() for worker in workers], logp_gap, gradient_gap
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()


def gaps(ours: Path, theirs: Path) -> tuple[float, float]:
    """Return the largest difference of a log-prob, and the gradients' difference as a share of their norm."""
    import numpy as np

    a, b = np.load(ours), np.load(theirs)
    gradient_gap = np.linalg.norm(a["gradient"] - b["gradient"]) / np.linalg.norm(b["gradient"])
    return float(np.abs(a["logp"] - b["logp"]).max()), float(gradient_gap)


def print_shape(shape: Shape, measured: list[Measured], logp_gap: float, gradient_gap: float) -> None:
    shared, *padded = measured
    best = min(padded, key=lambda m: m.cpu)
    print(f"\n{shape}, {GROUPS} prompts per optimizer step")
    print("                 s     CPU s   peak MiB   of it steps   CPU s ratio   ratio of steps' memory")
    for m in measured:
        ratios = f"{m.cpu / shared.cpu:>14.2f}{m.growth / shared.growth:>25.2f}"
        print(f"  {m.name:<9}{m.wall:>8.3f}{m.cpu:>9.3f}{m.peak:>11.0f}{m.growth:>14.0f}{ratios}")
    print(f"  {best.name}, the fastest padding, takes {best.cpu / shared.cpu:.2f} times the CPU seconds;")
    none, whole = (gain(MODELS["tiny"], shape.prompt, shape.lengths, padded=padded) for padded in (False, True))
    print(f"  rows without padding have {none:.2f} times the operations, all padded to the longest {whole:.2f}")
    print(f"  largest log-prob gap {logp_gap:.1e}, gradient gap {gradient_gap:.1e} of the norm", flush=True)


# --- the worker -----------------------------------------------------------------------------------


def work(variant: str, shape: Shape, folder: Path) -> None:
    """Answer each line of standard input with one line of JSON."""
    import torch

    make = shared_step if variant == "shared" else partial(padded_step, rows=int(variant.removeprefix("padded-")))
    model, backward = make(folder / "model", shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    before = peak_mib()
    for line in sys.stdin:
        if line.strip() == "memory":
            print(json.dumps([peak_mib(), before]), flush=True)
            continue
        wall, cpu = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        logp = backward()
        if line.strip() == "warm up":
            save_comparison(folder / f"{variant}.npz", model, logp)
        optimizer.step()
        print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]), flush=True)


def peak_mib() -> float:
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, kilobytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


def save_comparison(path: Path, model: Any, logp: Any) -> None:
    import numpy as np

    gradients = {name: p.grad.flatten().numpy() for name, p in model.named_parameters() if p.grad is not None}
    np.savez(path, logp=logp.numpy(), gradient=np.concatenate([gradients[name] for name in sorted(gradients)]))


def make_groups(
    model_path: Path, shape: Shape, *, count: int = GROUPS, aggregation: str = "length_weighted"
) -> list[Any]:
    """Make groups of random tokens behind images of noise, weighed as LUSPO weighs them unless told otherwise."""
    import numpy as np
    from PIL import Image
    from transformers import AutoProcessor
    from weighed_groups import WeighedGroup

    from vlm_rl.losses import token_weights
    from vlm_rl.types import Prompt, Rollout

    processor = AutoProcessor.from_pretrained(model_path)
    names = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
    start, pad, end = processor.tokenizer.convert_tokens_to_ids(names)
    rng = np.random.default_rng(0)
    alphabet = 256  # the single bytes are the first ids: no control token is among them
    side = round((IMAGE_SHARE * shape.prompt / shape.images) ** 0.5)
    picture = [start, *[pad] * side**2, end]
    groups = []
    for index in range(count):
        pixels = rng.integers(0, 256, (shape.images, side * PATCH, side * PATCH, 3), dtype=np.uint8)
        vision = processor.image_processor(images=[Image.fromarray(image) for image in pixels], return_tensors="pt")
        text = rng.integers(alphabet, size=shape.prompt - shape.images * len(picture))
        ids = np.concatenate([picture * shape.images, text]).astype(np.int32)
        prompt = Prompt(str(index), "", "", ids, ids, (), dict(vision))
        rollouts = []
        for response, length in enumerate(rng.permutation(shape.lengths)):
            tokens = rng.integers(alphabet, size=length).astype(np.int32)
            rollouts.append(Rollout(str(index), response, tokens, np.zeros(length, np.float32), "", "stop", 0))
        advantages = rng.normal(size=shape.responses)
        lengths_PG = np.array([[len(rollout.ids) for rollout in rollouts]])
        weights = token_weights(aggregation, lengths_PG, advantages[None], max_tokens=shape.longest)[0] / count
        groups.append(WeighedGroup(prompt, rollouts, advantages, weights))
    return groups


def sharpen(model: Any) -> None:
    """Make attention and predictions decided enough for a wrong position or mask to show."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data *= SHARPNESS


def loss_of(logp_K: Any, inputs: Any) -> Any:
    from vlm_rl.losses import policy_loss

    settings = {"ratio": "sequence", "surrogate": "clip", "clip_low": 2e-3, "clip_high": 2.5e-3, "cap": 2.0}
    return policy_loss(logp_K, logp_K, inputs, **settings)[0]


def shared_step(model_path: Path, shape: Shape) -> tuple[Any, Callable[[], Any]]:
    """Return a step on the product's rows: prompt and image once, the responses after it, one group to a row."""
    import torch
    from weighed_groups import pack

    from vlm_rl.data.prompts import rope_positions
    from vlm_rl.learner.packing import Chunk
    from vlm_rl.learner.policy import Policy, load_model

    policy = Policy(load_model(model_path, dtype=torch.float32), banned_ids=(), temperature=1.0)
    sharpen(policy.model)
    groups = make_groups(model_path, shape)
    positions = partial(rope_positions, policy.model)

    def backward() -> torch.Tensor:
        logps = []
        for index in range(len(groups)):
            row = pack([Chunk(index, tuple(range(shape.responses)))], groups, positions)
            logp_K, _ = policy(row)
            loss_of(logp_K, row.loss).backward()
            logps.append(logp_K.detach())
        return torch.cat(logps)

    return policy.model, backward


def padded_step(model_path: Path, shape: Shape, *, rows: int) -> tuple[Any, Callable[[], Any]]:
    """Return a step on one row per response through transformers' own model, ``rows`` of them at a time."""
    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(model_path, dtype=torch.float32, attn_implementation="sdpa")
    sharpen(model)
    flat = [(group, index) for group in make_groups(model_path, shape) for index in range(shape.responses)]

    def backward() -> torch.Tensor:
        return torch.cat([padded_micro_batch(model, flat[at : at + rows]) for at in range(0, len(flat), rows)])

    return model, backward


def padded_micro_batch(model: Any, part: list[tuple[Any, int]]) -> Any:
    """Go backward through one padded micro-batch and return the log-probs of its responses, end to end."""
    import numpy as np
    import torch

    from vlm_rl.types import LossInputs

    responses = [group.rollouts[index].ids for group, index in part]
    lengths = torch.tensor([len(response) for response in responses])
    num_prompt, longest = len(part[0][0].prompt.ids), int(lengths.max())
    ids = torch.zeros(len(part), num_prompt + longest, dtype=torch.int64)
    for row, ((group, _), response) in enumerate(zip(part, responses, strict=True)):
        tokens = np.concatenate([group.prompt.ids, response])
        ids[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
    is_response = torch.arange(longest) < lengths[:, None]
    vision = [group.prompt.vision for group, _ in part]
    model.model.rope_deltas = None  # state that the last call left on the model
    logits = model(
        input_ids=ids,
        attention_mask=torch.cat([torch.ones(len(part), num_prompt, dtype=torch.int64), is_response.long()], dim=1),
        mm_token_type_ids=(ids == model.config.image_token_id).int(),
        use_cache=False,
        logits_to_keep=longest + 1,
        **{key: torch.cat([images[key] for images in vision]) for key in vision[0]},
    ).logits[:, :-1]
    logp = torch.log_softmax(logits, dim=-1).gather(2, ids[:, num_prompt:, None])[..., 0][is_response]
    inputs = LossInputs(
        old_logp_K=None,
        sampler_logp_K=None,
        response_K=torch.arange(len(part)).repeat_interleave(lengths),
        lengths_n=lengths,
        advantages_n=torch.tensor([group.advantages_G[index] for group, index in part]),
        weights_n=torch.tensor([group.weights_G[index] for group, index in part]),
    )
    loss_of(logp, inputs).backward()
    return logp.detach()


# --- command line ---------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=3, metavar=("PROMPT", "RESPONSES", "TOKENS"))
    parser.add_argument("--rounds", type=int, default=3, help="steps of each variant")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--spread", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, Shape(*options.shape, spread=options.spread), options.folder)
        return
    with tempfile.TemporaryDirectory() as name:
        build = "import sys, pathlib, vlm_rl.toy.tiny_model as t; t.build_tiny_model(pathlib.Path(sys.argv[1]))"
        subprocess.run([sys.executable, "-c", build, f"{name}/model"], check=True, stderr=subprocess.DEVNULL)
        for size in [tuple(options.shape)] if options.shape else SIZES:
            for spread in (False, True):
                shape = Shape(*size, spread=spread)
                print_shape(shape, *measure(shape, rounds=options.rounds, folder=Path(name)))


if __name__ == "__main__":
    main()
