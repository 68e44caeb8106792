"""How fast a run is, and how much of a card it takes: metrics of every step, and a line before memory ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vlm_rl import devices
from vlm_rl.config import Config
from vlm_rl.distributed import all_gather, rank, world_size
from vlm_rl.learner.policy import Policy
from vlm_rl.model_files.routers import chosen_experts, num_experts
from vlm_rl.planning.dry_run import dry_run
from vlm_rl.planning.fits import gib
from vlm_rl.types import Group

FULL = 0.95  # of a card, above which a line says so
_LEARNER = ("image_features", "old_logprobs", "blind_logprobs", "reference_logprobs", "teacher_logprobs", "update")


class Speed:
    """Measures the steps of one run."""

    def __init__(self, policy: Policy, config: Config) -> None:
        """Count the policy, and on a GPU plan its memory.

        Args:
            policy: as it is trained.
            config: of the run, with model.gradient_checkpointing decided.
        """
        self._text = policy.model.config.get_text_config()
        self._a_token, self._a_sampled_token = _operations(policy)
        self._peak_rate = devices.peak_rate()
        self._planned = dry_run(config, num_ranks=world_size(), on_gpu=True).memory.update if devices.has_gpu() else 0
        self._peak = 0.0  # bytes that the last update allocated at most
        self._share = 0.0  # of the card that was taken then, the fullest rank's
        self._has_warned = False

    @contextmanager
    def update(self) -> Iterator[None]:
        """Take the peak of memory in a `with` block. Collective on GPUs."""
        if not devices.has_gpu():
            yield
            return
        devices.reset_peak_memory()
        yield
        self._peak, used = devices.peak_memory()
        self._share = max(all_gather(used / devices.gpu_memory()[1]))

    def metrics(
        self, groups: Sequence[Group], prompt_lengths: Mapping[str, int], timings: Mapping[str, float]
    ) -> dict[str, float]:
        """Return tokens a second of all ranks, MFU, and the memory of this rank, as far as they are known.

        Args:
            groups: of the step, of all ranks.
            prompt_lengths: tokens of each prompt, by problem.
            timings: the seconds of the step's phases, as Timings.metrics returns them.
        """
        prompts = [prompt_lengths[group.problem.id] for group in groups]
        responses = [group.sizes_G.tolist() for group in groups]
        sampled = sum(int(group.lengths_G.sum()) for group in groups)
        found: dict[str, float] = {}
        if (seconds := timings.get("timing/rollout", 0.0)) > 0:
            found["speed/rollout_tokens"] = sampled / seconds
        if (seconds := sum(timings.get(f"timing/{name}", 0.0) for name in _LEARNER)) > 0:
            found["speed/update_tokens"] = (sum(prompts) + sum(map(sum, responses))) / seconds
        if self._peak_rate is not None and (seconds := timings.get("timing/update", 0.0)) > 0:
            done = self.operations(prompts, responses, sampled=sampled)
            found["speed/mfu"] = done / (seconds * world_size() * self._peak_rate)
        if self._planned:
            found |= {
                "memory/peak_gib": self._peak / 2**30,
                "memory/peak_over_planned": self._peak / self._planned,
                "memory/card_share": self._share,
            }
        return found

    def operations(self, prompts: Sequence[int], responses: Sequence[Sequence[int]], *, sampled: int) -> float:
        """Return the useful operations of a step's update in the language model: prompts once, nothing twice.

        Two a weight and token forward, two for the input's gradient, two for the weight's where it is trained; twelve
        for each pair of tokens that attend and unit of width.

        Args:
            prompts: tokens of each prompt.
            responses: tokens of each of its responses, those that an episode observes included.
            sampled: tokens of all responses that the policy sampled, the only ones that the head reads.
        """
        pairs = sum(
            prompt**2 / 2 + sum(prompt * n + n**2 / 2 for n in lengths)
            for prompt, lengths in zip(prompts, responses, strict=True)
        )
        width = self._text.num_attention_heads * (
            getattr(self._text, "head_dim", None) or self._text.hidden_size // self._text.num_attention_heads
        )
        attention = 12 * self._text.num_hidden_layers * width * pairs
        tokens = sum(prompts) + sum(map(sum, responses))
        return self._a_token * tokens + self._a_sampled_token * sampled + attention

    def warning(self) -> str | None:
        """Return, once, a line that the card is almost full; None if it is not. Collective calls are not made."""
        if self._has_warned or self._share <= FULL or rank() != 0:
            return None
        self._has_warned = True
        return (
            f"memory: {self._share:.0%} of a card was taken in this update, {gib(self._peak)} by the learner, which "
            f"was planned with {gib(self._planned)}. Longer responses take more; before it ends, "
            "vlm-rl train FILE --dry-run --gpu-memory GB says what would take less"
        )


def _operations(policy: Policy) -> tuple[float, float]:
    """Return the operations of the language model's layers for each token, and of the head for a sampled one."""
    model: Any = policy.model
    text = model.config.get_text_config()
    experts = num_experts(text)
    layers = 0.0
    for name, parameter in model.get_decoder().layers.named_parameters():
        size = getattr(parameter, "ds_numel", parameter.numel())  # whole, where ZeRO 3 holds a part
        if experts and "experts" in name and "shared" not in name:
            size *= chosen_experts(text) / experts
        layers += (6 if parameter.requires_grad else 4) * size
    head = policy.head.weight
    return layers, (6 if head.requires_grad else 4) * getattr(head, "ds_numel", head.numel())
