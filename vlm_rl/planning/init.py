"""Write a recipe for a model and a prepared set: `vlm-rl init --model M --data SET`.

The sizes come from the set (its number of rows, its longest prompt). Whether they fit, and with which settings, is
asked of the rule that the dry run asks. What is written is a configuration like those of configs/, with comments, to
be read and changed.
"""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from vlm_rl.config import DataConfig, parse_config, put, read_template
from vlm_rl.data.images import GRID, grid_size
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.sets import check_patch_size, load_eval_sets, load_training_sets, read_manifest
from vlm_rl.devices import num_gpus, smallest_card
from vlm_rl.errors import UserError
from vlm_rl.model_files.hub_models import hub_name, is_hub_name, short_name
from vlm_rl.model_files.model_folder import context_of, is_shipped, open_config
from vlm_rl.planning.dry_run import DryRun, dry_run
from vlm_rl.planning.fits import Card, Fit, fits, responses_at_once
from vlm_rl.planning.remedies import SHARE, Remedy, reduced_by
from vlm_rl.run.checkpoint_names import resolve_model
from vlm_rl.run.run_files import write_atomically
from vlm_rl.run.terminal import start_command
from vlm_rl.types import Problem

RESPONSES = 8  # to a prompt
_COUNTED = 64  # prompts whose tokens are counted: those that look longest
_LONGEST_TRAINED = 4096  # tokens; longer prompts are left out of training
_RESPONSE_TOKENS = (4096, 2048, 1024, 512)
_ROW_TOKENS = 16_384
_LARGEST_BATCH = 128  # responses of an engine side by side
_USUAL = 4  # times shorter than the longest is a usual response
_ORGANIZATIONS = {
    "Qwen": "Qwen",
    "Llama-": "meta-llama",
    "Mistral-": "mistralai",
    "gemma-": "google",
    "InternVL": "OpenGVLab",
}  # beginning of a model's name -> who publishes it on the hub
_FIXED = ("model.lora", "rollout.max_tokens")  # what is asked for, and what is tried from outside


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
class Recipe:
    """The values of a recipe by section, and comments on its keys."""

    tree: dict[str, Any]
    comments: dict[str, str]  # by section.key

    def put(self, key: str, value: Any, comment: str = "") -> None:
        """Set a key, and comment on it, or on the block that it is in."""
        put(self.tree, key, value)
        if comment:
            self.comments.setdefault(".".join(key.split(".")[:2]), comment)


def init(options: argparse.Namespace) -> None:
    """Write a recipe and print how to start it. Raises UserError if nothing fits."""
    options.model, options.folder = _model(options.model)
    name = short_name(options.model) + ("_lora" if options.lora else "")
    file = options.out or Path(f"{options.data[0].resolve().name}_{name}.yaml")
    if file.exists():
        raise UserError(f"{file} exists already; remove it, or choose a different --out")
    machine = _machine(options.gpus, options.gpu_memory, options.nodes)
    facts = _facts(options)
    recipe, fit = fitting_recipe(options, machine, facts, out=f"runs/{file.stem}")
    text = _text(options, machine, recipe, fit.dry, file)
    write_atomically(file, lambda place: place.write_text(text, encoding="utf-8"))
    start, ranks = _commands(machine, file)
    print(f"{file}: {short_name(options.model)} on {facts.rows} problems, for {machine}")
    if machine.gpus:
        memory, ranks_here = fit.dry.memory, machine.gpus // machine.nodes
        host = f", and {memory.host * ranks_here / 1e9:.0f} GB of host memory on a machine" if memory.host else ""
        need = max(memory.update, memory.rollout)
        print(f"planned at {need / 1e9:.0f} of {machine.gigabytes:.0f} GB of a card{host}; see it, then start:")
    print(f"  vlm-rl train {shlex.quote(str(file))} --dry-run{ranks}\n  {start}")


def recipe_tree(
    model: str, train: Sequence[Path], evaluated: Sequence[Path], *, template: str | None = None
) -> dict[str, Any]:
    """Return the sections of a recipe for a model, prepared sets and this machine.

    Args:
        model: as `vlm-rl init --model` takes it.
        train: the sets to train on.
        evaluated: the sets to evaluate on.
        template: the run's data.template; None for the default.

    Raises UserError if a set cannot be read, or nothing fits.
    """
    name, folder = _model(model)
    options = argparse.Namespace(model=name, folder=folder, data=[*train], eval=[*evaluated], lora=False, gpus=None)
    machine, facts = _machine(None, None, 1), _facts(options, template)
    recipe, _ = fitting_recipe(options, machine, facts, out="runs/recipe")
    return recipe.tree


