"""Each factor of the mathematics, wrong."""

from __future__ import annotations

from tests.breaks import Break, table

TESTS = [
    *(f"tests/test_{name}.py" for name in ("advantages", "losses", "loss_facts", "hadw", "rewards", "metrics")),
    "tests/learner/test_policy.py",
]

FACTORS = table(
    "vlm_rl",
    TESTS,
    Break(
        "group_norm: no centre", "advantages.py", "rewards_PG - rewards_PG.mean(axis=1, keepdims=True)", "rewards_PG"
    ),
    Break("group_norm: variance for deviation", "advantages.py", "rewards_PG.std(axis=1", "rewards_PG.var(axis=1"),
    Break("group_norm: ddof swapped", "advantages.py", "ddof=ddof, keepdims", "ddof=1 - ddof, keepdims"),
    Break("leave_one_out: own reward in the mean", "advantages.py", "(num_responses - 1)\n", "num_responses\n"),
    Break(
        "equal rewards not recognised",
        "advantages.py",
        "np.where(degenerate_P1, 0.0, advantages_PG)",
        "advantages_PG",
    ),
    Break("token ratio: sign", "losses.py", "torch.exp(logp_K - old_logp_K)", "torch.exp(old_logp_K - logp_K)"),
    Break("sequence ratio: sum for mean", "losses.py", " / lengths_n.clamp(min=1)", ""),
    Break(
        "sequence ratio: value carries gradient",
        "losses.py",
        "(logp_K - old_logp_K).detach()",
        "(logp_K - old_logp_K)",
    ),
    Break("clip: max for min", "losses.py", "-torch.minimum(", "-torch.maximum("),
    Break("clip: sign", "losses.py", "return -torch.minimum(", "return torch.minimum("),
    Break(
        "clip: bounds swapped",
        "losses.py",
        "ratio_K.clamp(1 - low, 1 + high)\n",
        "ratio_K.clamp(1 - high, 1 + low)\n",
    ),
    Break("cispo: bound carries gradient", "losses.py", "-ratio_K.detach().clamp(", "-ratio_K.clamp("),
    Break("cispo: sign", "losses.py", "return -ratio_K.detach()", "return ratio_K.detach()"),
    Break(
        "sequence: not over N",
        "losses.py",
        "1.0 / (lengths_PG.size * np.maximum(lengths_PG, 1))",
        "1.0 / np.maximum(lengths_PG, 1)",
    ),
    Break(
        "token: mean of means", "losses.py", "1.0 / lengths_PG.sum())", "1.0 / (lengths_PG.size * lengths_PG.max()))"
    ),
    Break(
        "length_weighted: over tokens",
        "losses.py",
        "np.full(lengths_PG.shape, 1.0 / lengths_PG.size)",
        "np.full(lengths_PG.shape, 1.0 / lengths_PG.sum())",
    ),
    Break(
        "constant: longest for L_max",
        "losses.py",
        "(lengths_PG.size * max_tokens)",
        "(lengths_PG.size * lengths_PG.max())",
    ),
    Break("balanced: subset's own mean", "losses.py", "member_PG * size_P1 / (lengths_PG.size *", "member_PG / ("),
    Break(
        "balanced: A = 0 is negative",
        "losses.py",
        "np.sign(advantages_PG) == sign",
        "np.where(advantages_PG > 0, 1.0, -1.0) == sign",
    ),
    Break(
        "correction: sign",
        "losses.py",
        "(old_logp_K - sampler_logp_K).detach()",
        "(sampler_logp_K - old_logp_K).detach()",
    ),
    Break("correction: no cap", "losses.py", "torch.exp(gap_K).clamp(max=cap)", "torch.exp(gap_K)"),
    Break(
        "KL: other direction", "losses.py", "gap_K = reference_logp_K - logp_K", "gap_K = logp_K - reference_logp_K"
    ),
    Break(
        "KL: with the rule's weights",
        "losses.py",
        "kl_coef * inputs.mean_weight * kl_K.sum()",
        "kl_coef * (weight_K * kl_K).sum()",
    ),
    Break("entropy: sign", "losses.py", "loss - entropy_coef *", "loss + entropy_coef *"),
    Break(
        "clip fraction: signs swapped",
        "losses.py",
        "(advantage_K < 0) & (value_K < 1 - clip_low)",
        "(advantage_K > 0) & (value_K < 1 - clip_low)",
    ),
    Break("HA-DW: direction", "hadw.py", "np.exp(-np.sign(advantages_PG)", "np.exp(np.sign(advantages_PG)"),
    Break("HA-DW: no lambda", "hadw.py", "return scale * np.exp", "return np.exp"),
    Break(
        "HA-DW: all right counts as easy",
        "hadw.py",
        "(pass_rates_P1 == 0) | (pass_rates_P1 == 1)",
        "pass_rates_P1 == 0",
    ),
    Break(
        "overlong: grows from the limit", "rewards.py", "((max_tokens - buffer) - length)", "(max_tokens - length)"
    ),
    Break("overlong: not divided by the buffer", "rewards.py", " / buffer * factor", " * factor"),
    Break(
        "gradient mass: without length",
        "metrics.py",
        "mass = lengths * weights_PG.ravel()",
        "mass = weights_PG.ravel()",
    ),
    Break("length pull: not centred", "metrics.py", "(lengths_G - lengths_G.mean())", "lengths_G"),
    Break("log-probs: no temperature", "learner/policy.py", ".float().div_(temperature)", ".float()"),
    Break("log-probs: no ban", "learner/policy.py", 'logits_CV.index_fill_(1, banned, float("-inf"))', "logits_CV"),
    Break(
        "head: gradient of entropy",
        "learner/policy.py",
        "logp_CV.add_(entropy_C1)",
        "logp_CV.sub_(entropy_C1)",
    ),
)

