"""The configuration of a training run, and its sections except for `model`, `data` and `reward`."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from vlm_rl.config.base import ConfigSection, Fraction, FractionBelowOne
from vlm_rl.config.distillation import DistillationConfig
from vlm_rl.config.engines import deepspeed_conflicts, vllm_conflicts
from vlm_rl.config.environments import EnvironmentConfig
from vlm_rl.config.evaluation import EvalConfig
from vlm_rl.config.names import is_server_address
from vlm_rl.config.policy import DataConfig, ModelConfig, ModelPart
from vlm_rl.config.rewards import RewardConfig
from vlm_rl.errors import near

Quantization = Literal["fp8"]
TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow", "swanlab"]
# What a resume may change; any other change would make it a different run.
_ZERO = "train.deepspeed.zero_optimization"
GRADIENT_KEEPING_KEYS = (  # where and in which parts the same gradient is computed
    "train.micro_batch_tokens",
    "train.sequence_parallel",
    "train.zero_stage",
    *(f"{_ZERO}.{key}" for key in ("offload_optimizer", "offload_param", "stage3_max_live_parameters")),
    "model.gradient_checkpointing",
    "model.layer_patches",
    "model.offload_activations",
    "algorithm.distillation.offload",
)
ENGINE_KEYS = (  # by what responses are drawn: others than without the change, of the same distribution
    "rollout.batch_invariant",
    "rollout.batch_size",
    "rollout.sampler",
    "rollout.tensor_parallel",
    *(
        f"rollout.vllm.{key}"
        for key in (
            "compilation_config",
            "cudagraph_capture_sizes",
            "enable_chunked_prefill",
            "enable_prefix_caching",
            "enforce_eager",
            "gpu_memory_utilization",
            "kv_cache_memory_bytes",
            "max_num_batched_tokens",
            "mm_processor_cache_gb",
        )
    ),
)
MUTABLE_KEYS = (
    "train.steps",
    "checkpoint.",
    "log.",
    "eval.",
    "rollout.max_gap",
    "rollout.offload_optimizer",
    "rollout.server",  # where the servers are, their token, and how long to wait for them
    "train.max_skipped_in_a_row",
    "reward.function_timeout",
    "reward.max_undecided",
    *(
        f"reward.{part}.{key}"
        for part in ("judge", "reward_model")
        for key in ("url", "api_key_env", "concurrency", "timeout", "retries", "cache")
    ),
    *GRADIENT_KEEPING_KEYS,
    *ENGINE_KEYS,
)

ENGINE_SHARE = 0.45  # what vLLM gets of a card on which the learner lives as well
LARGEST_ENGINE_SHARE = 0.85  # of a card without a learner; the rest is for what vLLM does not count
_LONGEST_WAIT = 3600.0  # for servers: half of distributed.COLLECTIVE_TIMEOUT

FractionInside = Annotated[float, Field(gt=0, lt=1)]


class HadwConfig(ConfigSection):
    """History-aware difficulty weighting; see docs/algorithms/hadw.md."""

    enabled: bool = False
    """Weight prompts by how difficult they are against the belief so far."""
    scale: PositiveFloat | None = None
    """lambda; null: 1.3 as in the paper, or 1.5 with published_code."""
    eta: PositiveFloat = 5.0
    """eta of the paper: scale of the belief's step size."""
    window: PositiveInt = 10
    """m of the paper: how many past beliefs determine how fast the belief moves."""
    variant: Literal["adaptive", "hard", "constant", "published_code"] = "adaptive"
    """adaptive: the belief moves by a step that follows the spread of past beliefs; hard: it is the mean accuracy of
    the last steps; constant: it stays at threshold, an ablation that knows no history; published_code: what the
    authors' code computes, from total rewards and with the present batch in the belief."""
    threshold: Fraction = 0.5
    """The belief of variant constant: prompts that are solved less often count as hard."""

    @property
    def applied_scale(self) -> float:
        """Return lambda: `scale`, or where it is null the paper's or that of the authors' code."""
        return self.scale or (1.5 if self.variant == "published_code" else 1.3)


