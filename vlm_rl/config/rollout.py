"""The section `rollout`: how responses are sampled."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from vlm_rl.config import conflicts
from vlm_rl.config.base import ConfigSection
from vlm_rl.config.engines import vllm_conflicts

Quantization = Literal["fp8"]
ENGINE_SHARE = 0.45  # what vLLM gets of a card on which the learner lives as well
LARGEST_ENGINE_SHARE = 0.85  # of a card without a learner; the rest is for what vLLM does not count


class RolloutConfig(ConfigSection):
    """How responses are sampled."""

    sampler: Literal["auto", "vllm", "transformers", "server"] = "auto"
    """The engine; auto: vllm where it is installed, else transformers. server: those of rollout.servers, which is
    experimental on GPUs."""
    servers: list[str] | str = []
    """The addresses of servers that `vlm-rl serve` has started, such as http://127.0.0.1:8000, or a file with one a
    line, which is read again before each sync. See docs/scaling.md. Experimental on GPUs."""
    server_token: str = "~/.cache/vlm_rl/server_token"
    """The file with the token that the servers ask for. `vlm-rl serve` writes it where it is missing."""
    server_timeout: PositiveFloat = 600.0
    """Seconds to wait while no server answers, at most 3600; then the run saves its state and ends with code 75."""
    prompts_per_step: PositiveInt = 128
    """P: prompts in a rollout batch, over all ranks."""
    responses_per_prompt: PositiveInt = 8
    """G: responses to each prompt."""
    max_tokens: PositiveInt = 4096
    """Longest response in tokens; L_max of the overlong penalty."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the learner's log-probs use it too."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely of the top_k tokens that together have this share of their probability; 1: from all
    of them. The learner's log-probs are then over what was kept. Needs a top_k."""
    top_k: NonNegativeInt = 0
    """Sample from this many most likely tokens; 0: from all. It bounds the ids that are kept of each token. Needs
    sampler transformers, or vllm on a GPU, where it is experimental. See docs/algorithms.md."""
    max_gap: PositiveFloat | None = None
    """The run stops, before the update, where |learner's log-prob - sampler's|, averaged over tokens, is larger.
    null: 0.001 for a float32 model, 0.1 for a bfloat16 one."""
    carry_over: float | None = Field(default=None, gt=0, lt=1)
    """Share of the groups in progress that a step waits for: it trains on these, always prompts_per_step, and the
    next step continues the others. With 0.75 and 96 prompts a step, 128 groups are in progress. null: a step waits
    for every response. See docs/performance.md."""
    ahead: NonNegativeInt = 0
    """k: servers sample the batches of the next k steps while a step trains, so that tokens may be k steps old. Needs
    sampler: server. 0: on policy. See docs/scaling.md. Experimental on GPUs."""
    max_age: NonNegativeInt | None = None
    """Largest age of a token, in rollout steps; must be below ahead. Groups with an older token are dropped and
    replaced. null: ahead, which no token exceeds. Experimental on GPUs."""
    batch_size: PositiveInt = 256
    """Responses that one engine, or one server, generates at the same time."""
    tensor_parallel: PositiveInt = 1
    """Ranks, or cards of a server, that hold one vLLM engine together, for a model that fits no single card. With the
    vllm sampler they are neighbouring ranks of one machine. See docs/scaling.md. Experimental on GPUs."""
    offload_optimizer: bool = False
    """Keep the optimizer's masters and moments in host memory while responses are sampled: the engine may then take a
    larger share of the card. Needs ZeRO 2 or 3."""
    batch_invariant: bool = False
    """Let vLLM compute a response the same whatever else is in its batch, by slower kernels (VLLM_BATCH_INVARIANT).
    In the learner's process these also take the place of torch's softmax, mean and batched products. Needs a GPU, and
    sampler vllm or server. See docs/reliability.md. Experimental on GPUs."""
    replay_routing: bool = False
    """In a mixture of experts, let the learner send each token to the experts that the sampler sent it to. See
    docs/models.md. Experimental on GPUs."""
    quantization: Quantization | None = None
    """fp8: the engine keeps the projections of the language model's attention and MLPs in 8 bits, and rounds their
    inputs too. The learner stays in bfloat16, and the importance ratio corrects for the difference, so max_gap must
    be given. Needs sampler vllm or server, and a GPU of compute capability 8.9 or later; on a CPU, model.dtype:
    bfloat16. null: all in model.dtype. See docs/performance.md. Experimental on GPUs."""
    vllm: dict[str, Any] = {}
    """Passed to vllm.LLM unchanged. Options that other keys decide are refused. On a GPU a model of at most 8 layers
    is not compiled, unless enforce_eager is false. speculative_config may draft tokens by n-grams, which changes no
    distribution (docs/performance.md); experimental on GPUs."""

    @property
    def spare_groups(self) -> int:
        """Return how many groups are in progress besides those that a step trains on."""
        return 0 if self.carry_over is None else ceil(self.prompts_per_step / self.carry_over) - self.prompts_per_step

    @property
    def oldest_age(self) -> int:
        """Return the bound on a token's age in rollout steps."""
        return self.ahead if self.max_age is None else self.max_age

    @property
    def mixes_versions(self) -> bool:
        """Tell whether a step may train on tokens that earlier weights sampled."""
        return self.carry_over is not None or self.ahead > 0

    def conflicts(self) -> Iterator[str]:
        yield from conflicts.of_age(self)
        yield from conflicts.of_servers(self)
        yield from vllm_conflicts(self.vllm)
        yield from conflicts.of_engines(self)
        yield from conflicts.of_drafts(self)
        yield from conflicts.of_kept_ids(self)
