"""One rank of test_learner.py: runs the cases in one process and writes what it saw to a file.

train_worker.py forks the ranks and calls main. Starting ranks costs more than training the tiny model, so one start
serves all cases. A case returns plain numbers and tensors; what they must be is the test's business.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from itertools import combinations, cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.groups import WeighedGroup, make_prompt, noise_image, pack, random_group
from vlm_rl.advantages import compute_advantages
from vlm_rl.algorithms import ALGORITHMS, Algorithm
from vlm_rl.config import Config, LoraConfig, ModelPart, TrainConfig, load_config, load_sft_config
from vlm_rl.data.prompts import rope_positions
from vlm_rl.distributed import all_gather, barrier, init_ranks, rank, world_size
from vlm_rl.errors import UserError
from vlm_rl.hadw import Belief, difficulty_weights
from vlm_rl.learner import head as head_module
from vlm_rl.learner import learner as learner_module
from vlm_rl.learner.guard import GuardAbortError
from vlm_rl.learner.learner import Learner, UpdateResult
from vlm_rl.learner.packing import Chunk, PackedRow
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.learner.reference import BaseReference, Reference
from vlm_rl.learner.row_plan import plan_rows
from vlm_rl.learner.sequence_parallel import group_of_ranks
from vlm_rl.losses import policy_loss, token_weights
from vlm_rl.model_files.adapters import ADAPTER_WEIGHTS, BaseModel
from vlm_rl.model_files.weights import stored_buffers
from vlm_rl.planning.dry_run import without_sampling
from vlm_rl.types import LossInputs

TEMPERATURE = 0.9
LR = 1e-3
STEPS = 3
NO_CLIP = 1e9
VISION_PARTS: tuple[ModelPart, ...] = ("tower", "merger")
loss_function = partial(policy_loss, ratio="token", surrogate="clip", clip_low=0.2, clip_high=0.2, cap=2.0)


def banned_ids(config: Any) -> list[int]:
    return [getattr(config, name) for name in ("image_token_id", "video_token_id") if hasattr(config, name)]


@cache
def fresh_model(model: Path) -> Any:
    """Read once; every case takes a copy."""
    return load_model(model, dtype=torch.float32)


@cache
def five_groups(model: Path) -> list[WeighedGroup]:
    return make_groups(model, fresh_model(model).config)


def make_groups(model: Path, config: Any) -> list[WeighedGroup]:
    """Make five groups: unequal prompts and images, one of them text only, or all for a text model."""
    is_vision = hasattr(config, "vision_config")
    texts = ["How many?", "How many red squares are there, and why?"]
    return [
        random_group(
            make_prompt(model, texts[g % 2], [] if g == 2 or not is_vision else [noise_image(84, 84 + 28 * g, g)]),
            [5, 9, 3, 12],
            vocabulary=config.get_text_config().vocab_size,
            seed=g,
            banned=banned_ids(config),
        )
        for g in range(5)
    ]


class Case:
    """A fresh policy and learner on the same weights, groups and loss."""

    def __init__(
        self,
        model: Path,
        stage: int,
        *,
        freeze: Sequence[ModelPart] = (),
        checkpointing: bool = False,
        lora: LoraConfig | None = None,
        offload_activations: bool = False,
        dtype: torch.dtype = torch.float32,
        sequence_parallel: int = 1,
        **config: Any,
    ) -> None:
        network = deepcopy(fresh_model(model)).to(dtype)
        self.model = model
        self.policy_bans = banned_ids(network.config)
        self.policy = Policy(network, banned_ids=self.policy_bans, temperature=TEMPERATURE)
        self.policy.share_rows(group_of_ranks(sequence_parallel))
        self.policy.freeze(freeze)
        if lora is not None:
            self.policy.add_adapters(lora, base=BaseModel(str(model), ""), seed=0)
        if checkpointing:
            self.policy.enable_checkpointing(offload=offload_activations)
        settings = {"optimizer": "sgd", "lr": LR, "grad_clip": NO_CLIP, "zero_stage": stage, **config}
        self.learner = Learner(self.policy, TrainConfig(**settings), total_optimizer_steps=STEPS)
        self.groups = five_groups(model)
        self.start = self.weights()

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.learner.stream_weights()}

    def delta(self) -> dict[str, Tensor]:
        return {name: tensor - self.start[name] for name, tensor in self.weights().items()}

    def rows(
        self, *, budget: int = 90, groups: Sequence[WeighedGroup] | None = None, mean_weight: float = 0.0
    ) -> list[PackedRow]:
        """Return this rank's rows, which the ranks of its group have too."""
        ranks = self.policy.ranks
        chosen = self.groups if groups is None else groups
        plan = plan_rows(
            [len(group.prompt.ids) for group in chosen],
            [group.lengths for group in chosen],
            budget=budget,
            num_ranks=ranks.number,
        )
        return self.pack(plan[ranks.index], chosen, mean_weight)

    def unequal_rows(self) -> list[PackedRow]:
        """In its first row rank 0 has text only while the other rank has images; then the other way round."""
        groups = [Chunk(g, tuple(range(len(group.rollouts)))) for g, group in enumerate(self.groups)]
        first, second = Chunk(2, (0, 1)), Chunk(2, (2, 3))
        plan = [[[first], [groups[0]], [groups[3]]], [[groups[1]], [second], [groups[4]]]]
        mine = plan[rank()] if world_size() == 2 else plan[0] + plan[1]
        return self.pack(mine, self.groups)

    def pack(
        self, plan: Sequence[Sequence[Chunk]], groups: Sequence[WeighedGroup], mean_weight: float = 0.0
    ) -> list[PackedRow]:
        positions = partial(rope_positions, self.policy.model)
        return [pack(chunks, groups, positions, mean_weight=mean_weight) for chunks in plan]

    def train(self, rows: Sequence[PackedRow], steps: int = STEPS) -> list[UpdateResult]:
        return [self.learner.update(rows, loss_function) for _ in range(steps)]


