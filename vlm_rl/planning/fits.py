"""Does a planned run fit on a card, and which settings would make it fit?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vlm_rl.config import ENGINE_SHARE, Config, with_overrides
from vlm_rl.errors import UserError
from vlm_rl.planning.dry_run import DryRun, dry_run

UPDATE_SHARE = 0.9  # of the free memory: the plan leaves out allocator overhead and communication buffers
ROLLOUT_SHARE = 0.95  # the engine keeps to its share by itself
_GIB = 2**30


def verdict(plan: DryRun, card: float) -> str:
    """Return whether a plan fits on cards of this size (bytes), and if not, what would: settings, or more ranks."""
    name, memory = f"a card with {card / 1e9:.0f} GB", plan.memory
    faults = misfits(plan, card)
    if not faults:
        engine = "" if memory.is_served else f", the engine's {memory.engine_weights / _GIB:.1f} of weights included"
        planned = f"{memory.update / _GIB:.1f} GiB in the update and {memory.rollout / _GIB:.1f} in rollouts{engine}"
        return f"fits on {name}: of {card / _GIB:.1f} GiB the plan takes {planned}"
    limits = f"{UPDATE_SHARE:.0%} of it in the update and {ROLLOUT_SHARE:.0%} in rollouts"
    lines = [f"does not fit on {name}: {'; '.join(faults)}. The card has {card / _GIB:.1f} GiB, for a plan {limits}."]
    if (settings := fitting_settings(plan, card)) is not None:
        lines += ["what would, on as many ranks:", *(f"  {setting}" for setting in settings)]
    elif ranks := [count for count, memory in plan.memory_by_ranks.items() if memory.update <= UPDATE_SHARE * card]:
        lines.append(f"more ranks would make the update fit: {min(ranks)}")
    else:
        lines.append("no single setting or number of ranks would: use a smaller model, model.lora, or larger cards")
    return "\n".join(lines)


def sft_verdict(plan: DryRun, card: float) -> str:
    """Return whether a step of `vlm-rl sft` fits on cards of this size (bytes), and if not, what makes it smaller."""
    planned, name = plan.memory.update, f"a card with {card / 1e9:.0f} GB"
    if planned <= UPDATE_SHARE * card:
        return f"fits on {name}: of {card / _GIB:.1f} GiB the plan takes {planned / _GIB:.1f}"
    lines = [
        f"does not fit on {name}: a step needs {planned / _GIB:.1f} GiB. The card has {card / _GIB:.1f} GiB, and a "
        f"plan may take {UPDATE_SHARE:.0%} of it. What makes it smaller:"
    ]
    lines += [f"  {setting}  # {effect}" for setting, effect in single_settings(plan.config, samples=False)]
    return "\n".join(lines)


def misfits(plan: DryRun, card: float) -> list[str]:
    """Return what needs more than a card (bytes) has: the update, the rollouts, or the engine's share in them."""
    memory, faults = plan.memory, []
    if memory.update > UPDATE_SHARE * card:
        faults.append(f"the update needs {memory.update / _GIB:.1f} GiB")
    if memory.is_served:
        if memory.rollout > ROLLOUT_SHARE * card:
            faults.append(f"the rollouts need {memory.rollout / _GIB:.1f} GiB")
        return faults
    least, most, share = _shares(plan, card)
    if least > most:
        needed = memory.kept + least * card
        faults.append(f"the rollouts need {needed / _GIB:.1f} GiB with the engine and one response")
    elif not least <= share <= most:
        faults.append(
            f"the engine's share of the card, {share:.2f} (rollout.vllm.gpu_memory_utilization), must be from "
            f"{least:.2f} to {most:.2f}"
        )
    return faults


