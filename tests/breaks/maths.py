"""Each factor of the mathematics, wrong."""

from __future__ import annotations

from breaks import Break, table

TESTS = ("advantages", "losses", "loss_facts", "difficulty", "rewards", "diagnostics", "policy")

BREAKS = table(
    "vlm_rl",
    [f"tests/test_{name}.py" for name in TESTS],
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
    Break("HA-DW: direction", "difficulty.py", "np.exp(-np.sign(advantages_PG)", "np.exp(np.sign(advantages_PG)"),
    Break("HA-DW: no lambda", "difficulty.py", "return scale * np.exp", "return np.exp"),
    Break(
        "HA-DW: all right counts as easy",
        "difficulty.py",
        "(pass_rates_P1 == 0) | (pass_rates_P1 == 1)",
        "pass_rates_P1 == 0",
    ),
    Break(
        "overlong: grows from the limit", "rewards.py", "((max_tokens - buffer) - length)", "(max_tokens - length)"
    ),
    Break("overlong: not divided by the buffer", "rewards.py", " / buffer * factor", " * factor"),
    Break(
        "gradient mass: without length",
        "diagnostics.py",
        "mass = lengths * weights_PG.ravel()",
        "mass = weights_PG.ravel()",
    ),
    Break("length pull: not centred", "diagnostics.py", "(lengths_G - lengths_G.mean())", "lengths_G"),
    Break("log-probs: no temperature", "policy.py", ".float().div_(temperature)", ".float()"),
    Break("log-probs: no ban", "policy.py", 'logits_CV.index_fill_(1, banned, float("-inf"))', "logits_CV"),
    Break(
        "head: gradient of entropy",
        "policy.py",
        "logp_CV.add_(entropy_C1)",
        "logp_CV.sub_(entropy_C1)",
    ),
)
