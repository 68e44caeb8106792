"""The section `rollout`: how responses are sampled."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from vlm_rl.config.base import ConfigSection
from vlm_rl.config.engines import vllm_conflicts
from vlm_rl.config.names import is_server_address

Quantization = Literal["fp8"]
ENGINE_SHARE = 0.45  # what vLLM gets of a card on which the learner lives as well
LARGEST_ENGINE_SHARE = 0.85  # of a card without a learner; the rest is for what vLLM does not count
_LONGEST_WAIT = 3600.0  # for servers: half of distributed.COLLECTIVE_TIMEOUT


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
    replaced. null: no limit but ahead, which no token exceeds. Experimental on GPUs."""
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
    In the learner's process these also take the place of torch's softmax, mean and batched products. Needs a GPU, in
    the learner's process one from Hopper on, and sampler vllm or server. See docs/reliability.md. Experimental on
    GPUs."""
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
        yield from _conflicts_of_age(self)
        yield from _conflicts_of_servers(self)
        yield from vllm_conflicts(self.vllm)
        yield from _conflicts_of_engines(self)
        yield from _conflicts_of_drafts(self)
        yield from _conflicts_of_kept_ids(self)


def _conflicts_of_age(rollout: RolloutConfig) -> Iterator[str]:
    """Check what makes tokens old: responses that are carried over, and rollouts ahead of the learner."""
    if rollout.carry_over is not None and rollout.sampler == "server":
        yield (
            f"carry_over is {rollout.carry_over}, and sampler is server, which answers whole groups alone: leave "
            "carry_over out, or use an engine in this process"
        )
    if rollout.ahead and rollout.sampler != "server":
        yield (
            f"ahead is {rollout.ahead}, and sampler is {rollout.sampler}, which samples in the learner's process: "
            "set sampler to server, or leave ahead out"
        )
    if rollout.ahead and rollout.carry_over is not None:
        yield f"ahead is {rollout.ahead}, and carry_over is {rollout.carry_over}: leave one of them out"
    if rollout.max_age is not None and rollout.max_age >= max(rollout.ahead, 1):
        yield (
            f"max_age is {rollout.max_age}, and ahead is {rollout.ahead}: no token is older than ahead; lower "
            "max_age, or leave it out"
        )
    if rollout.carry_over is not None and rollout.tensor_parallel > 1:
        yield (
            f"carry_over is {rollout.carry_over}, and tensor_parallel is {rollout.tensor_parallel}: the ranks of an "
            "engine would stop at different responses; leave one of them out"
        )
    if rollout.carry_over is not None and rollout.replay_routing:
        yield (
            f"carry_over is {rollout.carry_over}, and replay_routing is true, which knows the routing of one "
            "rollout alone: leave one of them out"
        )


def _conflicts_of_servers(rollout: RolloutConfig) -> Iterator[str]:
    """Check the addresses of servers, how long a run waits for them, and what they do not do."""
    if bool(rollout.servers) != (rollout.sampler == "server"):
        yield (
            f"sampler is {rollout.sampler!r} and servers is {rollout.servers!r}: sampler: server needs addresses, "
            "and no other engine uses them; set sampler to server, or leave servers out (rollout.servers=[] in a "
            "resume)"
        )
    if rollout.offload_optimizer and rollout.sampler == "server":
        yield "offload_optimizer is true, and sampler is server: no engine shares the card; leave it out"
    if rollout.replay_routing and rollout.sampler == "server":
        yield "replay_routing is true, and sampler is server: servers do not return their routing; leave it out"
    if isinstance(rollout.servers, list):
        yield from (
            f"servers: {url!r} is not an address such as http://127.0.0.1:8000"
            for url in rollout.servers
            if not is_server_address(url)
        )
    if rollout.server_timeout > _LONGEST_WAIT:
        yield (
            f"server_timeout is {rollout.server_timeout:g}: the ranks wait for each other for two hours, so give at "
            f"most {_LONGEST_WAIT:g} s, and resume the run when servers are there"
        )


def _conflicts_of_engines(rollout: RolloutConfig) -> Iterator[str]:
    """Check what only some engines can do."""
    if rollout.batch_invariant and rollout.sampler not in ("vllm", "server"):
        yield (
            f"batch_invariant is true, and sampler is {rollout.sampler}: the kernels are vLLM's; set sampler to "
            "vllm or server"
        )
    if rollout.tensor_parallel > 1 and rollout.sampler not in ("vllm", "server"):
        yield (
            f"tensor_parallel is {rollout.tensor_parallel}, and sampler is {rollout.sampler}: only vLLM divides a "
            "model; set sampler to vllm or server"
        )
    if rollout.tensor_parallel > 1 and rollout.vllm.get("enable_expert_parallel"):
        yield (
            f"tensor_parallel is {rollout.tensor_parallel}, and vllm.enable_expert_parallel is true: the proof of a "
            "sync knows experts that are divided, not dealt out; leave it out"
        )
    if rollout.quantization and rollout.sampler not in ("vllm", "server"):
        yield (
            f"quantization is {rollout.quantization}, and sampler is {rollout.sampler}: only vLLM rounds weights; "
            "set sampler to vllm or server"
        )
    if rollout.quantization and rollout.max_gap is None:
        yield (
            f"quantization is {rollout.quantization}, and max_gap is null: its default is what rounding to bfloat16 "
            f"explains, and {rollout.quantization} is coarser; set max_gap, to begin with to 0.3, and then to "
            "three times what rollout/logprob_gap shows in the first steps"
        )


def _conflicts_of_drafts(rollout: RolloutConfig) -> Iterator[str]:
    """Check what is sampled with draft tokens."""
    if rollout.vllm.get("speculative_config") is not None:
        begin = "vllm.speculative_config is set, and"
        for key in ("top_k", "replay_routing"):
            if value := getattr(rollout, key):
                yield f"{begin} {key} is {value}, which was not tried with draft tokens: leave one of them out"
        if rollout.sampler == "server":
            yield (
                f"{begin} sampler is server: servers ban tokens by a logit bias, which vLLM does not take beside "
                "draft tokens; leave it out (null in a resume), or set sampler to vllm"
            )


def _conflicts_of_kept_ids(rollout: RolloutConfig) -> Iterator[str]:
    """Check truncated distributions, of which the learner needs the ids that were kept."""
    if rollout.top_p < 1 and not rollout.top_k:
        yield (
            f"top_p is {rollout.top_p}, and top_k is 0: the learner needs the ids that were kept of each token, "
            "which a top_k bounds; set top_k, for example to 64, or top_p to 1"
        )
    if not rollout.top_k:
        return
    begin = f"top_k is {rollout.top_k}, and"
    if rollout.sampler not in ("transformers", "vllm"):
        yield f"{begin} sampler is {rollout.sampler}: only transformers, and vllm on a GPU, tell what they kept"
    for key in ("carry_over", "replay_routing"):
        if value := getattr(rollout, key):
            yield f"{begin} {key} is {value}, which does not bring the kept ids along: leave one of them out"