BELIEF = table(
    "vlm_rl",
    ["tests/test_hadw.py", "tests/test_metrics.py"],
    Break("belief: variance for deviation", "hadw.py", "np.std(belief.history)", "np.var(belief.history)"),
    Break("belief: no eta", "hadw.py", "eta * np.std(", "np.std("),
    Break("belief: spread of accuracies", "hadw.py", "np.std(belief.history)", "np.std(belief.accuracies)"),
    Break(
        "belief: warm-up one step short",
        "hadw.py",
        "belief.num_steps < window",
        "belief.num_steps + 1 < window",
    ),
    Break("belief: warm-up one step long", "hadw.py", "belief.num_steps < window", "belief.num_steps <= window"),
    Break(
        "belief: history is never cut",
        "hadw.py",
        "(*belief.history, ability)[-window:]",
        "(*belief.history, ability)",
    ),
    Break("belief: history begins, not ends", "hadw.py", "accuracy)[-window:]", "accuracy)[:window]"),
    Break(
        "belief: moves the wrong way",
        "hadw.py",
        "(1 - step_size) * belief.ability + step_size * accuracy",
        "step_size * belief.ability + (1 - step_size) * accuracy",
    ),
    Break(
        "belief: no least step",
        "hadw.py",
        "MIN_STEP_SIZE, MAX_STEP_SIZE = 0.01",
        "MIN_STEP_SIZE, MAX_STEP_SIZE = 0.0",
    ),
    Break("belief: no bound on the step", "hadw.py", "MAX_STEP_SIZE = 0.01, 1.0", "MAX_STEP_SIZE = 0.01, 99.0"),
    Break("belief: hard is adaptive", "hadw.py", 'variant == "hard" or ', ""),
    Break(
        "belief: steps are not counted",
        "hadw.py",
        "num_steps=belief.num_steps + 1",
        "num_steps=belief.num_steps",
    ),
    Break(
        "metrics: weight of hard prompts is of easy ones",
        "metrics.py",
        "np.asarray(pass_rates_P)[:, None] < belief",
        "np.asarray(pass_rates_P)[:, None] >= belief",
    ),
    Break("metrics: no signal has a weight", "metrics.py", "advantages_PG != 0", "advantages_PG == advantages_PG"),
    Break(
        "metrics: clip fraction of responses",
        "metrics.py",
        'tokens = max(total.get("tokens", 0.0), 1.0)',
        "tokens = max(len(results), 1.0)",
    ),
    Break("metrics: region is one side", "metrics.py", "low + high", "high"),
    Break("metrics: kl of all steps", "metrics.py", 'total["kl"] / tokens', 'total["kl"] / len(results)'),
    Break("metrics: loss of all steps", "metrics.py", 'total["policy_loss"] / len(results)', 'total["policy_loss"]'),
    Break("metrics: sign gap reversed", "metrics.py", "positive - negative", "negative - positive"),
    Break("metrics: variation over the batch", "metrics.py", "lengths_PG.std(axis=1) /", "lengths_PG.std() /"),
)

