"""Our learner's step against TRL's: the same model, groups, loss and optimizer, each by its own trainer.

    uv pip install trl==1.16        # a development dependency of this comparison alone
    OMP_NUM_THREADS=1 python perf/versus_trl.py --out results.jsonl --plot docs/versus_trl.png
    OMP_NUM_THREADS=1 python perf/versus_trl.py --points "tiny 340 8 100" --rounds 3
    python perf/versus_trl.py --show results.jsonl --plot docs/versus_trl.png

TRL's side is GRPOTrainer.train() with the method that generates and scores replaced by one that hands
over the groups: its own batching, forward, loss, backward, clipping and AdamW step, in its setting with
the fewest forward passes (one optimizer step per generation, so no pass for old log-probs) and without
gradient checkpointing unless a point asks for it on both sides. Ours is Learner.update with the packing
in front of it, ZeRO 0. TRL's micro-batch is tried at each of MICRO_BATCHES and the fastest is taken; ours
is one row per group.

Each side of a point runs in a fresh process of its own; the processes take turns step by step, and
medians over the rounds are reported. Loss and gradient norm of the first step, before any update, show
that both do the same work. "By operations" is the ratio that floor.py's counts give for these lengths, TRL's rows
all padded to the longest as it does, and "over floor" our CPU time over that of our operations at this process's
rate of matrix products. Ratios are of processor time: on a shared machine the clock says more about
the others. Memory is the part of the peak that came with the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from floor import MODELS, gain, matrix_rate, operations

MICRO_BATCHES = (1, 4)  # rows of TRL's; a point takes the faster
LR = 1e-6
SIZES: dict[str, dict[str, int]] = {
    "tiny": {},
    "100m": {
        "hidden": 768,
        "layers": 15,
        "heads": 12,
        "kv_heads": 2,
        "mlp": 2048,
        "vision_hidden": 256,
        "vision_layers": 4,
        "vision_heads": 4,
        "vision_mlp": 768,
    },
}
TRL_RULES = {"luspo": ("luspo", "sequence"), "grpo": ("grpo", "token")}


@dataclass(frozen=True)
class Point:
    """One comparison."""

    model: str
    prompt: int
    responses: int
    tokens: int
    images: int = 1
    rule: str = "luspo"
    checkpointing: bool = False
    rounds: int = 3

    @staticmethod
    def parse(text: str) -> Point:
        """Return the point of a text such as "100m 1000 8 300" or, with its images, "100m 1000 8 300 2"."""
        model, *numbers = text.split()
        return Point(model, **dict(zip(("prompt", "responses", "tokens", "images"), map(int, numbers), strict=False)))

    @property
    def lengths(self) -> list[int]:
        """Return the tokens of each response: a quarter of the longest to the longest."""
        if self.responses == 1:
            return [self.tokens]
        step = 3 * self.tokens / (4 * (self.responses - 1))
        return [round(self.tokens / 4 + index * step) for index in range(self.responses)]

    @property
    def operations(self) -> float:
        """Return the operations of an optimizer step of ours."""
        return operations(MODELS[self.model], self.prompt, self.lengths, shared=True, images=self.images)

    @property
    def gain(self) -> float:
        """Return TRL's operations, all rows padded to the longest, over ours."""
        return gain(MODELS[self.model], self.prompt, self.lengths, padded=True, images=self.images)

    def __str__(self) -> str:
        extras = [f"{self.images} images"] * (self.images > 1) + ["checkpointing"] * self.checkpointing
        return ", ".join([f"{self.model} ({self.prompt}, {self.responses} x {self.tokens}) {self.rule}", *extras])


POINTS = (
    Point("tiny", 340, 8, 100),
    Point("tiny", 1000, 8, 300),
    Point("100m", 340, 8, 100),
    Point("tiny", 340, 8, 100, rule="grpo"),
    Point("tiny", 1000, 8, 300, checkpointing=True),
    Point("tiny", 1000, 8, 300, images=4),
    Point("tiny", 1000, 8, 100),
    Point("tiny", 1000, 4, 300),
    Point("tiny", 1000, 16, 300),
    Point("tiny", 1000, 8, 1000),
    Point("tiny", 250, 8, 2000),
    Point("tiny", 1000, 8, 2000),
    Point("100m", 1000, 8, 300),
    Point("100m", 1000, 8, 1000),
)


# --- the parent: it never imports torch, because a child starts with its parent's ru_maxrss ---------