def trained(case: Case, rows: Sequence[PackedRow]) -> dict[str, Any]:
    results = case.train(rows)
    return {
        "delta": case.delta(),
        "loss": [result.loss for result in results],
        "norm": [result.grad_norm for result in results],
        "tokens": [result.sums["tokens"] for result in results],
        "rows": all_gather(len(rows)),
    }


def three_steps(model: Path, stage: int) -> dict[str, Any]:
    case = Case(model, stage)
    return trained(case, case.rows())


def one_wide_row(model: Path, stage: int) -> dict[str, Any]:
    case = Case(model, stage)
    return trained(case, case.rows(budget=10**6))


def many_narrow_rows(model: Path, stage: int) -> dict[str, Any]:
    """Groups are split over rows that repeat their prompts."""
    case = Case(model, stage)
    return trained(case, case.rows(budget=40))


def checkpointing(model: Path, stage: int) -> dict[str, Any]:
    case = Case(model, stage, checkpointing=True)
    return trained(case, case.rows())


def frozen_vision(model: Path, stage: int) -> dict[str, Any]:
    case = Case(model, stage, freeze=VISION_PARTS)
    return trained(case, case.rows())


def frozen_features(model: Path, stage: int) -> dict[str, Any]:
    """The frozen tower is passed once; old log-probs and three updates take what it gave."""
    case = Case(model, stage, freeze=VISION_PARTS)
    passes: list[None] = []
    case.policy.model.model.visual.register_forward_hook(lambda *_: passes.append(None))
    rows = case.learner.with_image_features(case.unequal_rows())
    case.learner.with_old_log_probs(rows)
    return {**trained(case, rows), "passes": len(passes), "is_frozen": case.policy.has_frozen_vision}


def blind(model: Path, stage: int) -> dict[str, Any]:
    """Return the log-probs given blank images of every response on all ranks, and those given the images."""
    case = Case(model, stage)
    rows = case.unequal_rows()
    found = {}
    for name, passed in {
        "blind": case.learner.with_blind_log_probs(rows),
        "seeing": case.learner.with_old_log_probs(rows),
    }.items():
        mine: dict[tuple[int, int], np.ndarray] = {}
        for row in passed:
            assert row.loss.old_logp_K is not None
            parts = [part.numpy() for part in row.loss.old_logp_K.split(row.loss.lengths_n.tolist())]
            mine |= dict(zip(row.members, parts, strict=True))
        found[name] = {member: logp for each in all_gather(mine) for member, logp in each.items()}
    return found


