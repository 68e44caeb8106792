"""What makes a run smaller, and which of it makes the run fit.

A setting that saves memory is a `Remedy` of `remedies`, in the order of the time that it costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlm_rl.config import MUTABLE_KEYS, with_values
from vlm_rl.errors import UserError
from vlm_rl.planning.dry_run import dry_run
from vlm_rl.planning.fits import Fit, MemoryPart, fits

SHARE = "rollout.vllm.gpu_memory_utilization"
_ZERO = "train.deepspeed.zero_optimization"
_SHORTEST = 512  # tokens of a response, below which nothing shorter is proposed

MayChange = Callable[[str], bool]  # tells of a key whether it may be changed


@dataclass(frozen=True, slots=True)
class Remedy:
    """Settings that make a run smaller."""

    values: Mapping[str, Any]  # by key
    effect: str  # in words

    def __str__(self) -> str:
        """Return the settings as on the command line."""
        return " ".join(f"{key}={str(value).lower()}" for key, value in self.values.items())


def any_key(key: str) -> bool:
    """Allow every key."""
    return True


def is_resumable(key: str) -> bool:
    """Allow the keys that a resumed run takes."""
    return key.startswith(MUTABLE_KEYS)


def fitting_remedies(fit: Fit, may_change: MayChange = any_key) -> list[Remedy] | None:
    """Return few remedies with which a run fits on as many ranks; None if none were found."""
    chosen, reduced = reduced_by(fit, may_change)
    return chosen if reduced.ok else None


def fitting_ranks(fit: Fit) -> int | None:
    """Return the fewest ranks, more than now, on which a run fits with its settings; None if none were found."""
    more = (dry for ranks, dry in fit.dry.by_ranks().items() if ranks > fit.dry.num_ranks)
    return next((dry.num_ranks for dry in more if fits(dry, fit.card, responses=fit.responses).ok), None)


def reduced_by(fit: Fit, may_change: MayChange = any_key) -> tuple[list[Remedy], Fit]:
    """Make a run smaller until it fits, or nothing helps; return the remedies, and how it fits with them.

    Take what is over one by one, and for each the first remedy that makes it smaller. If it does not go with an
    earlier one, it may replace that one.
    """
    chosen: list[Remedy] = []
    current = fit
    while not current.ok:
        steps = (_with(remedy, fit, chosen, current) for remedy in remedies(current, may_change))
        found = next(filter(None, steps), None)
        if found is None:
            return chosen, current
        chosen, current = found
    for remedy in reversed(chosen[:-1]):  # what a later one has made unnecessary
        fewer = [other for other in chosen if other is not remedy]
        if (changed := with_remedies(fit, fewer)) is not None and changed.ok:
            chosen, current = fewer, changed
    return chosen, current


def _with(remedy: Remedy, fit: Fit, chosen: list[Remedy], current: Fit) -> tuple[list[Remedy], Fit] | None:
    """Return the remedies with one more, and how the run fits with them, if that makes smaller what is over first."""
    part = current.over[0].part
    more = [*chosen, remedy]
    if (changed := with_remedies(fit, more)) is not None:
        return (more, changed) if _helps(changed, current, part) else None
    for earlier in reversed(chosen):
        others = [other for other in more if other is not earlier]
        changed = with_remedies(fit, others)
        if changed is None or not _helps(changed, current, part):
            continue
        # If something else became larger, the two could replace each other forever.
        if all(changed.missing(need.part) <= current.missing(need.part) for need in changed.over):
            return others, changed
    return None


def _helps(changed: Fit, current: Fit, part: MemoryPart) -> bool:
    """Tell whether a part misses less than now, and not because the host misses more."""
    is_paid = part == "host" or changed.missing("host") <= current.missing("host")
    return is_paid and changed.missing(part) < current.missing(part)


def with_remedies(fit: Fit, chosen: Sequence[Remedy]) -> Fit | None:
    """Return how a run fits with these remedies; None if its settings and theirs do not go together."""
    values = {key: value for remedy in chosen for key, value in remedy.values.items()}
    dry = fit.dry
    try:
        dry = dry_run(with_values(dry.asked, values), num_ranks=dry.num_ranks, on_gpu=dry.is_on_gpu)
    except UserError:
        return None
    return fits(dry, fit.card, responses=fit.responses)


def remedies(fit: Fit, may_change: MayChange = any_key) -> Iterator[Remedy]:
    """Yield what is left to make a run smaller, what costs least time first; each may not go with its settings."""
    for remedy in _remedies(fit):
        if all(map(may_change, remedy.values)):
            yield remedy


def _remedies(fit: Fit) -> Iterator[Remedy]:
    dry, config = fit.dry, fit.dry.config
    train, model, rollout = config.train, config.model, config.rollout
    if dry.samples and rollout.batch_size > 1 and dry.memory.is_portable:
        yield Remedy({"rollout.batch_size": rollout.batch_size // 2}, "fewer responses side by side")
    if fit.shares is not None:
        yield Remedy({SHARE: fit.shares[1]}, "the engine's share of a card")
    longest, row = config.data.max_prompt_tokens + config.trained_tokens, train.micro_batch_tokens
    for tokens in dict.fromkeys((row * 3 // 4, row // 2, longest)):
        if longest <= tokens < row:
            yield Remedy({"train.micro_batch_tokens": tokens}, "shorter rows")
    if model.gradient_checkpointing is not True:
        yield Remedy({"model.gradient_checkpointing": True}, "activations are computed again")
    for stage in range(train.zero_stage + 1, 4):
        yield Remedy({"train.zero_stage": stage}, "more is divided among the ranks")
    if dry.samples:
        yield Remedy({"rollout.offload_optimizer": True}, "moments in host memory while responses are sampled")
    if dry.teacher and not config.algorithm.distillation.offload:
        yield Remedy({"algorithm.distillation.offload": True}, "the teacher in host memory while it does not score")
    if train.offload_device("offload_optimizer") == "none":
        yield Remedy({f"{_ZERO}.offload_optimizer.device": "cpu"}, "its moments in host memory")
    if model.gradient_checkpointing is True and not model.offload_activations:
        yield Remedy({"model.offload_activations": True}, "the layers' inputs in host memory")
    for size in (2, 4, 8):
        if train.sequence_parallel < size and dry.num_ranks % size == 0:
            yield Remedy({"train.sequence_parallel": size}, f"a row's tokens on {size} ranks")
    if model.lora is not None and train.offload_device("offload_param") == "none":
        keys = {"offload_param.device": "cpu", "offload_param.pin_memory": True}
        keys |= {"stage3_max_live_parameters": 600_000_000}
        values = {"train.zero_stage": 3} | {f"{_ZERO}.{key}": value for key, value in keys.items()}
        yield Remedy(values, "the learner's weights in host memory, brought layer by layer")
    if dry.samples and rollout.sampler in ("auto", "vllm"):
        cards = math.gcd(dry.num_ranks, fit.card.neighbours)
        for size in (2, 4, 8):
            if rollout.tensor_parallel < size and cards % size == 0:
                values = {"rollout.sampler": "vllm", "rollout.tensor_parallel": size}
                yield Remedy(values, f"an engine on {size} cards, which share its weights")
    if model.lora is None:
        yield Remedy({"model.lora.rank": 16}, "no gradients and moments of the model itself")
    tokens = rollout.max_tokens // 2
    if tokens >= _SHORTEST:
        key = "rollout.max_tokens" if dry.samples else "data.max_response_tokens"
        shorter = min(row, config.data.max_prompt_tokens + tokens)
        yield Remedy({key: tokens, "train.micro_batch_tokens": shorter}, "shorter responses, in shorter rows")