def unwind_when_terminated() -> None:
    """Let SIGTERM raise, so that workers are closed: those that are paused never see that their input ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


class Worker:
    """One side in a process of its own, which makes a step whenever it is told to and is stopped otherwise."""

    def __init__(self, side: str, point: Any, folder: Path, *, script: str = __file__) -> None:
        self.steps: list[dict[str, float]] = []
        command = [sys.executable, script, "--worker", side, "--folder", str(folder)]
        self.process = subprocess.Popen(
            [*command, "--point", json.dumps(asdict(point))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if "DEBUG" not in os.environ else None,
            text=True,
        )

    def step(self) -> dict[str, float]:
        assert self.process.stdin and self.process.stdout
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith('{"wall"'):  # TRL prints metrics of its own
                self.process.send_signal(signal.SIGSTOP)  # it would prepare its next step in the other's turn
                self.steps.append(json.loads(line))
                return self.steps[-1]
        errors = self.process.stderr.read()[-2000:] if self.process.stderr else ""
        raise RuntimeError(f"a worker ended with exit code {self.process.wait()}: {errors}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def summary(self) -> dict[str, float]:
        """Return medians of the steps after the first, and what the first one said."""
        first, *rest = self.steps
        medians = {key: statistics.median(step[key] for step in rest or [first]) for key in ("wall", "cpu")}
        return {**medians, "memory": self.steps[-1]["memory"], "loss": first["loss"], "norm": first["norm"]}


def compare(point: Point, folder: Path) -> dict[str, Any]:
    """Measure both sides of one point, step by step in turns. The first step is the warm-up and the check."""
    sides = {"ours": Worker("ours", point, folder)}
    try:
        sides["ours"].step()
        trials = {size: Worker(f"trl-{size}", point, folder) for size in candidates(point)}
        sides |= {f"trl-{size}": worker for size, worker in trials.items()}
        best = min(trials, key=lambda size: trials[size].step()["cpu"])
        for size in trials:
            if size != best:
                sides.pop(f"trl-{size}").close()
        for _ in range(point.rounds):
            for worker in sides.values():
                worker.step()
        ours, theirs = (worker.summary() for worker in sides.values())
        ours["rate"] = sides["ours"].steps[0]["rate"]
        return {"point": asdict(point), "micro_batch": best, "ours": ours, "trl": theirs}
    finally:
        for worker in sides.values():
            worker.close()


def candidates(point: Point) -> Sequence[int]:
    """Return the micro-batches to try.

    The large model's long steps take minutes and get no trials: one row at a time is as fast there.
    """
    return MICRO_BATCHES if point.model == "tiny" or point.prompt + point.tokens < 500 else MICRO_BATCHES[:1]


def show(results: Sequence[dict[str, Any]]) -> None:
    print(
        "| model (prompt, G x tokens), rule | ours, CPU s | TRL, CPU s | times | wall, times | by operations "
        "| over floor | tokens/s | memory, MiB | loss | gradient norm |\n|" + "---|" * 11
    )
    for result in results:
        point, ours, trl = Point(**result["point"]), result["ours"], result["trl"]
        ratios = [
            trl["cpu"] / ours["cpu"],
            trl["wall"] / ours["wall"],
            point.gain,
            ours["cpu"] / (point.operations / ours["rate"]),
        ]
        cells = [
            f"{point}",
            *(f"{side['cpu']:.2f}" for side in (ours, trl)),
            *(f"{ratio:.1f}" for ratio in ratios),
            " / ".join(f"{sum(point.lengths) / side['wall']:.0f}" for side in (ours, trl)),
            *(
                " / ".join(f"{side[key]:{form}}" for side in (ours, trl))
                for key, form in (("memory", ".0f"), ("loss", ".5f"), ("norm", ".4f"))
            ),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def plot(results: Sequence[dict[str, Any]], out: Path) -> None:
    """Draw TRL's CPU seconds over ours, point by point, and what the operations alone would give."""
    from vlm_rl.report import vega
    from vlm_rl.report.charts.frame import BAD, CONFIG, PALETTE

    points = [Point(**result["point"]) for result in results]
    measured = [result["trl"]["cpu"] / result["ours"]["cpu"] for result in results]
    rows = [
        {"point": str(point), "measured": ratio, "counted": point.gain, "end": max(ratio, point.gain)}
        for point, ratio in zip(points, measured, strict=True)
    ]
    colors = {"scale": {"domain": ["measured", "by operations"], "range": [PALETTE[0], BAD]}, "title": None}
    title = "CPU seconds of an optimizer step: TRL 1.16 over ours"
    layers = [
        {
            "mark": {"type": "bar", "height": {"band": 0.7}},
            "encoding": {"x": x_of("measured", title), "color": {"datum": "measured", **colors}},
        },
        {
            "mark": {"type": "tick", "thickness": 3, "opacity": 1},
            "encoding": {"x": x_of("counted", title), "color": {"datum": "by operations", **colors}},
        },
        {
            "mark": {"type": "text", "align": "left", "dx": 8},
            "encoding": {"x": x_of("end", title), "text": {"field": "measured", "format": ".1f"}},
        },
    ]
    names = {"field": "point", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": 400}}
    spec = {"data": {"values": rows}, "width": 520, "height": {"step": 26}, "config": CONFIG}
    spec |= {"encoding": {"y": names}, "layer": layers}
    out.write_bytes(vega.png(vega.in_light_theme(spec)))


def x_of(field: str, title: str) -> dict[str, Any]:
    return {"field": field, "type": "quantitative", "title": title, "axis": {"tickMinStep": 1, "format": "d"}}


# --- the workers ------------------------------------------------------------------------------------


def rule_of(point: Point) -> Any:
    from vlm_rl.algorithms import ALGORITHMS

    return ALGORITHMS[point.rule]


def groups_of(point: Point, folder: Path) -> list[Any]:
    from weighed_groups import random_group

    sizes = {"prompt": point.prompt, "lengths": point.lengths, "images": point.images}
    return [random_group(folder / point.model, **sizes, aggregation=rule_of(point).aggregation)]


def our_step(point: Point, folder: Path) -> Callable[[], Any]:
    """Return a function that makes one optimizer step of ours, packing included, and returns its UpdateResult."""
    import torch
    from weighed_groups import pack, sharpen

    from vlm_rl.config import TrainConfig
    from vlm_rl.data.prompts import rope_positions
    from vlm_rl.distributed import init_ranks
    from vlm_rl.learner.learner import Learner
    from vlm_rl.learner.policy import Policy, load_model
    from vlm_rl.learner.row_plan import plan_rows
    from vlm_rl.losses import policy_loss

    init_ranks()
    policy = Policy(load_model(folder / point.model, dtype=torch.float32), banned_ids=(), temperature=1.0)
    sharpen(policy.model)
    if point.checkpointing:
        policy.enable_checkpointing()
    learner = Learner(policy, TrainConfig(lr=LR, betas=(0.9, 0.999), zero_stage=0), total_optimizer_steps=100)
    rule, groups = rule_of(point), groups_of(point, folder)
    clips = {"clip_low": rule.clip_low, "clip_high": rule.clip_high}
    loss = partial(policy_loss, ratio=rule.ratio, surrogate=rule.surrogate, cap=2.0, **clips)
    positions = partial(rope_positions, policy.model)

    def step() -> Any:
        plan = plan_rows([point.prompt], [point.lengths], budget=2**20)[0]
        return learner.update([pack(chunks, groups, positions) for chunks in plan], loss)

    return step


def work_ours(point: Point, folder: Path) -> None:
    """Make an optimizer step of the product for each line of standard input."""
    step = our_step(point, folder)
    before = peak_mib()
    rate = matrix_rate()
    while sys.stdin.readline():
        begun = now()
        result = step()
        report(begun, now(), before, result.loss, result.grad_norm, rate=rate)


def peak_mib() -> float:
    """Return the largest resident memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, kilobytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def report(
    begun: tuple[float, float], ended: tuple[float, float], before: float, loss: float, norm: float, **more: float
) -> None:
    wall, cpu = (b - a for a, b in zip(begun, ended, strict=True))
    line = {"wall": wall, "cpu": cpu, "memory": peak_mib() - before, "loss": loss, "norm": norm, **more}
    print(json.dumps(line), flush=True)


def trl_batch(groups: Sequence[Any]) -> dict[str, Any]:
    """Build the output of GRPOTrainer._generate_and_score_completions for these groups."""
    import torch

    flat = [(group, index) for group in groups for index in range(len(group.rollouts))]
    responses = [torch.from_numpy(group.rollouts[index].ids).long() for group, index in flat]
    prompts = torch.stack([torch.from_numpy(group.prompt.ids).long() for group, _ in flat])
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    completion_ids, completion_mask = pad(responses), pad([torch.ones_like(ids) for ids in responses])
    vision = [group.prompt.vision for group, _ in flat]
    (start,) = {int(group.prompt.ids[0]) for group in groups}
    image_id = int(groups[0].prompt.ids[1])
    assert start != image_id
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.tensor([group.advantages_G[index] for group, index in flat], dtype=torch.float32),
        "num_items_in_batch": completion_mask.sum(),
        "pixel_values": torch.cat([images["pixel_values"] for images in vision]),
        "image_grid_thw": torch.cat([images["image_grid_thw"] for images in vision]),
        "num_images": [len(images["image_grid_thw"]) for images in vision],
        "mm_token_type_ids": torch.cat([(prompts == image_id).int(), torch.zeros_like(completion_mask).int()], dim=1),
    }


def trl_settings(**more: Any) -> Any:
    """Return TRL's configuration of a comparison: one CPU, no KL term, a constant rate, nothing saved or reported."""
    from trl import GRPOConfig

    return GRPOConfig(
        use_cpu=True,
        bf16=False,
        beta=0.0,
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        max_steps=100,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **more,
    )


def work_trl(point: Point, folder: Path, *, micro_batch: int) -> None:
    """Make an optimizer step of GRPOTrainer.train for each line of standard input."""
    sys.modules["vllm"] = None  # type: ignore[assignment]  # unused here; to TRL it is not installed
    import torch
    from datasets import Dataset
    from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback
    from trl import GRPOTrainer
    from weighed_groups import sharpen

    path = folder / point.model
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    sharpen(model)
    batch, rule = trl_batch(groups_of(point, folder)), rule_of(point)
    loss_type, level = TRL_RULES[point.rule]

    class Given(GRPOTrainer):
        loss = 0.0

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            return dict(batch)

        def compute_loss(self, *args: Any, **options: Any) -> Any:
            loss = super().compute_loss(*args, **options)
            self.loss += float(loss.detach())
            return loss

    class Turns(TrainerCallback):
        begun = ended = (0.0, 0.0)

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not sys.stdin.readline():
                raise SystemExit
            trainer.loss = 0.0
            self.begun = now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ended = now()

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "grad_norm" in logs:
                report(self.begun, self.ended, before, trainer.loss, float(logs["grad_norm"]))

    settings = trl_settings(
        output_dir=str(folder / f"trl-{os.getpid()}"),
        gradient_checkpointing=point.checkpointing,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=point.responses // micro_batch,
        num_generations=point.responses,
        max_completion_length=point.tokens,
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon=rule.clip_low,
        epsilon_high=rule.clip_high,
        weight_decay=0.0,
    )
    prompts = Dataset.from_list([{"prompt": [{"role": "user", "content": "-"}]}] * 100)
    trainer = Given(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=prompts,
        processing_class=AutoProcessor.from_pretrained(path),
        callbacks=[Turns()],
    )
    before = peak_mib()
    trainer.train()


def build_models(folder: Path, names: set[str]) -> None:
    """Build the models in a child, so that this process stays small."""
    code = (
        "import json, pathlib, sys; from vlm_rl.toy.tiny_model import build_tiny_model as build; "
        "build(pathlib.Path(sys.argv[1]), **json.loads(sys.argv[2]))"
    )
    for name in names:
        command = [sys.executable, "-c", code, str(folder / name), json.dumps(SIZES[name])]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", nargs="*", help='"model prompt G tokens", for example "tiny 340 8 100"')
    parser.add_argument("--rounds", type=int, help="measured steps of each side of a point")
    parser.add_argument("--out", type=Path, help="append one JSON line per point, and skip those already there")
    parser.add_argument("--show", type=Path, help="print (and plot) what such a file holds, and measure nothing")
    parser.add_argument("--plot", type=Path, help="write a PNG of the ratios here")
    for hidden in ("--worker", "--point", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        point, folder = Point(**json.loads(options.point)), Path(options.folder)
        side, _, rows = options.worker.partition("-")
        return work_trl(point, folder, micro_batch=int(rows)) if side == "trl" else work_ours(point, folder)
    unwind_when_terminated()
    known = options.show or options.out
    results = [json.loads(line) for line in known.read_text().splitlines()] if known and known.exists() else []
    if not options.show:
        results = measure(points_of(options), results, options.out)
    show(results)
    if options.plot:
        plot(results, options.plot)
    return None


def points_of(options: argparse.Namespace) -> Sequence[Point]:
    points: Sequence[Point] = POINTS
    if options.points:
        points = [Point.parse(text) for text in options.points]
    return [replace(point, rounds=options.rounds or point.rounds) for point in points]


def measure(points: Sequence[Point], results: list[dict[str, Any]], out: Path | None) -> list[dict[str, Any]]:
    missing = [point for point in points if asdict(point) not in [result["point"] for result in results]]
    with tempfile.TemporaryDirectory() as name:
        build_models(Path(name), {point.model for point in missing})
        for point in missing:
            begun = time.perf_counter()
            results.append(compare(point, Path(name)))
            print(f"{point}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
            if out:
                with out.open("a") as lines:
                    lines.write(json.dumps(results[-1]) + "\n")
    return results


if __name__ == "__main__":
    main()
