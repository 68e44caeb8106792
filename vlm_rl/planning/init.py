"""Write a recipe for a model and a prepared set: `vlm-rl init --model M --data SET`.

The sizes come from the set (its number of rows, its longest prompt) and from the dry run's plan: the first of several
settings, the best ones first, that fits the cards. What is written is a configuration like those of configs/, with
comments, to be read and changed.
"""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from vlm_rl.config import LARGEST_ENGINE_SHARE, Config, DataConfig, parse_config
from vlm_rl.data.images import GRID, grid_size
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.sets import check_patch_size, load_eval_sets, load_training_sets, read_manifest
from vlm_rl.devices import num_gpus, smallest_card
from vlm_rl.errors import UserError
from vlm_rl.model_files.hub_models import hub_name, is_hub_name, short_name
from vlm_rl.model_files.model_folder import context_of, is_shipped, open_config
from vlm_rl.planning.dry_run import DryRun, dry_run
from vlm_rl.planning.fits import ROLLOUT_SHARE, UPDATE_SHARE
from vlm_rl.run.checkpoint_names import resolve_model
from vlm_rl.run.terminal import start_command
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Problem

RESPONSES = 8  # to a prompt
_COUNTED = 64  # prompts whose tokens are counted: those that look longest
_LONGEST_TRAINED = 4096  # tokens; longer prompts are left out of training
_RESPONSE_TOKENS = (4096, 2048, 1024, 512)
_ROW_TOKENS = (16_384, 12_288, 8_192)
_ORGANIZATIONS = {
    "Qwen": "Qwen",
    "Llama-": "meta-llama",
    "Mistral-": "mistralai",
    "gemma-": "google",
    "InternVL": "OpenGVLab",
}  # beginning of a model's name -> who publishes it on the hub
_LAYER_BY_LAYER = {
    "zero_optimization": {
        "offload_param": {"device": "cpu", "pin_memory": True},
        "stage3_max_live_parameters": 600_000_000,
    }
}


@dataclass(frozen=True, slots=True)
class Machine:
    """What the run will have; no GPUs is a CPU."""

    gpus: int  # of all nodes
    gigabytes: float  # of a card, in 10^9 bytes
    nodes: int = 1

    def __str__(self) -> str:
        """Return it as comments and messages call it."""
        many = "GPU" if self.gpus == 1 else "GPUs"
        where = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.gpus} {many} with {self.gigabytes:.0f} GB{where}" if self.gpus else "a CPU"


@dataclass(frozen=True, slots=True)
class DataFacts:
    """What a recipe needs to know of the sets."""

    rows: int
    longest_prompt: int  # tokens, images included; of training at most _LONGEST_TRAINED
    min_pixels: int
    max_pixels: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """The settings that decide how much memory a run takes."""

    response_tokens: int
    row_tokens: int
    zero_stage: int
    batch_size: int
    layer_by_layer: bool = False  # ZeRO 3 keeps the weights in host memory
    engine_share: float = 0.0  # of a card; 0 leaves it to the engine's default


def init(options: argparse.Namespace) -> None:
    """Write a recipe and print how to start it. Raises UserError where nothing fits."""
    options.model, options.folder = _model(options.model)
    name = short_name(options.model) + ("_lora" if options.lora else "")
    file = options.out or Path(f"{options.data[0].resolve().name}_{name}.yaml")
    if file.exists():
        raise UserError(f"{file} exists already; remove it, or choose a different --out")
    machine = _machine(options.gpus, options.gpu_memory, options.nodes)
    facts = _facts(options)
    plan, sizes = _plan(options, machine, facts, out=f"runs/{file.stem}")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(_text(options, machine, facts, plan, sizes, file), encoding="utf-8")
    start, ranks = _commands(machine, file)
    print(f"{file}: {short_name(options.model)} on {facts.rows} problems, for {machine}")
    if machine.gpus:
        need = max(plan.memory.update, plan.memory.rollout)
        print(f"planned at {need / 1e9:.0f} of {machine.gigabytes:.0f} GB of a card; see it, then start:")
    print(f"  vlm-rl train {shlex.quote(str(file))} --dry-run{ranks}\n  {start}")


