"""The section `algorithm`: which rule trains, and what differs from its row in vlm_rl.algorithms."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from vlm_rl.config.base import ConfigSection, Fraction
from vlm_rl.config.distillation import DistillationConfig

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
    ebpo shrinks the baseline towards the mean reward of all steps; null: the algorithm's."""
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
    the more the image changes them (PGPO). Costs a forward pass without the image. null: the algorithm's.
    Experimental on GPUs."""
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
    """Leave out groups whose answers are all right or all wrong, and sample whole batches until the step is full;
    null: the algorithm's."""
    max_sampling_rounds: PositiveInt = 10
    """How many batches dynamic sampling may take for one step; DAPO's script has 10."""
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
    """Weight of the KL divergence to the frozen reference, model.path; with 0 no reference is loaded. Experimental
    on GPUs."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    perception_coef: NonNegativeFloat = 0.0
    """Weight of a bonus for the divergence of the policy from itself without the image (PAPO: 0.01 to 0.02). Costs a
    forward pass with blank images; 0: none. Experimental on GPUs."""
    distillation: DistillationConfig = DistillationConfig()
    mask_truncated: bool = False
    """Overlong filtering (DAPO): a response cut at rollout.max_tokens is rewarded but not trained on."""
    hadw: HadwConfig = HadwConfig()