def frozen_parts(model: Path, stage: int) -> dict[str, Any]:
    """Take a step of one part: with the others frozen, or with a learning rate of 0 for them."""
    ways: dict[str, tuple[ModelPart, dict[str, Any]]] = {
        "tower": ("tower", {"freeze": ["merger", "language_model"]}),
        "merger": ("merger", {"freeze": ["tower", "language_model"]}),
        "merger, the others still": ("merger", {"lr_by_part": {"tower": 0.0, "language_model": 0.0}}),
    }
    results: dict[str, Any] = {}
    for way, (part, settings) in ways.items():
        case = Case(model, stage, **settings)
        case.train(case.rows(), steps=1)
        results[way] = {"part": part, "delta": case.delta()}
    return results


def rates_by_part(model: Path, stage: int) -> dict[str, Any]:
    """Take a step with three learning rates; then save, load and take another, with Adam and warm-up.

    `rates` are those of the second steps: of a cosine, of the warm-up, and of the warm-up after the load.
    """
    settings: dict[str, Any] = {"lr_by_part": {"tower": 3 * LR, "merger": 0.5 * LR}}
    one = Case(model, stage, schedule="cosine", **settings)
    one.train(one.rows(), steps=1)
    delta = one.delta()
    case, again = (Case(model, stage, optimizer="adamw", warmup_steps=4, **settings) for _ in range(2))
    case.train(case.rows(), steps=1)
    folder = Path(all_gather(tempfile.mkdtemp() if rank() == 0 else "")[0])
    case.learner.save(folder)
    again.learner.load(folder)
    again.learner.restore(case.learner.state())
    updates = [made.learner.update(case.rows(), loss_function) for made in (one, case, again)]
    barrier()
    if rank() == 0:
        shutil.rmtree(folder)
    return {
        "delta": delta,
        "moved": norm_of(case.delta()),
        "same": equal(case.weights(), again.weights()),
        "rates": [update.learning_rate for update in updates],
    }


def text_here_images_there(model: Path, stage: int) -> dict[str, Any]:
    case = Case(model, stage)
    return trained(case, case.unequal_rows())


def several_mini_batches(model: Path, stage: int) -> dict[str, Any]:
    """Old log-probs of both mini-batches are recomputed before the first update, twice."""
    case = Case(model, stage, lr=100 * LR)  # far enough that some ratios clip
    parts = [case.groups[:2], case.groups[2:]]
    clipped = []
    for _ in range(2):
        batches = [case.learner.with_old_log_probs(case.rows(groups=part)) for part in parts]
        results = [case.learner.update(rows, loss_function) for rows in batches]
        clipped.append([result.sums["clipped_low"] + result.sums["clipped_high"] for result in results])
    return {"delta": case.delta(), "clipped": clipped}


def clipped_norm(model: Path, stage: int) -> dict[str, Any]:
    """One step of SGD with lr 1: the change is the clipped gradient."""
    case = Case(model, stage, grad_clip=0.01, lr=1.0)
    (result,) = case.train(case.rows(), steps=1)
    return {"norm": result.grad_norm, "change": norm_of(case.delta())}


def no_signal(model: Path, stage: int) -> dict[str, Any]:
    """All rewards equal: zero advantages everywhere."""
    case = Case(model, stage)
    equal = [replace(group, advantages_G=0.0 * group.advantages_G) for group in case.groups]
    (result,) = case.train(case.rows(groups=equal), steps=1)
    return {
        "delta": case.delta(),
        "norm": result.grad_norm,
        "loss": result.loss,
        "skipped": case.learner.guard.num_skipped,
    }


def head_in_chunks(model: Path, stage: int) -> dict[str, Any]:
    """The output head passes over a row in pieces, more of them on one rank than on the other."""
    whole = head_module.LOGIT_BYTES
    case = Case(model, stage)
    head_module.LOGIT_BYTES = 10 * 8 * case.policy.model.config.get_text_config().vocab_size
    try:
        return trained(case, case.unequal_rows())
    finally:
        head_module.LOGIT_BYTES = whole


def one_group(model: Path, stage: int) -> dict[str, Any]:
    """Fewer groups than ranks, and one response: the other rank has padding only."""
    case = Case(model, stage)
    alone = case.groups[0]
    group = WeighedGroup(alone.prompt, alone.rollouts[:1], alone.advantages_G[:1], alone.weights_G[:1])
    return trained(case, case.rows(groups=[group]))