def fitting_settings(plan: DryRun, card: float) -> list[str] | None:
    """Return few settings with which a run fits on cards of this size (bytes); None where none was found."""
    chosen: list[str] = []
    for setting, _ in smaller_settings(plan.config) if _needs_more_than_a_share(plan, card) else ():
        changed = _planned(plan, [*chosen, setting])
        if changed is None or not _is_smaller(changed, _planned(plan, chosen) or plan):
            continue
        chosen.append(setting)
        if not _needs_more_than_a_share(changed, card):
            break
    final = _planned(plan, chosen)
    if final is None or _needs_more_than_a_share(final, card):
        return None
    for setting in chosen[:-1]:  # what a later setting has made unnecessary
        fewer = [other for other in chosen if other != setting]
        if (changed := _planned(plan, fewer)) is not None and not _needs_more_than_a_share(changed, card):
            chosen, final = fewer, changed
    if misfits(final, card):
        least, most, _ = _shares(final, card)
        chosen.append(f"rollout.vllm.gpu_memory_utilization={(least + most) / 2:.2f}")
    return chosen


def single_settings(config: Config, *, samples: bool) -> list[tuple[str, str]]:
    """Return those of `smaller_settings` that go with a configuration by themselves; without samples, keys of sft."""
    found = [item for item in smaller_settings(config) if _goes_with(config, item[0])]
    if samples:
        return found
    found = [item for item in found if not item[0].startswith("rollout.")]
    return [*found, (f"data.max_response_tokens={config.rollout.max_tokens // 2}", "shorter responses")]


def _goes_with(config: Config, setting: str) -> bool:
    try:
        with_overrides(config, [setting])
    except UserError:
        return False
    return True


def smaller_settings(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (setting, effect) for what is left to make a run smaller, what costs least time first."""
    train, model, rollout = config.train, config.model, config.rollout
    longest = config.data.max_prompt_tokens + rollout.max_tokens
    if train.micro_batch_tokens > longest:
        yield f"train.micro_batch_tokens={longest}", f"shorter rows, now {train.micro_batch_tokens} tokens"
    if not model.gradient_checkpointing:
        yield "model.gradient_checkpointing=true", "activations are computed again"
    if train.zero_stage < 3 and not model.lora:
        yield f"train.zero_stage={train.zero_stage + 1}", "more is divided among the ranks"
    if train.offload_device("offload_optimizer") == "none" and not rollout.offload_optimizer:
        setting = "train.deepspeed={zero_optimization: {offload_optimizer: {device: cpu}}}"
        yield setting, "its moments in host memory"
        if train.zero_stage >= 2 and rollout.sampler != "server":
            yield "rollout.offload_optimizer=true", "moments in host memory while responses are drawn"
    if model.lora is None:
        yield "model.lora={rank: 16}", "no gradients and moments of the model itself"
    yield f"rollout.max_tokens={rollout.max_tokens // 2}", "shorter responses"


def engine_share(config: Config) -> float:
    """Return the share of a card that vLLM takes, weights and CUDA graphs included."""
    return config.rollout.vllm.get("gpu_memory_utilization", ENGINE_SHARE)


def _shares(plan: DryRun, card: float) -> tuple[float, float, float]:
    """Return the least and the largest share of a card that the engine may have, and the share that it gets."""
    memory = plan.memory
    response = plan.config.context_tokens * plan.kv_bytes_per_token
    least = (memory.engine_weights + response) / card
    return least, ROLLOUT_SHARE - memory.kept / card, engine_share(plan.config)


def _needs_more_than_a_share(plan: DryRun, card: float) -> bool:
    """Tell whether a plan does not fit, whatever share of the card its engine gets."""
    if plan.memory.is_served:
        return bool(misfits(plan, card))
    least, most, _ = _shares(plan, card)
    return plan.memory.update > UPDATE_SHARE * card or least > most


def _planned(plan: DryRun, settings: Sequence[str]) -> DryRun | None:
    """Return the plan with these settings; None where they do not go together."""
    try:
        return dry_run(with_overrides(plan.config, settings), num_ranks=plan.num_ranks)
    except UserError:
        return None


def _is_smaller(changed: DryRun, plan: DryRun) -> bool:
    return changed.memory.update < plan.memory.update or changed.memory.rollout < plan.memory.rollout