class AlgorithmConfig(ConfigSection):
    """A named row of vlm_rl.algorithms, with any single factor overridden."""

    name: str = "luspo"
    """The row of vlm_rl.algorithms that sets what is null below; docs/algorithms.md describes each."""
    advantage: Literal["group_norm", "group_center", "leave_one_out", "gdpo", "ebpo"] | None = None
    """Baseline and scale of a response's reward within its group; gdpo normalises each part of the reward for itself,
    ebpo draws the baseline towards the rewards of all steps; null: the algorithm's."""
    gdpo_weights: dict[str, NonNegativeFloat] = {}
    """What each part of the reward counts in the advantage gdpo, by its name in the metrics; 1 where it is missing.
    The part's weight in reward.* cancels there."""
    length_bonus: NonNegativeFloat = 0.0
    """Largest addition to a positive advantage for being shorter than the group's positive responses; 0: none."""
    length_bonus_cap: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The shortening, as a share of their mean length, that earns the whole length_bonus."""
    ratio: Literal["token", "sequence"] | None = None
    """New over old probability, of each token or of the whole response; null: the algorithm's."""
    surrogate: Literal["clip", "cispo", "sapo"] | None = None
    """How the ratio is limited: PPO's clipped minimum, a clipped weight on the log-prob, or SAPO's soft gate; null:
    the algorithm's."""
    aggregation: (
        Literal["sequence", "token", "group_token", "length_weighted", "constant", "variance", "balanced"] | None
    ) = None
    """How tokens are weighted in the batch's loss: token is one mean over the mini-batch, group_token a mean over the
    tokens of each group; null: the algorithm's."""
    credit: Literal["uniform", "top_visual", "visual"] | None = None
    """What a token counts inside its response: all the same, only those that the image changes most (VPPO), or more
    the more the image changes them (PGPO). Costs a forward pass without the image. null: the algorithm's."""
    blind_image: Literal["blank", "noise", "masked"] = "blank"
    """What takes the image's place in that pass, in its size: the mean colour, noise, or the image with half of its
    patches in the mean colour, chosen at random once for each problem."""
    credit_share: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Share of a response's tokens that the credit top_visual keeps."""
    credit_floor: Fraction = 0.9
    """Smallest factor that top_visual gives a response's advantage; 1 gives all the same."""
    credit_threshold: FractionInside = 0.4
    """tau of the credit visual: tokens above it gain weight, the others lose it."""
    length_exponent: Fraction = 0.75
    """a of the aggregation variance: a token weighs its response's length to the power of -a. 0 is constant, 1 is
    sequence up to a factor; VL Norm has 0.75 for mathematics and 1 for countdown."""
    clip_low: NonNegativeFloat | None = None
    """The ratio is clipped below 1 - clip_low; null: the algorithm's."""
    clip_high: NonNegativeFloat | None = None
    """The ratio is clipped above 1 + clip_high; null: the algorithm's."""
    clip_dual: PositiveFloat | None = None
    """Largest ratio of tokens with a negative advantage, for the surrogate clip; null: none. verl calls it
    clip_ratio_c, TRL delta."""
    sapo_temperature_pos: PositiveFloat = 1.0
    """Temperature of the surrogate sapo where the advantage is positive."""
    sapo_temperature_neg: PositiveFloat = 1.05
    """Temperature of the surrogate sapo elsewhere; larger fades sooner."""
    dynamic_sampling: bool | None = None
    """Leave out groups whose answers are all right or all wrong, and draw whole batches until the step is full; null:
    the algorithm's."""
    max_sampling_rounds: PositiveInt = 10
    """How many batches dynamic sampling may draw for one step; DAPO's script has 10."""
    std_ddof: Literal[0, 1] = 1
    """Degrees of freedom of the group's standard deviation."""
    correction_cap: PositiveFloat = 2.0
    """Cap of the truncated importance correction for the gap between sampler and learner."""
    rejection: Literal["token", "sequence", "geometric"] | None = None
    """Leave out what learner and sampler see too differently: tokens by their ratio, or responses by the product of
    their tokens' ratios (sequence) or the geometric mean of these. null: nothing. See docs/algorithms.md."""
    rejection_min: Fraction = 0.0
    """The smallest ratio of learner and sampler that trains. verl has the reciprocal of the largest, TRL none."""
    rejection_max: Annotated[float, Field(ge=1)] = 3.0
    """The largest; TRL's default for sequences is 3."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL divergence to the frozen reference, model.path; with 0 no reference is loaded."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    perception_coef: NonNegativeFloat = 0.0
    """Weight of a bonus for the divergence of the policy from itself without the image (PAPO: 0.01 to 0.02). Costs a
    forward pass with blank images; 0: none."""
    distillation: DistillationConfig = DistillationConfig()
    mask_truncated: bool = False
    """Overlong filtering (DAPO): a response cut at rollout.max_tokens is rewarded but not trained on."""
    hadw: HadwConfig = HadwConfig()


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
    """Draw from the most likely of the top_k tokens that together have this share of their probability; 1: from all
    of them. The learner's log-probs are then over what was kept. Needs a top_k."""
    top_k: NonNegativeInt = 0
    """Draw from so many most likely tokens; 0: from all. It bounds the ids that are kept of each token. Needs sampler
    transformers, or vllm on a GPU, where it is experimental. See docs/algorithms.md."""
    max_gap: PositiveFloat | None = None
    """The run stops, before the update, where |learner's log-prob - sampler's|, averaged over tokens, is larger.
    null: 0.001 for a float32 model, 0.1 for a bfloat16 one."""
    carry_over: float | None = Field(default=None, gt=0, lt=1)
    """Share of the groups in progress that a step waits for: it trains on these, always prompts_per_step, and the
    next step draws the others on. With 0.75 and 96 prompts a step, 128 groups are in progress. null: a step waits
    for every response. See docs/performance.md."""
    ahead: NonNegativeInt = 0
    """k: servers draw the batches of the next k steps while a step trains, so that tokens may be k steps old. Needs
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
    """Keep the optimizer's masters and moments in host memory while responses are drawn: the engine may then take a
    larger share of the card. Needs ZeRO 2 or 3."""
    batch_invariant: bool = False
    """Let vLLM compute a response the same whatever is drawn beside it, by slower kernels (VLLM_BATCH_INVARIANT). In
    the learner's process these also take the place of torch's softmax, mean and batched products. Needs a GPU, and
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
        """Tell whether a step may train on tokens that earlier weights drew."""
        return self.carry_over is not None or self.ahead > 0

    def conflicts(self) -> Iterator[str]:
        if self.carry_over is not None and self.sampler == "server":
            yield (
                f"carry_over is {self.carry_over}, and sampler is server, which answers whole groups alone: leave "
                "carry_over out, or use an engine in this process"
            )
        if self.ahead and self.sampler != "server":
            yield (
                f"ahead is {self.ahead}, and sampler is {self.sampler}, which draws in the learner's process: set "
                "sampler to server, or leave ahead out"
            )
        if self.ahead and self.carry_over is not None:
            yield f"ahead is {self.ahead}, and carry_over is {self.carry_over}: leave one of them out"
        if self.max_age is not None and self.max_age >= max(self.ahead, 1):
            yield (
                f"max_age is {self.max_age}, and ahead is {self.ahead}: no token is older than ahead; lower max_age, "
                "or leave it out"
            )
        if self.carry_over is not None and self.tensor_parallel > 1:
            yield (
                f"carry_over is {self.carry_over}, and tensor_parallel is {self.tensor_parallel}: the ranks of an "
                "engine would stop at different responses; leave one of them out"
            )
        if self.carry_over is not None and self.replay_routing:
            yield (
                f"carry_over is {self.carry_over}, and replay_routing is true, which knows the routing of one "
                "rollout alone: leave one of them out"
            )
        if bool(self.servers) != (self.sampler == "server"):
            yield (
                f"sampler is {self.sampler!r} and servers is {self.servers!r}: sampler: server needs addresses, "
                "and no other engine uses them"
            )
        yield from vllm_conflicts(self.vllm)
        if self.offload_optimizer and self.sampler == "server":
            yield "offload_optimizer is true, and sampler is server: no engine shares the card; leave it out"
        if self.batch_invariant and self.sampler not in ("vllm", "server"):
            yield (
                f"batch_invariant is true, and sampler is {self.sampler}: the kernels are vLLM's; set sampler to "
                "vllm or server"
            )
        if self.tensor_parallel > 1 and self.sampler not in ("vllm", "server"):
            yield (
                f"tensor_parallel is {self.tensor_parallel}, and sampler is {self.sampler}: only vLLM divides a "
                "model; set sampler to vllm or server"
            )
        if self.tensor_parallel > 1 and self.vllm.get("enable_expert_parallel"):
            yield (
                f"tensor_parallel is {self.tensor_parallel}, and vllm.enable_expert_parallel is true: the proof of a "
                "sync knows experts that are divided, not dealt out; leave it out"
            )
        if self.quantization and self.sampler not in ("vllm", "server"):
            yield (
                f"quantization is {self.quantization}, and sampler is {self.sampler}: only vLLM rounds weights; set "
                "sampler to vllm or server"
            )
        if self.quantization and self.max_gap is None:
            yield (
                f"quantization is {self.quantization}, and max_gap is null: its default is what rounding to bfloat16 "
                f"explains, and {self.quantization} is coarser; set max_gap, to begin with to 0.3, and then to "
                "three times what rollout/logprob_gap shows in the first steps"
            )
        if self.replay_routing and self.sampler == "server":
            yield "replay_routing is true, and sampler is server: servers do not return their routing; leave it out"
        if self.vllm.get("speculative_config") is not None:
            begin = "vllm.speculative_config is set, and"
            for key in ("top_k", "replay_routing"):
                if value := getattr(self, key):
                    yield f"{begin} {key} is {value}, which was not tried with draft tokens: leave one of them out"
            if self.sampler == "server":
                yield (
                    f"{begin} sampler is server: servers ban tokens by a logit bias, which vLLM does not take beside "
                    "draft tokens; leave it out, or set sampler to vllm"
                )
        if isinstance(self.servers, list):
            yield from (
                f"servers: {url!r} is not an address such as http://127.0.0.1:8000"
                for url in self.servers
                if not is_server_address(url)
            )
        if self.server_timeout > _LONGEST_WAIT:
            yield (
                f"server_timeout is {self.server_timeout:g}: the ranks wait for each other for two hours, so give at "
                f"most {_LONGEST_WAIT:g} s, and resume the run when servers are there"
            )
        if self.top_p < 1 and not self.top_k:
            yield (
                f"top_p is {self.top_p}, and top_k is 0: the learner needs the ids that were kept of each token, "
                "which a top_k bounds; set top_k, for example to 64, or top_p to 1"
            )
        if not self.top_k:
            return
        begin = f"top_k is {self.top_k}, and"
        if self.sampler not in ("transformers", "vllm"):
            yield f"{begin} sampler is {self.sampler}: only transformers, and vllm on a GPU, tell what they kept"
        for key in ("carry_over", "replay_routing"):
            if value := getattr(self, key):
                yield f"{begin} {key} is {value}, which does not bring the kept ids along: leave one of them out"