def _model(named: str) -> tuple[str, str]:
    """Return a model's name in the recipe, and the folder to read here: a model of the hub gets its commit.

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


def _facts(options: argparse.Namespace, template: str | None = None) -> DataFacts:
    """Read the sets, as training will. Raises UserError if it would refuse them.

    `template` is data.template; None is the default.
    """
    train, evaluated = [str(path) for path in options.data], [str(path) for path in options.eval]
    manifest = read_manifest(train[0])
    low, high = manifest.get("min_pixels", 3136), manifest.get("max_pixels", 1_003_520)
    how: dict[str, Any] = {}
    if template is not None:
        how["template"] = read_template(Path(template)) if template.endswith((".yaml", ".yml")) else template
    data = DataConfig(train=train, eval=evaluated, min_pixels=low, max_pixels=high, **how)
    problems = load_training_sets(data)
    others = [problem for loaded in load_eval_sets(data).values() for problem in loaded]
    builder = None
    factor = 2 * manifest.get("patch_size", GRID // 2)
    if _is_here(options.folder):
        builder = PromptBuilder(options.folder, template=data.prompt_template, min_pixels=low, max_pixels=high)
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


def fitting_recipe(
    options: argparse.Namespace, machine: Machine, facts: DataFacts, *, out: str
) -> tuple[Recipe, Fit]:
    """Return a recipe that fits the machine, and how it fits.

    Prefer an engine with room for a whole group of full length, then long responses, then what costs least time.
    Raises UserError if nothing fits.
    """
    card = Card.here(max(machine.gpus, 1), emptied=True)
    if machine.gpus:
        is_here = options.gpus is None and machine.nodes == 1
        host, neighbours = card.host if is_here else None, machine.gpus // machine.nodes
        card = Card.of(machine.gigabytes, host=host, neighbours=neighbours)
    smallest: Fit | None = None
    for responses in (RESPONSES, 1):
        for tokens in _response_lengths(options.folder, machine, facts):
            recipe = _recipe(options, machine, facts, tokens)
            fit = fits(_dry_of(recipe, options.folder, machine, out=out), card, responses=responses)
            chosen, fit = reduced_by(fit, lambda key: not key.startswith(_FIXED))
            if fit.ok:
                return _with(recipe, chosen, fit), fit
            if smallest is None or fit.smallest_card < smallest.smallest_card:
                smallest = fit
    if smallest is None:
        raise UserError(
            f"--model {options.model}: its context holds no prompt of {facts.longest_prompt} tokens and a response"
        )
    need, advice = f"{smallest.smallest_card / 1e9:.0f} GB", "" if options.lora else ", or --lora"
    need, advice = (
        (f"cards of about {need}", f"more or larger cards, a smaller model{advice}")
        if machine.gpus
        else (f"about {need}", f"a smaller model{advice}")
    )
    raise UserError(
        f"{short_name(options.model)} does not fit on {machine}: {smallest.faults}. The least that was tried needs "
        f"{need}; use {advice}, or images of fewer pixels (vlm-rl prepare --max-pixels)"
    )


def _dry_of(recipe: Recipe, folder: str, machine: Machine, *, out: str) -> DryRun:
    """Return the dry run of a recipe, whose model is in this folder."""
    tree = recipe.tree | {"out": out, "model": recipe.tree["model"] | {"path": folder}}
    return dry_run(parse_config(tree, "the recipe"), num_ranks=max(machine.gpus, 1), on_gpu=machine.gpus > 0)


def _with(recipe: Recipe, chosen: Sequence[Remedy], fit: Fit) -> Recipe:
    """Return the recipe with remedies, the engine's best share of a card, and as many responses as that holds."""
    for remedy in chosen:
        *_, last = remedy.values
        for key, value in remedy.values.items():
            recipe.put(key, value, remedy.effect if key == last else "")
    if fit.shares is not None:
        _, best = fit.shares
        recipe.put(SHARE, best, "the engine's share of a card")
        longest = fit.dry.config.context_tokens
        usual = _USUAL * responses_at_once(fit.dry, best * fit.card.total, tokens=longest)
        recipe.put("rollout.batch_size", min(_LARGEST_BATCH, 2 ** int(math.log2(usual))))
    return recipe


def _response_lengths(model: str, machine: Machine, facts: DataFacts) -> Iterator[int]:
    """Yield the longest responses to try, in tokens, the longest first; only those that the model's context holds."""
    left = _context(model) - _prompt_tokens(facts)
    if machine.gpus:
        yield from (tokens for tokens in _RESPONSE_TOKENS if tokens <= left)
    elif left >= 16:
        yield min(64, left)


def _context(model: str) -> int:
    """Return the most tokens of a prompt and its response together; many for a model that is not here."""
    if not (Path(model) / "config.json").is_file():
        return 2**20
    return context_of(open_config(model))


def _prompt_tokens(facts: DataFacts) -> int:
    return 64 * math.ceil(facts.longest_prompt / 64)


# -- the recipe ------------------------------------------------------------------------------------