def poisoned(
    factor: float, logp_K: Tensor, entropy_K: Tensor, inputs: LossInputs
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The loss times a factor, on the last rank only: the others learn of it from the global norm alone."""
    loss, sums = loss_function(logp_K, entropy_K, inputs)
    return (loss * factor if rank() == world_size() - 1 else loss), sums


def guarded(model: Path, stage: int) -> dict[str, Any]:
    """Good, NaN, Inf, spike, good with AdamW, beside good, good: refused steps must leave no trace."""
    settings = {"optimizer": "adamw", "grad_clip": 1.0}
    plain, case = Case(model, stage, **settings), Case(model, stage, **settings)
    plain.train(plain.rows(), steps=2)
    rows = case.rows()
    case.train(rows, steps=1)
    before = case.weights()
    bad: dict[str, dict[str, Any]] = {}
    for fault, factor in {"nan": math.nan, "inf": math.inf, "spike": 1e7}.items():
        result = case.learner.update(rows, partial(poisoned, factor))
        unchanged = equal(case.weights(), before)
        bad[fault] = {
            "skipped": case.learner.guard.skipped_in_a_row,
            "norm": result.grad_norm,
            "unchanged": unchanged,
        }
    (good,) = case.train(rows, steps=1)
    return {
        **bad,
        "moved_before": norm_of({name: before[name] - case.start[name] for name in before}),
        "good_norm": good.grad_norm,
        "skipped": case.learner.guard.num_skipped,
        "in_a_row": case.learner.guard.skipped_in_a_row,
        "same_as_without": equal(case.weights(), plain.weights()),
    }


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Say whether the values are equal bit for bit."""
    return all(torch.equal(a[name], b[name]) for name in b)


def aborts(model: Path, stage: int) -> dict[str, Any]:
    """Too many bad steps; then a good one that is refused once its sums are known."""
    case = Case(model, stage, max_skipped_in_a_row=2)
    rows, bad = case.rows(), partial(poisoned, math.nan)
    tries, error = 0, ""
    try:
        for function in (loss_function, bad, loss_function, bad, bad, loss_function):
            tries += 1
            case.learner.update(rows, function)
    except GuardAbortError as abort:
        error = str(abort)

    def refuse(sums: Mapping[str, float]) -> None:
        raise ValueError(f"{sums['tokens']:g} tokens")

    before, refusal = case.weights(), ""
    try:
        case.learner.update(rows, loss_function, before_step=refuse)
    except ValueError as refused:
        refusal = str(refused)
    kept = equal(case.weights(), before)
    return {"tries": all_gather(tries), "error": error, "refusal": refusal, "kept_when_refused": kept}


def saved(model: Path, stage: int) -> dict[str, Any]:
    """Save and load; then load a state that would run code; then look for a NaN that only the last rank holds."""
    case, again, attacked = (Case(model, stage, optimizer="adamw") for _ in range(3))
    case.train(case.rows(), steps=1)
    folder = Path(all_gather(tempfile.mkdtemp() if rank() == 0 else "")[0])
    finite = case.learner.non_finite()
    case.learner.save(folder)
    again.learner.load(folder)
    again.learner.restore(case.learner.state())
    both = [learner.update(case.rows(), loss_function) for learner in (case.learner, again.learner)]
    result = {"finite": finite, "moved": norm_of(case.delta()), "same": equal(case.weights(), again.weights())}
    result["same_norm"] = both[0].grad_norm == both[1].grad_norm

    if rank() == 0:
        for shard in (folder / "learner").rglob("*.pt"):
            torch.save({"module": Payload(str(folder / "marker"))}, shard)
    barrier()
    try:
        attacked.learner.load(folder)
        refusal = ""
    except UserError as error:
        refusal = str(error)
    result |= {"refusals": all_gather(refusal), "folder": str(folder), "ran": (folder / "marker").exists()}

    moments = next(iter(case.learner._optimizer.state.values()))["exp_avg"]
    largest_name, largest = max(case.policy.model.named_parameters(), key=lambda item: item[1].numel())
    weight = getattr(largest, "ds_tensor", largest).data.view(-1)
    result["largest"] = largest_name
    for name, tensor in {"weight": weight, "moment": moments.view(-1)}.items():
        good = float(tensor[0])
        if rank() == world_size() - 1:
            tensor[0] = math.nan
        result[name] = all_gather(case.learner.non_finite())
        tensor[0] = good
    if rank() == 0:
        shutil.rmtree(folder)
    return result


def adapters(model: Path, stage: int) -> dict[str, Any]:
    """Three steps of adapters with a KL term, whose reference is the policy without them; save and load between."""
    settings = {"optimizer": "adamw", "lr": 1e-2, "lora": LoraConfig(rank=4), "checkpointing": True}
    case, again = Case(model, stage, **settings), Case(model, stage, **settings)
    with_kl = partial(loss_function, kl_coef=0.2)
    references: list[Tensor] = []

    def step(each: Case) -> UpdateResult:
        rows = each.learner.with_image_features(each.unequal_rows())
        rows = each.learner.with_reference_log_probs(rows, BaseReference(each.learner.engine))
        log_probs = [row.loss.reference_logp_K for row in rows]
        references.append(torch.cat([each_K for each_K in log_probs if each_K is not None]))
        return each.learner.update(rows, with_kl)

    results = [step(case), step(case)]
    folder = Path(all_gather(tempfile.mkdtemp() if rank() == 0 else "")[0])
    case.learner.save(folder)
    again.learner.load(folder)
    again.learner.restore(case.learner.state())
    results.append(step(case))
    same_norm = step(again).grad_norm == results[-1].grad_norm
    states = [torch.load(file, weights_only=False) for file in sorted((folder / "learner").rglob("*model_states.pt"))]
    moments = [state["exp_avg"].numel() for state in case.learner._optimizer.state.values()]
    barrier()
    result = {
        "delta": case.delta(),
        "norm": [result.grad_norm for result in results],
        "same": equal(case.weights(), again.weights()),
        "same_norm": same_norm,
        "references": [bool(torch.equal(references[0], each)) for each in references],
        "kl": [result.sums["kl"] for result in results],
        "moments": sum(all_gather(sum(moments))),
        "trained": [name for name, p in case.policy.model.named_parameters() if p.requires_grad],
        "files": sorted(path.name for path in folder.iterdir()),
        "stored": sorted({name for state in states for name in state["module"]}),
        "frozen": [state.get("frozen_param_fragments") for state in states],
        "adapter": load_file(folder / ADAPTER_WEIGHTS),
    }
    barrier()
    if rank() == 0:
        shutil.rmtree(folder)
    return result


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


# -- every family of models ------------------------------------------------------------------------


def families(folder: Path, stage: int) -> dict[str, Any]:
    """Return what `one_family` returns for each model in the folder."""
    return {model.name: one_family(model, stage) for model in sorted(folder.iterdir())}


def one_family(model: Path, stage: int) -> dict[str, Any]:
    """Take a step with text on one rank and images on the other, and save.

    Qwen2.5-VL and InternVL take one with a frozen tower too: one with and one without windows of attention.
    """
    case = Case(model, stage, lr=GRADIENT_LR)
    case.train(case.unequal_rows(), steps=1)
    saved = Path(all_gather(tempfile.mkdtemp() if rank() == 0 else "")[0])
    case.learner.save_model(saved)
    models = (load_model(path, dtype=torch.float32) for path in (saved, model))
    loaded, started = ({**dict(m.named_parameters()), **dict(stored_buffers(m))} for m in models)
    expected = {**started, **case.weights()}  # what no output depends on stays as it was
    result = {"delta": case.delta(), "is_saved": all(torch.equal(loaded[n], w) for n, w in expected.items())}
    barrier()
    if rank() == 0:
        shutil.rmtree(saved)
    if case.policy.model.config.model_type in ("qwen2_5_vl", "internvl"):
        frozen = Case(model, stage, freeze=VISION_PARTS, lr=GRADIENT_LR)
        frozen.train(frozen.learner.with_image_features(frozen.unequal_rows()), steps=1)
        result["frozen_delta"] = frozen.delta()
    return result


# -- every algorithm -------------------------------------------------------------------------------

# What each variant adds to its algorithm.
ADDED: dict[str, dict[str, Any]] = {
    "hadw": {"hadw": True},
    "kl+entropy": {"kl_coef": 0.2, "entropy_coef": 0.1},
    "frozen": {"freeze": VISION_PARTS},
}
# Every algorithm with none, one, two or all of them.
SUBSETS = [list(subset) for size in range(len(ADDED) + 1) for subset in combinations(ADDED, size)]
VARIANTS: dict[str, dict[str, Any]] = {
    "+".join([name, *subset]): {"algorithm": name} | {key: v for added in subset for key, v in ADDED[added].items()}
    for name in ALGORITHMS
    for subset in SUBSETS
}
BUDGETS = (10**6, 57)  # tokens of a row: 1 row and 8 rows on one rank
MAX_TOKENS = 16
GRADIENT_LR = 10.0  # one step of plain descent: the change over this is minus the gradient


def every_rule(model: Path, stage: int) -> dict[str, Any]:
    """Return the gradients of each rule once, from nothing added to everything, and round again."""
    names = ["+".join([name, *subset]) for name, subset in zip(ALGORITHMS, cycle(SUBSETS), strict=False)]
    return {name: _gradients(model, stage, **VARIANTS[name]) for name in names}


def some_algorithms(model: Path, stage: int) -> dict[str, Any]:
    """Cut through the variants: the longest and the shortest rows, rules that share no factor."""
    names = ("luspo+hadw", "ba", "gspo+kl+entropy")
    return {name: _gradients(model, stage, **VARIANTS[name]) for name in names}


def _gradients(
    model: Path,
    stage: int,
    *,
    algorithm: str,
    hadw: bool = False,
    freeze: Sequence[ModelPart] = (),
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
) -> dict[str, Any]:
    """Return the gradient from rows of each budget, with the groups in a different order each time."""
    rule = ALGORITHMS[algorithm]
    factors = {key: getattr(rule, key) for key in ("ratio", "surrogate", "clip_low", "clip_high")}
    loss = partial(policy_loss, **factors, cap=2.0, kl_coef=kl_coef, entropy_coef=entropy_coef)
    deltas: list[dict[str, Tensor]] = []
    counts: list[int] = []
    results: list[UpdateResult] = []
    for turn, budget in enumerate(BUDGETS):
        case = Case(model, stage, freeze=freeze, lr=GRADIENT_LR)
        groups = weighed(case, rule, hadw=hadw)
        groups = groups[turn:] + groups[:turn]
        mean_weight = 1 / sum(sum(group.lengths) for group in groups)
        rows = case.rows(budget=budget, groups=groups, mean_weight=mean_weight)
        if kl_coef:
            rows = case.learner.with_reference_log_probs(rows, perturbed_reference(model, stage))
        results.append(case.learner.update(rows, loss))
        assert case.learner.guard.num_skipped == 0
        deltas.append(case.delta())
        counts.append(len(rows))
    first = deltas[0]
    gaps = [norm_of({name: other[name] - first[name] for name in first}) / norm_of(first) for other in deltas]
    return {
        "gradient": {name: -delta / GRADIENT_LR for name, delta in first.items()},
        "loss": results[-1].loss,
        "gaps": gaps,
        "rows": counts,
    }


def weighed(case: Case, rule: Algorithm, *, hadw: bool) -> list[WeighedGroup]:
    return weigh(case.groups, plain_log_probs(case), rule, hadw=hadw)


def weigh(
    groups: Sequence[WeighedGroup], logps: Sequence[Sequence[np.ndarray]], rule: Algorithm, *, hadw: bool
) -> list[WeighedGroup]:
    """Return the groups with the rule's advantages and weights, and old log-probs on both sides of its clip."""
    rng = np.random.default_rng(5)
    rewards_PG = rng.choice([0.0, 0.5, 1.5], size=(len(groups), 4))
    rewards_PG[1] = 1.5  # nothing to learn from
    advantages_PG = compute_advantages(rule.advantage, rewards_PG)
    if hadw:
        belief = Belief(ability=0.4)
        advantages_PG *= difficulty_weights(advantages_PG, (rewards_PG > 1).mean(axis=1), belief, scale=1.3)
    lengths_PG = np.array([group.lengths for group in groups])
    weights_PG = token_weights(rule.aggregation, lengths_PG, advantages_PG, max_tokens=MAX_TOKENS)
    spread = 0.2 if rule.ratio == "token" else 2e-3
    return [
        WeighedGroup(
            group.prompt,
            group.rollouts,
            advantages_G,
            weights_G,
            [logp + rng.normal(0, spread, len(logp)) for logp in logps[index]],
        )
        for index, (group, advantages_G, weights_G) in enumerate(zip(groups, advantages_PG, weights_PG, strict=True))
    ]


def plain_log_probs(case: Case) -> list[list[np.ndarray]]:
    """Of every response under the starting weights, on every rank, without DeepSpeed."""
    if not _PLAIN:
        policy = Policy(deepcopy(fresh_model(case.model)), banned_ids=case.policy_bans, temperature=TEMPERATURE)
        for index in range(len(case.groups)):
            (row,) = case.pack([[Chunk(index, (0, 1, 2, 3))]], case.groups)
            with torch.no_grad():
                logp_K, _ = policy(row)
            _PLAIN.append([part.numpy() for part in logp_K.split(row.loss.lengths_n.tolist())])
    return _PLAIN


_PLAIN: list[list[np.ndarray]] = []


def perturb(network: torch.nn.Module) -> None:
    """Change the weights, in the same way on every rank, so that the reference is not the policy in training."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)


@cache
def perturbed_reference(model: Path, stage: int) -> Reference:
    network = deepcopy(fresh_model(model))
    perturb(network)
    policy = Policy(network, banned_ids=banned_ids(network.config), temperature=TEMPERATURE)
    return Reference(policy, zero_stage=stage)


def norm_of(tensors: Mapping[str, Tensor]) -> float:
    return sum(float(tensor.double().pow(2).sum()) for tensor in tensors.values()) ** 0.5


def gradient_sums(model: Path, stage: int) -> dict[str, Any]:
    """Count the sums over the ranks in a step in bfloat16 of one row, and of many."""
    calls: list[None] = []

    def counted(sum_up: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **options: Any) -> Any:
            calls.append(None)
            return sum_up(*args, **options)

        return count

    results: dict[str, Any] = {}
    case = Case(model, stage, dtype=torch.bfloat16)
    for name, budget in {"wide": 10**6, "narrow": 40}.items():
        rows = case.rows(budget=budget)
        with ExitStack() as patches:
            for function in ("all_reduce", "reduce", "reduce_scatter_tensor"):
                sum_up = counted(getattr(torch.distributed, function))
                patches.enter_context(patch.object(torch.distributed, function, sum_up))
            calls.clear()
            case.train(rows, steps=1)
            results[name] = (len(rows), len(calls))
    return results


def row_sums(model: Path, stage: int) -> dict[str, Any]:
    """Take three steps in bfloat16 and ZeRO 2, whatever the stage: with our sums over the rows, and DeepSpeed's."""
    ways: dict[str, dict[str, Any]] = {
        "all weights": {},
        "adapters": {"lora": LoraConfig(rank=3)},
        "two rates, checkpointing": {"lr_by_part": {"tower": 1e-4}, "checkpointing": True},
    }
    results: dict[str, Any] = {}
    for way, settings in ways.items():
        for whose, are_ours in {"ours": True, "DeepSpeed's": False}.items():
            with ExitStack() as patches:
                if not are_ours:
                    patches.enter_context(patch.object(learner_module, "are_summed_here", return_value=False))
                case = Case(model, 2, dtype=torch.bfloat16, optimizer="adamw", **settings)
                zero = case.learner.engine.optimizer
                reduced = patches.enter_context(
                    patch.object(zero, "reduce_ipg_grads", side_effect=zero.reduce_ipg_grads)
                )
                steps = case.train(case.unequal_rows())
            norms = [step.grad_norm for step in steps]
            results[f"{way}, {whose}"] = {"weights": case.weights(), "norms": norms, "buckets": reduced.call_count}
    return results


def offloaded(model: Path, stage: int) -> dict[str, Any]:
    """Take two steps with the optimizer's state on the host: always, between steps (in ZeRO 2 and 3), and never."""
    results: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        deltas, states, moved = [], [], []
        for zero, between in (({}, False), ({"offload_optimizer": {"device": "cpu"}}, False), ({}, stage >= 2)):
            case = Case(model, stage or 2, optimizer="adamw", dtype=dtype, deepspeed={"zero_optimization": zero})
            for _ in range(2):
                if between:
                    before = optimizer_addresses(case)
                    case.learner.offload_optimizer()
                    states.append(sorted(state.value for state in case.learner.engine.optimizer.offloaded_states))
                    # Tensor by tensor: one may get the memory that a different one has left.
                    pairs = zip(before, optimizer_addresses(case), strict=True)
                    moved.append(sum(size for (old, size), (new, _) in pairs if new != old))
                    case.learner.reload_optimizer()
                    assert not case.learner.engine.optimizer.offloaded_states
                case.train(case.rows(), 1)
            deltas.append(case.delta())
        shards = [-(-parameter.numel() // world_size()) for parameter in fresh_model(model).parameters()]
        results[str(dtype)] = {
            "norm": norm_of(deltas[0]),
            "same": all(torch.equal(d, other[name]) for other in deltas[1:] for name, d in deltas[0].items()),
            "states": states,
            "moved": moved,
            "shards": sum(shards),
        }
    return results


def optimizer_addresses(case: Case) -> list[tuple[int, int]]:
    """Return address and bytes of each of ZeRO 3's masters and moments; nothing in other stages."""
    optimizer = case.learner.engine.optimizer
    masters = getattr(optimizer, "fp32_partitioned_groups_flat", [])
    states = optimizer.optimizer.state.values() if masters else []
    moments = [tensor for state in states for tensor in state.values() if tensor.dim()]
    return [(tensor.data_ptr(), tensor.nbytes) for tensor in (*masters, *moments)]


SETTINGS = {  # the words of the table in docs/performance.md, and what they set
    "ZeRO 2": "train.zero_stage=2",
    "ZeRO 3": "train.zero_stage=3",
    "offload_optimizer": "train.deepspeed.zero_optimization.offload_optimizer.device=cpu",
    "checkpointing": "model.gradient_checkpointing=true",
    "offload_activations": "model.offload_activations=true",
}


def recipes() -> Iterator[tuple[str, Config]]:
    """Yield every shipped recipe, and the rows of the documentation's table of settings as overrides of one."""
    root = Path(__file__).parents[2]
    for path in sorted((root / "configs").rglob("*.yaml")):
        if path.parent.name == "sft":
            yield path.stem, without_sampling(load_sft_config(path))
        elif path.parent.name != "studies":  # which train what toy.yaml does
            yield path.stem, load_config(path)
    table = (
        (root / "docs" / "performance.md").read_text().split("a row's activations, GiB | host, GiB | settings |\n")[1]
    )
    for line in table.split("\n\n")[0].splitlines()[1:]:
        machine, *_, settings = line.strip("| ").split(" | ")
        words = [word.split(" (")[0] for word in settings.split(", ")]
        yield machine, load_config(root / "configs" / "virl39k_luspo_3b.yaml", [SETTINGS[word] for word in words])


def started_recipes(model: Path, stage: int) -> dict[str, Any]:
    """Take a step in bfloat16, as on GPUs, with the training settings of every recipe; equal settings start once."""
    norms: dict[str, float] = {}
    done: dict[str, str] = {}
    for name, config in recipes():
        settings = {
            "checkpointing": config.model.gradient_checkpointing,
            "offload_activations": config.model.offload_activations,
            "freeze": config.model.freeze,
            "lora": config.model.lora,
            **config.train.model_dump(
                include={"zero_stage", "optimizer", "deepspeed", "betas", "weight_decay", "lr_by_part"}
            ),
        }
        first = done.setdefault(str(settings), name)
        if first == name:
            case = Case(model, 2, dtype=torch.bfloat16, **settings)
            norms[name] = case.train(case.rows(), 1)[0].grad_norm
        norms[name] = norms[first]
    return {"norms": norms}


CASES: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "three_steps": three_steps,
    "one_wide_row": one_wide_row,
    "many_narrow_rows": many_narrow_rows,
    "checkpointing": checkpointing,
    "frozen_vision": frozen_vision,
    "frozen_features": frozen_features,
    "blind": blind,
    "families": families,
    "frozen_parts": frozen_parts,
    "rates_by_part": rates_by_part,
    "text_here_images_there": text_here_images_there,
    "several_mini_batches": several_mini_batches,
    "clipped_norm": clipped_norm,
    "head_in_chunks": head_in_chunks,
    "no_signal": no_signal,
    "one_group": one_group,
    "guarded": guarded,
    "aborts": aborts,
    "saved": saved,
    "adapters": adapters,
    "gradient_sums": gradient_sums,
    "offloaded": offloaded,
    "started_recipes": started_recipes,
    "row_sums": row_sums,
    "some_algorithms": some_algorithms,
    "every_rule": every_rule,
}


def main(model: str, stage: str, out: str, *names: str) -> int:
    init_ranks()
    results = {name: CASES[name](Path(model), int(stage)) for name in names}
    if rank() == 0:
        torch.save(results, out)
    return 0