class TrainConfig(ConfigSection):
    """Optimizer steps, their batches, and DeepSpeed."""

    steps: PositiveInt = 100
    """Rollout steps; each takes prompts_per_step / mini_batch_prompts optimizer steps."""
    mini_batch_prompts: PositiveInt = 16
    """Prompts of one optimizer step, over all ranks; at most rollout.prompts_per_step."""
    micro_batch_tokens: PositiveInt = 16_384
    """Most tokens in one packed row; a group's prompt counts once."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW or SGD."""
    lr: PositiveFloat = 1e-6
    """Learning rate after the warm-up."""
    lr_by_part: dict[ModelPart, NonNegativeFloat] = {}
    """Learning rates of single parts of the model, named as in model.freeze; the others have lr."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    warmup_rollout_steps: NonNegativeInt = 0
    """The same in rollout steps, in place of warmup_steps: all optimizer steps of so many. The LUSPO paper has 20."""
    schedule: Literal["constant", "cosine"] = "constant"
    """The learning rate after the warm-up: constant, or falling to 0 along a cosine until the last step."""
    betas: tuple[FractionBelowOne, FractionBelowOne] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    grad_clip: PositiveFloat = 1.0
    """Largest norm of a gradient; a larger one is scaled down to it."""
    fixed_grad_norm: PositiveFloat | None = None
    """Rescale every gradient to this norm instead of clipping, to compare rules whose losses differ in scale."""
    old_logprobs: Literal["learner", "sampler"] = "learner"
    """The old log-probs of the ratio. learner: the learner's at the weights that sampled, those of the first
    mini-batch from its own forward pass. sampler: the engine's, which saves a pass over the other mini-batches and
    puts the engine's noise into the ratio; the gap is then measured on the first mini-batch. See
    docs/algorithms.md."""
    max_skipped_in_a_row: PositiveInt = 5
    """The run aborts after this many optimizer steps in a row that the gradient guard refused."""
    start_from: str | None = None
    """A checkpoint of a different run, RUN, RUN/60 or RUN/best, whose weights and optimizer the run begins with.
    Steps, belief and order of prompts begin anew. `--start-from RUN/60` sets it. model.path stays the KL penalty's
    reference."""
    sequence_parallel: PositiveInt = 1
    """So many neighbouring ranks compute one packed row together: each has a part of its tokens, and in attention a
    part of the heads, whose number this must divide (docs/scaling.md). Experimental on GPUs."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """DeepSpeed's ZeRO: 1 divides the optimizer's state over the ranks, 2 the gradients too, 3 the weights too. 3
    is experimental on GPUs."""
    deepspeed: dict[str, Any] = {}
    """Merged over the DeepSpeed configuration that the learner builds. Keys that others decide are refused."""

    def warmup_updates(self, updates_per_step: int) -> int:
        """Return the optimizer steps of warm-up, where a rollout step takes so many."""
        return self.warmup_rollout_steps * updates_per_step or self.warmup_steps

    def conflicts(self) -> Iterator[str]:
        yield from deepspeed_conflicts(self.deepspeed)
        if self.warmup_steps and self.warmup_rollout_steps:
            yield (
                f"warmup_steps is {self.warmup_steps}, and warmup_rollout_steps is {self.warmup_rollout_steps}: "
                "leave one of them out"
            )
        if self.zero_stage < 2 and self.offload_device("offload_optimizer") != "none":
            yield (
                f"zero_stage is {self.zero_stage}, and deepspeed.zero_optimization.offload_optimizer is set: there "
                "DeepSpeed sums the gradients of rows in bfloat16, or moves nothing; set zero_stage=3, or 2"
            )

    def offload_device(self, what: Literal["offload_optimizer", "offload_param"]) -> str:
        """Return where DeepSpeed keeps optimizer or weights all the time: none, cpu or nvme."""
        zero = self.deepspeed.get("zero_optimization")
        options = zero.get(what) if isinstance(zero, dict) else None
        return options.get("device", "none") if isinstance(options, dict) else "none"


class CheckpointConfig(ConfigSection):
    """When checkpoints are written, and which are kept."""

    every: PositiveInt = 50
    """Rollout steps between checkpoints; the last step is always saved."""
    minutes: NonNegativeFloat = 30.0
    """Save also after the first step that ends so long after the last save; 0: only every so many steps."""
    keep_best: bool = True
    """Save the step of an evaluation that is the best so far on the first set of data.eval. RUN/best names the best
    evaluated step that is saved; it is kept either way."""
    keep_last: PositiveInt = 2
    """How many of the newest checkpoints are kept. The disk needs room for one more, while it is written."""
    keep_every: NonNegativeInt = 0
    """Also keep each step that is a multiple of this, permanently; 0 keeps none."""
    async_save: bool = False
    """Write checkpoints while the training continues; each rank holds a copy of what it writes in host memory."""


class TrackersConfig(ConfigSection):
    """What is logged besides metrics.jsonl (docs/trackers.md)."""

    trackers: list[TrackerName] = []
    """Where metrics and samples are also sent."""
    project: str = Field(default="vlm-rl", min_length=1)
    """The trackers' project; MLflow calls it an experiment."""
    group: str | None = None
    """The trackers' group of runs, e.g. the seeds of one study; null: none."""
    tags: list[str] = []
    """The trackers' tags of the run."""
    stall_minutes: NonNegativeFloat = 30.0
    """Where no rank has made progress for so long (sampled a token, computed a row, written a file), each writes
    its Python stacks and its last collective into log.txt; after the same time again the run ends with code 79. 0:
    off. See docs/reliability.md."""