def _model(named: str) -> tuple[str, str]:
    """Return what the recipe calls a model, and the folder to read here: a model of the hub gets its commit.

    Without a network the name is kept as it is where we ship the configuration. Otherwise raises UserError.
    """
    try:
        folder = resolve_model(named, weights=False)
    except UserError:
        if not is_shipped(named):
            raise
        return named, named
    return hub_name(folder) or named, str(folder)


def _machine(gpus: int | None, gigabytes: float | None, nodes: int) -> Machine:
    """Return the cards that the user named, or that are here and on as many other nodes."""
    here = num_gpus()
    gpus = here * max(nodes, 1) if gpus is None else gpus
    if nodes < 1 or (nodes > 1 and (not gpus or gpus % nodes)):
        raise UserError(f"--nodes {nodes} --gpus {gpus}: give the GPUs of all nodes, the same number on each")
    if gpus < 0 or (gigabytes is not None and gigabytes <= 0):
        raise UserError(f"--gpus {gpus} --gpu-memory {gigabytes}: give a number of cards and the GB of each")
    return Machine(gpus, gigabytes or (smallest_card() or 80e9) / 1e9, nodes)


# -- the sets --------------------------------------------------------------------------------------


def _facts(options: argparse.Namespace) -> DataFacts:
    """Read the sets, as training will. Raises UserError where it would refuse them."""
    train, evaluated = [str(path) for path in options.data], [str(path) for path in options.eval]
    manifest = read_manifest(train[0])
    low, high = manifest.get("min_pixels", 3136), manifest.get("max_pixels", 1_003_520)
    data = DataConfig(train=train, eval=evaluated, min_pixels=low, max_pixels=high)
    problems = load_training_sets(data)
    others = [problem for loaded in load_eval_sets(data).values() for problem in loaded]
    builder = None
    factor = 2 * manifest.get("patch_size", GRID // 2)
    if _is_here(options.folder):
        builder = PromptBuilder(options.folder, template=TEMPLATES[data.template], min_pixels=low, max_pixels=high)
        check_patch_size([*train, *evaluated], builder.patch_size)
        has_images = any(problem.images for problem in (*problems, *others))
        if has_images and not builder.is_vision:
            raise UserError(f"--model {options.model} takes no images, and the sets have some; choose a vision model")

    def longest(some: Sequence[Problem]) -> int:
        return _longest_prompt(some, builder, low, high, factor)

    prompt = min(_LONGEST_TRAINED, longest(problems))
    return DataFacts(len(problems), max(prompt, longest(others)) if others else prompt, low, high)


def _is_here(model: str) -> bool:
    return (Path(model) / "tokenizer_config.json").is_file()


def _longest_prompt(
    problems: Sequence[Problem], builder: PromptBuilder | None, low: int, high: int, factor: int
) -> int:
    """Return the tokens of the longest prompt: counted with a builder, otherwise estimated from above."""

    def estimate(problem: Problem) -> int:
        images = len(problem.images)
        return len(problem.question.encode()) // 2 + images * (high // factor**2) + 256  # 256: template, system text

    def count(problem: Problem) -> int:
        assert builder is not None
        if problem.videos or builder.patch_size is None:  # images in tiles, whose tokens no size tells
            return len(builder.build(problem).ids)
        images = sum(_image_tokens(data, low, high, factor) - 1 for data in problem.images)
        return builder.count_unexpanded(problem) + images

    likely = sorted(problems, key=estimate, reverse=True)[:_COUNTED]
    return max(map(count, likely)) if builder else estimate(likely[0])


def _image_tokens(data: bytes, low: int, high: int, factor: int) -> int:
    with Image.open(BytesIO(data)) as image:
        height, width = grid_size(image.height, image.width, min_pixels=low, max_pixels=high, factor=factor)
    return height * width // factor**2


# -- the plan --------------------------------------------------------------------------------------


def _plan(options: argparse.Namespace, machine: Machine, facts: DataFacts, *, out: str) -> tuple[DryRun, Sizes]:
    """Return the first plan that fits the machine, and its sizes."""
    smallest: DryRun | None = None
    for sizes in _candidates(options, machine, facts):
        plan = dry_run(_config(options, machine, facts, sizes, out), num_ranks=max(machine.gpus, 1))
        if not machine.gpus:
            return plan, sizes
        if (share := _engine_share(plan, machine.gigabytes * 1e9)) is not None:
            sizes = replace(sizes, engine_share=share)
            return dry_run(_config(options, machine, facts, sizes, out), num_ranks=machine.gpus), sizes
        if smallest is None or plan.memory.update < smallest.memory.update:
            smallest = plan
    if smallest is None:
        raise UserError(
            f"--model {options.model}: its context holds no prompt of {facts.longest_prompt} tokens and a response"
        )
    need = max(smallest.memory.update, smallest.memory.rollout) / 0.9e9
    advice = "more or larger cards, a smaller model" + ("" if options.lora else ", or --lora")
    raise UserError(
        f"{short_name(options.model)} does not fit on {machine}: the least that was tried needs cards of about "
        f"{need:.0f} GB; use {advice}, or images of fewer pixels (vlm-rl prepare --max-pixels)"
    )


def _engine_share(plan: DryRun, card: float) -> float | None:
    """Return the share of a card (bytes) that the rollout engine may take; None where the run does not fit."""
    memory = plan.memory
    share = math.floor(100 * min(LARGEST_ENGINE_SHARE, ROLLOUT_SHARE - memory.kept / card)) / 100
    longest = plan.config.context_tokens
    engine = memory.engine_weights + 2**30 + RESPONSES * longest * plan.kv_bytes_per_token
    return share if memory.update < UPDATE_SHARE * card and engine < share * card else None


def _candidates(options: argparse.Namespace, machine: Machine, facts: DataFacts) -> Iterator[Sizes]:
    """Yield sizes, the best first: long responses before a low ZeRO stage, and that before long rows."""
    context, prompt = _context(options.folder), _prompt_tokens(facts)
    if not machine.gpus:
        responses = min(64, context - prompt)
        if responses >= 16:
            yield Sizes(responses, max(prompt + responses, 1024), 2, batch_size=32)
        return
    stages = [(2, False), (3, False)] + [(3, True)] * (options.lora and machine.gpus == 1)
    for responses in _RESPONSE_TOKENS:
        for stage, layer_by_layer in stages if machine.gpus > 1 or options.lora else stages[:1]:
            for row in (*_ROW_TOKENS, prompt + responses):
                if prompt + responses <= min(row, context):
                    yield Sizes(responses, row, stage, 32 if layer_by_layer else 128, layer_by_layer)


def _context(model: str) -> int:
    """Return the most tokens of a prompt and its response together; many for a model that is not here."""
    if not (Path(model) / "config.json").is_file():
        return 2**20
    return context_of(open_config(model))


def _prompt_tokens(facts: DataFacts) -> int:
    return 64 * math.ceil(facts.longest_prompt / 64)


def _config(options: argparse.Namespace, machine: Machine, facts: DataFacts, sizes: Sizes, out: str) -> Config:
    """Return the configuration of a recipe."""
    tree = {section: dict(values) for section, values, _ in _sections(options, machine, facts, sizes)}
    tree["model"]["path"] = options.folder
    return parse_config({"out": out, **tree}, where="the recipe")


# -- the recipe ------------------------------------------------------------------------------------


def _sections(
    options: argparse.Namespace, machine: Machine, facts: DataFacts, sizes: Sizes
) -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    """Yield the sections of the recipe: name, values, and comments on some of them."""
    prompts = next(2**k for k in range(7 if machine.gpus else 3, -1, -1) if 2**k <= max(1, facts.rows // 2))
    enough = max(16, 2 * machine.gpus)  # fewer leave ranks without work: the packing of `vlm-rl plan`
    mini = min(1 << (enough - 1).bit_length(), prompts)  # a power of 2, as `prompts`: all updates are of one size
    steps = math.ceil(facts.rows / prompts) * math.ceil((100 if machine.gpus else 4) * prompts / facts.rows)
    every = max(1, steps // 10)
    model: dict[str, Any] = {"path": options.model}
    if machine.gpus:
        model["gradient_checkpointing"] = True
    if options.lora:
        model["lora"] = {"rank": 32, "alpha": 64}
    yield "model", model, {}
    data: dict[str, Any] = {"train": [str(path) for path in options.data]}
    if options.eval:
        data["eval"] = [str(path) for path in options.eval]
    data |= {
        "max_prompt_tokens": _prompt_tokens(facts),
        "min_pixels": facts.min_pixels,
        "max_pixels": facts.max_pixels,
    }
    here = "counted" if _is_here(options.folder) else "estimated"
    limits = "as the sets were prepared"
    yield (
        "data",
        data,
        {
            "max_prompt_tokens": f"the longest prompt has {facts.longest_prompt} ({here})",
            "min_pixels": limits,
            "max_pixels": limits,
        },
    )
    yield "algorithm", {"name": "luspo"}, {"name": "or grpo, dr_grpo, dapo, gspo, ba, ...: docs/algorithms.md"}
    buffer = min(512, sizes.response_tokens // 4)
    yield "reward", {"overlong_buffer": buffer}, {"overlong_buffer": "the penalty grows over the last tokens"}
    rollout: dict[str, Any] = {
        "prompts_per_step": prompts,
        "responses_per_prompt": RESPONSES,
        "max_tokens": sizes.response_tokens,
        "batch_size": sizes.batch_size,
    }
    if sizes.engine_share:
        rollout["vllm"] = {"gpu_memory_utilization": sizes.engine_share}
    yield (
        "rollout",
        rollout,
        {
            "max_tokens": "of a response",
            "batch_size": "responses that one rank's engine generates at the same time",
            "vllm": "the engine's share of a card",
        },
    )
    train: dict[str, Any] = {
        "steps": steps,
        "mini_batch_prompts": mini,
        "micro_batch_tokens": sizes.row_tokens,
        "lr": 1e-5 if options.lora else 1e-6,
        "warmup_steps": min(20, steps // 10),
        "zero_stage": sizes.zero_stage,
    }
    if sizes.layer_by_layer:
        train["deepspeed"] = _LAYER_BY_LAYER
    passes = steps * prompts / facts.rows
    yield (
        "train",
        train,
        {
            "steps": f"about {passes:.3g} passes over {facts.rows} problems",
            "mini_batch_prompts": f"updates for each rollout batch: {math.ceil(prompts / mini)}",
            "micro_batch_tokens": "of a packed row; a larger one is faster and takes more memory",
            "lr": "ten times that of full fine-tuning" if options.lora else "",
            "deepspeed": "the learner's weights stay in host memory and come layer by layer",
        },
    )
    if options.eval:
        yield "eval", {"every": every}, {}
    yield "checkpoint", {"every": every if machine.gpus else steps}, {}


def _text(
    options: argparse.Namespace, machine: Machine, facts: DataFacts, plan: DryRun, sizes: Sizes, file: Path
) -> str:
    """Return the recipe's text."""
    start, ranks = _commands(machine, file)
    name = short_name(options.model)
    lines = [f"{name} on {', '.join(map(str, options.data))}, for {machine}."]
    if machine.gpus:
        update, engine = plan.memory.update / 1e9, plan.memory.engine_weights / 1e9
        lines += [
            f"Planned GB of a card: {update:.1f} in the update, {engine:.1f} for the engine's weights in rollouts."
        ]
    organization = next((org for start, org in _ORGANIZATIONS.items() if name.startswith(start)), None)
    if organization and not (Path(options.model).is_dir() or is_hub_name(options.model)):
        lines += [
            "",
            "Before the first start:",
            f"  hf download {organization}/{name} --local-dir {options.model}",
        ]
    lines += ["", f"  vlm-rl train {file} --dry-run{ranks}", f"  {start}", ""]
    lines += ["vlm-rl config KEY explains a key; docs/config.md lists all."]
    text = "".join(f"# {line}".rstrip() + "\n" for line in lines) + f"\nout: runs/{file.stem}\n"
    for section, values, comments in _sections(options, machine, facts, sizes):
        text += f"{section}:\n"
        for key, value in values.items():
            flow = None if isinstance(value, dict | list) else False
            line = yaml.safe_dump({key: value}, sort_keys=False, default_flow_style=flow, width=10_000).rstrip()
            first, _, rest = line.replace("\n", "\n  ").partition("\n")
            comment = f"  # {comments[key]}" if comments.get(key) else ""
            text += f"  {first:<32}{comment}".rstrip() + "\n" + (f"{rest}\n" if rest else "")
    return text


def _commands(machine: Machine, file: Path) -> tuple[str, str]:
    """Return the command that starts the run, and the option by which --dry-run knows the number of ranks."""
    start = start_command(["train", str(file)], max(machine.gpus, 1) // machine.nodes, num_nodes=machine.nodes)
    return start, f" --ranks {machine.gpus}" if machine.gpus > 1 else ""