def _recipe(options: argparse.Namespace, machine: Machine, facts: DataFacts, response_tokens: int) -> Recipe:
    """Return a recipe whose responses are at most so long, with the largest rows and the least that is divided."""
    prompts = next(2**k for k in range(7 if machine.gpus else 3, -1, -1) if 2**k <= max(1, facts.rows // 2))
    enough = max(16, 2 * machine.gpus)  # fewer leave ranks without work: the packing of `vlm-rl plan`
    mini = min(1 << (enough - 1).bit_length(), prompts)  # a power of 2, as `prompts`: all updates are of one size
    steps = math.ceil(facts.rows / prompts) * math.ceil((100 if machine.gpus else 4) * prompts / facts.rows)
    every = max(1, steps // 10)
    longest = _prompt_tokens(facts) + response_tokens
    tree: dict[str, Any] = {
        "model": {"path": options.model},
        "data": {
            "train": [str(path) for path in options.data],
            **({"eval": [str(path) for path in options.eval]} if options.eval else {}),
            "max_prompt_tokens": _prompt_tokens(facts),
            "min_pixels": facts.min_pixels,
            "max_pixels": facts.max_pixels,
        },
        "algorithm": {"name": "luspo"},
        "reward": {"overlong_buffer": min(512, response_tokens // 4)},
        "rollout": {
            "prompts_per_step": prompts,
            "responses_per_prompt": RESPONSES,
            "max_tokens": response_tokens,
            "batch_size": _LARGEST_BATCH if machine.gpus else 32,
        },
        "train": {
            "steps": steps,
            "mini_batch_prompts": mini,
            "micro_batch_tokens": max(longest, _ROW_TOKENS if machine.gpus else 1024),
            "lr": 1e-5 if options.lora else 1e-6,
            "warmup_steps": min(20, steps // 10),
            "zero_stage": 2,
        },
        **({"eval": {"every": every}} if options.eval else {}),
        "checkpoint": {"every": every if machine.gpus else steps},
    }
    if machine.gpus:
        tree["model"]["gradient_checkpointing"] = True
    if options.lora:
        tree["model"]["lora"] = {"rank": 32, "alpha": 64}
    here = "counted" if _is_here(options.folder) else "estimated"
    return Recipe(
        tree,
        {
            "data.max_prompt_tokens": f"the longest prompt has {facts.longest_prompt} ({here})",
            "data.min_pixels": "as the sets were prepared",
            "data.max_pixels": "as the sets were prepared",
            "algorithm.name": "or grpo, dr_grpo, dapo, gspo, ba, ...: docs/algorithms.md",
            "reward.overlong_buffer": "the penalty grows over the last tokens",
            "rollout.max_tokens": "of a response",
            "rollout.batch_size": "responses that one engine generates at the same time",
            "train.steps": f"about {steps * prompts / facts.rows:.3g} passes over {facts.rows} problems",
            "train.mini_batch_prompts": f"updates for each rollout batch: {math.ceil(prompts / mini)}",
            "train.micro_batch_tokens": "of a packed row; a larger one is faster and takes more memory",
            "train.lr": "ten times that of full fine-tuning" if options.lora else "",
        },
    )


def _text(options: argparse.Namespace, machine: Machine, recipe: Recipe, dry: DryRun, file: Path) -> str:
    """Return the recipe's text."""
    start, ranks = _commands(machine, file)
    name = short_name(options.model)
    lines = [f"{name} on {', '.join(map(str, options.data))}, for {machine}."]
    if machine.gpus:
        update, engine = dry.memory.update / 1e9, dry.memory.engine_weights / 1e9
        lines += [
            f"Planned GB of a card: {update:.1f} in the update, {engine:.1f} for the engine's weights in rollouts."
        ]
        if host := dry.memory.host * machine.gpus // machine.nodes:
            lines += [f"Planned GB of host memory on a machine: {host / 1e9:.0f}."]
    organization = next((org for start, org in _ORGANIZATIONS.items() if name.startswith(start)), None)
    if organization and not (Path(options.model).is_dir() or is_hub_name(options.model)):
        lines += [
            "",
            "Before the first start:",
            f"  hf download {organization}/{name} --local-dir {options.model}",
        ]
    lines += ["", f"  vlm-rl train {file} --dry-run{ranks}", f"  {start}", ""]
    lines += ["vlm-rl config KEY explains a key; docs/config.md lists all."]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines) + f"\nout: runs/{file.stem}\n" + body_of(recipe)


def body_of(recipe: Recipe) -> str:
    """Return the sections of a recipe as YAML, a line for each key, with its comment."""
    text = ""
    for section, values in recipe.tree.items():
        text += f"{section}:\n"
        for key, value in values.items():
            flow = None if isinstance(value, dict | list) else False
            line = yaml.safe_dump({key: value}, sort_keys=False, default_flow_style=flow, width=10_000).rstrip()
            first, _, rest = line.replace("\n", "\n  ").partition("\n")
            comment = f"  # {text_of}" if (text_of := recipe.comments.get(f"{section}.{key}")) else ""
            text += f"  {first:<32}{comment}".rstrip() + "\n" + (f"{rest}\n" if rest else "")
    return text


def _commands(machine: Machine, file: Path) -> tuple[str, str]:
    """Return the command that starts the run, and the option by which --dry-run knows the number of ranks."""
    start = start_command(["train", str(file)], max(machine.gpus, 1) // machine.nodes, num_nodes=machine.nodes)
    return start, f" --ranks {machine.gpus}" if machine.gpus > 1 else ""