class LogConfig(TrackersConfig):
    """What is shown and logged besides metrics.jsonl."""

    samples_every: NonNegativeInt = 10
    """Rollout steps between tables of sample responses, in the terminal and in trackers; 0: none."""


class Config(ConfigSection):
    """The configuration of a run."""

    seed: NonNegativeInt = 0
    """Random seed of the order of prompts and of the sampling."""
    out: str
    """The run directory."""
    model: ModelConfig
    data: DataConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @property
    def response_tokens(self) -> int:
        """Return the most tokens of a response, observed ones included, in training and in its evaluations."""
        sampled = max(self.rollout.max_tokens, (self.eval.max_tokens or 0) if self.eval.every else 0)
        return sampled + self.observed_tokens

    @property
    def observed_tokens(self) -> int:
        """Return the most tokens that an environment puts between the turns of a response."""
        return self.environment.max_observed_tokens if self.environment.name else 0

    @property
    def trained_tokens(self) -> int:
        """Return the most tokens of a response that is trained on, observed ones included."""
        return self.rollout.max_tokens + self.observed_tokens

    @property
    def context_tokens(self) -> int:
        """Return the most tokens of a prompt and its response together."""
        return self.data.max_prompt_tokens + self.response_tokens

    def shorter_rows(self, tokens: int) -> int | None:
        """Return half the tokens of a row, at least those of a longest response; None where that is no less."""
        return halved(tokens, self.trained_tokens)

    def conflicts(self) -> Iterator[str]:
        yield from conflicts_of_environment(self.environment, self.rollout, self.data)
        lora = self.model.lora
        if lora is not None and lora.sync == "adapter" and self.rollout.sampler not in ("auto", "vllm"):
            yield (
                f"model.lora.sync is adapter, and rollout.sampler is {self.rollout.sampler}, which takes merged "
                "weights alone: use the vllm sampler, or model.lora.sync=merged"
            )
        if lora is not None and lora.sync == "adapter" and self.rollout.quantization:
            yield (
                f"model.lora.sync is adapter, and rollout.quantization is {self.rollout.quantization}: vLLM would "
                "add the adapter to rounded weights, which are not the learner's base; set model.lora.sync=merged"
            )
        if self.rollout.quantization and self.model.dtype == "float32":
            yield (
                f"rollout.quantization is {self.rollout.quantization}, and model.dtype is float32, which vLLM does "
                "not round: set model.dtype=bfloat16"
            )
        if lora is not None and lora.sync == "adapter" and self.rollout.tensor_parallel > 1:
            yield (
                f"model.lora.sync is adapter, and rollout.tensor_parallel is {self.rollout.tensor_parallel}: an "
                "engine on several ranks takes merged weights alone; set model.lora.sync=merged"
            )
        yield from conflicts_of_4bit(self.model, self.train)
        yield from conflicts_of_sequence_parallel(self.model, self.train)
        known = [Path(path).name for path in self.data.eval]
        for name in sorted(self.eval.by_set.keys() - {*known}) if known else ():
            hint = near(name, known, otherwise=f"it has {', '.join(known)}")
            yield f"eval.by_set.{name}: data.eval has no set of this name; {hint}"
        if self.algorithm.distillation.servers:
            if (t := self.rollout.temperature) != 1:
                yield (
                    f"rollout.temperature is {t:g}, and algorithm.distillation.servers are given, which score at 1: "
                    "set it to 1, or let a teacher in this process score"
                )
            if (size := self.train.sequence_parallel) > 1:
                yield (
                    f"train.sequence_parallel is {size}, and algorithm.distillation.servers are given: each rank of "
                    "a row would ask for the same scores and might get others; set it to 1, or let a teacher in this "
                    "process score"
                )
            if self.environment.name is not None:
                yield (
                    f"environment.name is {self.environment.name}, and algorithm.distillation.servers are given, "
                    "which score responses without observations: let a teacher in this process score"
                )
        if self.rollout.top_k:
            others = {
                "model.fused_head": self.model.fused_head,
                "algorithm.distillation.top_k": self.algorithm.distillation.top_k,
                "environment.name": self.environment.name,
            }
            for key, value in others.items():
                if value:
                    yield (
                        f"rollout.top_k is {self.rollout.top_k}, and {key} is {value}: not built for log-probs over "
                        "kept ids; leave one of them out"
                    )
        if self.model.fused_head and self.algorithm.distillation.top_k:
            yield (
                f"model.fused_head is true, and algorithm.distillation.top_k is {self.algorithm.distillation.top_k}: "
                "the kernels compute the log-probs of one id a token; leave one of them out"
            )
        if self.rollout.offload_optimizer:
            if self.train.zero_stage < 2:
                yield (
                    f"rollout.offload_optimizer is true, and train.zero_stage is {self.train.zero_stage}: only the "
                    "optimizers of ZeRO 2 and 3 can be moved; set train.zero_stage=2, or leave it out"
                )
            for key in ("offload_optimizer", "offload_param"):
                if (device := self.train.offload_device(key)) != "none":
                    yield (
                        f"rollout.offload_optimizer is true, and train.deepspeed.zero_optimization.{key}.device is "
                        f"{device}: DeepSpeed keeps it there all the time; leave one of them out"
                    )
        prompts, mini = self.rollout.prompts_per_step, self.train.mini_batch_prompts
        if mini > prompts:
            yield (
                f"train.mini_batch_prompts ({mini}) is above rollout.prompts_per_step ({prompts}): "
                "a mini-batch is a part of the rollout batch; lower the first or raise the second"
            )
        if self.train.old_logprobs == "sampler":
            if self.algorithm.rejection is not None:
                yield (
                    f"train.old_logprobs is sampler, and algorithm.rejection is {self.algorithm.rejection}: the "
                    "learner's own log-probs, which it compares, are not computed; use train.old_logprobs=learner"
                )
            if self.rollout.quantization:
                yield (
                    f"train.old_logprobs is sampler, and rollout.quantization is {self.rollout.quantization}: the "
                    "truncated importance correction, which stands for the rounding, needs the learner's own "
                    "log-probs; use train.old_logprobs=learner"
                )
            for key in ("carry_over", "ahead"):
                if value := getattr(self.rollout, key):
                    yield (
                        f"train.old_logprobs is sampler, and rollout.{key} is {value}: the sampler's log-probs of "
                        "older tokens are those of the weights that drew them, and the ratio would be clipped by "
                        "their age; use train.old_logprobs=learner"
                    )
        row = self.trained_tokens
        if self.train.micro_batch_tokens < row:
            of_what = (
                "rollout.max_tokens + environment.max_observed_tokens"
                if self.observed_tokens
                else "rollout.max_tokens"
            )
            yield (
                f"train.micro_batch_tokens ({self.train.micro_batch_tokens}) is below {of_what} ({row}): "
                "a response is never split, so a packed row must hold the longest one"
            )
        if self.reward.overlong_buffer > self.rollout.max_tokens:
            yield (
                f"reward.overlong_buffer ({self.reward.overlong_buffer}) is above rollout.max_tokens "
                f"({self.rollout.max_tokens}): every response would be penalised"
            )
        if self.data.eval and "every" not in self.eval.model_fields_set:
            yield (
                f"data.eval names {', '.join(self.data.eval)}, and eval.every is not given, so that nothing would be "
                "evaluated: set eval.every to a number of rollout steps, or to 0 to leave it off"
            )