WIRING = table(
    "vlm_rl",
    [
        "tests/test_hadw.py",
        *(
            f"tests/test_train.py::test_{name}"
            for name in (
                "advantages_are_the_groups_own",
                "metrics_agree_with_the_rollouts",
                "hadw_scales_the_advantages",
                "the_accuracy_of_a_batch_counts_what_dynamic_sampling_drops",
                "what_is_dropped_or_filtered_counts_no_token",
                "dynamic_sampling_keeps_mixed_groups_only",
                "dynamic_sampling_goes_on_when_nothing_is_left",
                "overlong_filtering_trains_on_no_truncated_response",
                "an_undecided_response_scores_nothing_or_leaves_its_group",
                "kl_is_to_the_model_that_the_run_began_with",
                "the_first_mini_batch_of_a_step_does_not_clip",
            )
        ),
    ],
    Break(
        "train: weight of difficulty is divided by", "train.py", "advantages_PG *= phi_PG", "advantages_PG /= phi_PG"
    ),
    Break(
        "train: difficulty from rewards, not verdicts",
        "train.py",
        "correct = [judged(group.rewards) for group",
        "correct = [[r.total > 0 for r in group.rewards] for group",
    ),
    Break("train: belief of the last round only", "train.py", "verdicts += correct", "verdicts = correct"),
    Break("train: belief is never moved", "train.py", "s.belief = update_belief(", "update_belief("),
    Break(
        "train: belief of kept groups",
        "train.py",
        "            verdicts += correct\n",
        "            verdicts += correct if len(set(correct)) > 1 else []\n",
    ),
    Break("train: keeps groups of one verdict", "train.py", "len(set(correct)) <= 1", "len(set(correct)) < 1"),
    Break("train: a dropped reward counts", "train.py", "math.nan if r.dropped else r.total", "r.total"),
    Break(
        "train: a dropped response has tokens",
        "train.py",
        "lengths_PG = np.where([[reward.dropped",
        "lengths_PG = np.where([[False and reward.dropped",
    ),
    Break("train: filters what stopped", "train.py", 'r.stop_reason == "length"', 'r.stop_reason != "length"'),
    Break("train: no old log-probs", "train.py", "if len(mini_batches) > 1:", "if len(mini_batches) > 99:"),
)

LEARNER = table(
    "vlm_rl",
    ["tests/learner/test_learner.py", "-k", "not all and not every"],
    Break("learner: averaged over ranks", "learner/learner.py", "loss * world_size()", "loss"),
    Break(
        "learner: averaged over rows", "learner/learner.py", "loss * world_size()", "loss * world_size() / len(rows)"
    ),
    Break(
        "learner: reference is the policy",
        "learner/learner.py",
        "logp_K, _ = reference.model(",
        "logp_K, _ = self.engine(",
    ),
    Break(
        "packing: a chunk's first advantage for all",
        "learner/packing.py",
        "groups[c.group].advantages_G[i]",
        "groups[c.group].advantages_G[0]",
    ),
    Break(
        "packing: a chunk's first weight for all",
        "learner/packing.py",
        "groups[c.group].weights_G[i]",
        "groups[c.group].weights_G[0]",
    ),
)

POINTWISE = table(
    "vlm_rl",
    ["tests/learner/test_lean_layers.py"],
    Break("norm: no epsilon", "learner/lean_layers.py", ".add_(epsilon)", ""),
    Break(
        "norm: rounded after the weight",
        "learner/lean_layers.py",
        "(x * rate).to(x.dtype) * weight",
        "(x * rate * weight)",
    ),
    Break("norm: mean added", "learner/lean_layers.py", "addcmul_(normal, mean, value=-1)", "addcmul_(normal, mean)"),
    Break("norm: mean without the weight", "learner/lean_layers.py", "product.mul_(weight).mean", "product.mean"),
    Break(
        "norm: weight's gradient of the input",
        "learner/lean_layers.py",
        "product = grad * normal",
        "product = grad * x",
    ),
    Break("norm: not replaced", "learner/lean_layers.py", '.endswith("RMSNorm")', '.endswith("Norm2")'),
    Break(
        "mlp: factors swapped",
        "learner/lean_layers.py",
        "mlp.gate_proj(x), mlp.up_proj(x)",
        "mlp.up_proj(x), mlp.gate_proj(x)",
    ),
    Break(
        "mlp: gradients swapped",
        "learner/lean_layers.py",
        "return through, silu(gate).mul_(grad)",
        "return silu(gate).mul_(grad), through",
    ),
    Break("mlp: not replaced", "learner/lean_layers.py", 'hasattr(module, "gate_proj")', 'hasattr(module, "gate")'),
)

BREAKS = (*FACTORS, *BELIEF, *WIRING, *LEARNER, *POINTWISE)