def conflicts_of_environment(
    environment: EnvironmentConfig, rollout: RolloutConfig, data: DataConfig
) -> Iterator[str]:
    """Yield a message for what is not built for episodes, and for pixels that the engine would resize again."""
    if environment.name is None:
        return
    unfit = {
        "carry_over": "which continues a response token by token, not turn by turn",
        "ahead": "whose responses may hold tokens of several weights",
        "replay_routing": "which has no routing of observed tokens",
    }
    begin = f"environment.name is {environment.name}, and rollout"
    for key, why in unfit.items():
        if value := getattr(rollout, key):
            yield f"{begin}.{key} is {value}, {why}: leave one of them out"
    if rollout.tensor_parallel > 1 and rollout.sampler != "server":
        yield (
            f"{begin}.tensor_parallel is {rollout.tensor_parallel}: the ranks of an engine would be answered at "
            "different times; use rollout.sampler=server, or one rank"
        )
    if (low := environment.min_pixels or data.min_pixels) > (high := environment.max_pixels or data.max_pixels):
        yield f"environment.min_pixels ({low}) is above its max_pixels ({high}); lower the first or raise the second"
    if low < data.min_pixels or high > data.max_pixels:
        yield (
            f"environment.min_pixels and max_pixels ({low} to {high}) go beyond data.min_pixels and data.max_pixels "
            f"({data.min_pixels} to {data.max_pixels}), which the engine keeps images to: stay inside"
        )


def halved(tokens: int, least: int) -> int | None:
    """Return half of the tokens, at least so many; None where that is no less."""
    half = max(tokens // 2, least)
    return half if half < tokens else None


def conflicts_of_sequence_parallel(model: ModelConfig, train: TrainConfig) -> Iterator[str]:
    """Yield a message where the tokens of padded rows would be divided over ranks."""
    if train.sequence_parallel > 1 and model.rows == "padded":
        yield (
            f"train.sequence_parallel is {train.sequence_parallel}, and model.rows is padded: only packed rows, "
            "whose attention is ours, are divided; leave one of them out"
        )


def conflicts_of_4bit(model: ModelConfig, train: TrainConfig) -> Iterator[str]:
    """Yield a message where 4-bit weights meet a stage of ZeRO that cannot divide them."""
    if model.lora is not None and model.lora.load_in_4bit and train.zero_stage == 3:
        yield (
            "model.lora.load_in_4bit is true, and train.zero_stage is 3, which cannot divide packed weights: use "
            "stage 2"
        )
