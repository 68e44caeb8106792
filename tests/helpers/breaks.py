# ruff: noqa: E501  # one break, one line
"""Break one line of the mathematics at a time, and see whether its tests notice: `python -m tests.helpers.breaks`.

Each row of BREAKS replaces a line by a wrong one: a sign, a denominator, a bound, a split. Heavy imports happen once.
A child process per break loads the broken module and runs its tests up to the first failure. `--part 3/6` takes every
sixth break, from the third. `make mutate` does the same for every expression of a module and takes longer.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


class Break(NamedTuple):
    name: str
    module: str  # of vlm_rl
    right: str
    wrong: str
    tests: str  # what pytest is given


LOSSES, SPLIT = "tests/test_losses.py", "tests/test_losses.py::test_a_split_into_micro_batches_adds_up"
FACTS, BATCH = "tests/test_loss_facts.py", "tests/test_batch_advantages.py"
CREDIT = "tests/test_credit.py"
TEACHER = "tests/test_distillation.py"
TOKEN_MEANS = "tests/test_losses.py::test_kl_and_entropy_are_token_means_under_every_rule"
ROWS, TURNS = "tests/learner/test_episode_rows.py", "tests/samplers/test_episode_batch.py"
BREAKS = (
    Break("advantage: not centred", "advantages", "rewards_PG - rewards_PG.mean(", "rewards_PG + 0 * rewards_PG.mean(", "tests/test_advantages.py"),
    Break("advantage: variance for deviation", "advantages", "rewards_PG.std(axis=1", "rewards_PG.var(axis=1", "tests/test_advantages.py"),
    Break("advantage: own reward in the mean", "advantages", "/ (num_responses - 1)", "/ num_responses", "tests/test_advantages.py"),
    Break("gdpo: parts summed first", "batch_advantages", "for part_PG in parts_KPG]", "for part_PG in parts_KPG.sum(0, keepdims=True).repeat(len(parts_KPG), 0)]", BATCH),
    Break("gdpo: not whitened", "batch_advantages", "np.nan_to_num((values_PG - there.mean()) / (there.std(ddof=ddof) + EPSILON), nan=0.0)", "np.nan_to_num(values_PG - there.mean(), nan=0.0)", BATCH),
    Break("ebpo: shrinks the other way", "batch_advantages", "(1 - s) * rewards_G[there_G].mean() + s * history", "s * rewards_G[there_G].mean() + (1 - s) * history", BATCH),
    Break("ebpo: noise not over G", "batch_advantages", "self.rewards.variance / size", "self.rewards.variance", BATCH),
    Break("moments: no term between chunks", "batch_advantages", " + gap**2 * self.count * values.size / count", "", BATCH),
    Break("pass rate penalty: not by pass rate", "batch_advantages", "-scale * is_correct_G.mean() * lengths_G", "-scale * lengths_G", BATCH),
    Break("brevity bonus: on every sign", "batch_advantages", "np.where(positive_PG, scale * shorter_PG, 0.0)", "scale * shorter_PG", BATCH),
    Break("perception: the other divergence's gradient", "losses", "torch.exp(gap_K) - gap_K - 1 - gap_K * (logp_K - logp_K.detach())", "torch.exp(other_logp_K - logp_K) - (other_logp_K - logp_K) - 1", f"{FACTS}::test_the_gradient_of_the_perception_term_is_the_divergence_s_own"),
    Break("perception: sign", "losses", "loss - perception_coef", "loss + perception_coef", f"{FACTS}::test_the_perception_term_is_a_token_mean_over_what_has_an_image"),
    Break("dependence: direction", "credit", "blind_logp_R.astype(np.float64) - logp_R.astype(np.float64)", "logp_R.astype(np.float64) - blind_logp_R.astype(np.float64)", CREDIT),
    Break("top_visual: the least visual", "credit", "np.argsort(-s_R", "np.argsort(s_R", CREDIT),
    Break("top_visual: rounded down", "credit", "math.ceil(share", "math.floor(share", CREDIT),
    Break("top_visual: the mean of f is not 1", "credit", "(1 - floor) / float(np.mean(scaled))", "(1 - floor)", CREDIT),
    Break("visual: not rescaled", "credit", "raw_R * len(s_R) / raw_R.sum()", "raw_R", CREDIT),
    Break("credit: not in the loss", "losses", "weight_K * inputs.credit_K.to(logp_K.dtype)", "weight_K", CREDIT),
    Break("kept ids: not renormalised", "learner.policy", "return logp_K - mass_K, entropy_K", "return logp_K, entropy_K", "tests/test_kept_ids.py"),
    Break("kept ids: what fills up counts", "learner.policy", "kept_logp_Kk.masked_fill(~is_there_Kk, float(\"-inf\")).logsumexp", "kept_logp_Kk.logsumexp", "tests/test_kept_ids.py"),
    Break("teacher: sign", "losses", "(inputs.teacher_logp_K - old_logp_K)", "(old_logp_K - inputs.teacher_logp_K)", TEACHER),
    Break("teacher: the gap has a gradient", "losses", "(inputs.teacher_logp_K - old_logp_K)", "(inputs.teacher_logp_K - logp_K)", TEACHER),
    Break("teacher: the other divergence", "losses", "(p_Kk * gap_Kk)", "(teacher_top_Kk.exp() * -gap_Kk)", TEACHER),
    Break("teacher: nothing for the other ids", "losses", " + rest_K * (rest_K / teacher_rest_K).log()", "", TEACHER),
    Break("teacher: a mean over the micro-batch", "losses", "inputs.mean_weight * teacher_kl_K.sum()", "teacher_kl_K.mean()", TEACHER),
    Break("head: further ids push nothing down", "learner.head", "constant_C1 + grad_top_Ck.sum(1, keepdim=True)", "constant_C1", "tests/learner/test_head.py"),
    Break("head: further ids are not pulled up", "learner.head", "p_CV.scatter_add_(1, ids_Ck, -grad_top_Ck)", "pass", "tests/learner/test_head.py"),
    Break("balanced: masses below 1 as 1", "losses", "np.where(tokens_P1 > 0, tokens_P1, 1)", "np.maximum(tokens_P1, 1)", CREDIT),
    Break("token ratio: sign", "losses", "torch.exp(logp_K - old_logp_K)", "torch.exp(old_logp_K - logp_K)", LOSSES),
    Break("sequence ratio: sum for mean", "losses", " / lengths_n.clamp(min=1)", "", LOSSES),
    Break("clip: max for min", "losses", "-torch.minimum(", "-torch.maximum(", LOSSES),
    Break("clip: sign", "losses", "return -torch.minimum(", "return torch.minimum(", LOSSES),
    Break("clip: bounds swapped", "losses", "ratio_K.clamp(1 - low, 1 + high)\n", "ratio_K.clamp(1 - high, 1 + low)\n", f"{FACTS}::test_token_clipping_stops_single_tokens"),
    Break("cispo: the bound carries gradient", "losses", "-ratio_K.detach().clamp(", "-ratio_K.clamp(", LOSSES),
    Break("cispo: sign", "losses", "return -ratio_K.detach()", "return ratio_K.detach()", LOSSES),
    Break("sequence: not over N", "losses", "1.0 / (lengths_PG.size * np.maximum(lengths_PG, 1))", "1.0 / np.maximum(lengths_PG, 1)", LOSSES),
    Break("token: over the longest", "losses", "1.0 / lengths_PG.sum())", "1.0 / (lengths_PG.size * lengths_PG.max()))", LOSSES),
    Break("group_token: not over P", "losses", "(len(lengths_PG) * np.maximum(tokens_P1, 1))", "np.maximum(tokens_P1, 1)", LOSSES),
    Break("length_weighted: over tokens", "losses", "np.full(lengths_PG.shape, 1.0 / lengths_PG.size)", "np.full(lengths_PG.shape, 1.0 / lengths_PG.sum())", LOSSES),
    Break("constant: longest for L_max", "losses", "(lengths_PG.size * max_tokens)", "(lengths_PG.size * lengths_PG.max())", LOSSES),
    Break("balanced: mean of the subset alone", "losses", "member_PG * size_P1 / (lengths_PG.size *", "member_PG / (", LOSSES),
    Break("dual clip: on every sign", "losses", "torch.where(advantage_K < 0, ratio_K.clamp(max=dual), ratio_K)", "ratio_K.clamp(max=1.1)", LOSSES),
    Break("dual clip: on positive advantages", "losses", "torch.where(advantage_K < 0, ratio", "torch.where(advantage_K > 0, ratio", LOSSES),
    Break("sapo: temperatures swapped", "losses", "torch.where(advantage_K > 0, positive, other)", "torch.where(advantage_K > 0, other, positive)", LOSSES),
    Break("sapo: gate around 0", "losses", "t_K * (ratio_K - 1)", "t_K * ratio_K", LOSSES),
    Break("variance: sum for mean", "losses", "powers_PG[there_PG].mean()", "powers_PG[there_PG].sum()", LOSSES),
    Break("variance: no L_max", "losses", "(max_tokens * lengths_PG.size * powers", "(lengths_PG.size * powers", LOSSES),
    Break("variance: exponent's sign", "losses", "** -exponent", "** exponent", LOSSES),
    Break("correction: sign", "losses", "(old_logp_K - sampler_logp_K).detach()", "(sampler_logp_K - old_logp_K).detach()", LOSSES),
    Break("rejection: sum for mean", "losses", 'if level == "sequence" else mean_n', 'if level == "geometric" else mean_n', LOSSES),
    Break("rejection: no lower bound", "losses", "(ratio_K >= bounds[0]) & (ratio_K", "(ratio_K >= 0) & (ratio_K", LOSSES),
    Break("rejection: counted alone", "losses", "weight_K = weight_K * kept_K", "weight_K = weight_K * 1", LOSSES),
    Break("KL: other direction", "losses", "gap_K = reference_logp_K - logp_K", "gap_K = logp_K - reference_logp_K", LOSSES),
    Break("entropy: sign", "losses", "loss - entropy_coef *", "loss + entropy_coef *", LOSSES),
    Break("split: mean over the micro-batch", "losses", "loss = (weight_K * terms_K).sum()", "loss = (weight_K * terms_K).mean()", SPLIT),
    Break("KL: with the weights of the aggregation", "losses", "kl_coef * inputs.mean_weight * kl_K.sum()", "kl_coef * (weight_K * kl_K).sum()", TOKEN_MEANS),
    Break("HA-DW: direction", "hadw", "np.exp(-np.sign(advantages_PG)", "np.exp(np.sign(advantages_PG)", "tests/test_hadw.py"),
    Break("HA-DW: no lambda", "hadw", "return scale * np.exp", "return np.exp", "tests/test_hadw.py"),
    Break("belief: moves the wrong way", "hadw", "(1 - step_size) * belief.ability + step_size * accuracy", "step_size * belief.ability + (1 - step_size) * accuracy", "tests/test_hadw.py"),
    Break("overlong: grows from the limit", "rewards.formulas", "((max_tokens - buffer) - length)", "(max_tokens - length)", "tests/rewards/test_reward.py"),
    Break("overlong: not over the buffer", "rewards.formulas", " / buffer * factor", " * factor", "tests/rewards/test_reward.py"),
    Break("gradient mass: without length", "metrics", "mass = lengths * weights_PG.ravel()", "mass = weights_PG.ravel()", "tests/test_metrics.py"),
    Break("length pull: not centred", "metrics", "(lengths_G - lengths_G.mean())", "lengths_G", "tests/test_metrics.py"),
    Break("episode: observed images are in the ids alone", "learner.packing", "vision += laid.vision", "pass", f"{ROWS}::test_gradients_equal_the_unmodified_model"),
    Break("episode: images expanded twice", "samplers.episodes", "[part.sampler_ids for part in parts]", "[part.ids for part in parts]", TURNS),
    Break("episode: observed tokens are trained", "learner.packing", "start + laid.sampled - 1)", "start + np.arange(len(laid.sampled)) - 1)", f"{ROWS}::test_a_row_by_hand"),
    Break("episode: decoded and encoded again", "samplers.episodes", "turn.prompt = _extended(turn.prompt, ids)", "turn.prompt = _extended(turn.prompt, np.array(self._builder.tokenizer.encode(self._builder.decode(ids)), np.int32))", TURNS),
    Break("episode: positions do not continue", "learner.packing", "positions(prompt) + next_position", "positions(prompt)", f"{ROWS}::test_gradients_equal_the_unmodified_model"),
)  # fmt: skip


def main() -> int:
    """Print the breaks that no test notices; returns 1 if there are any."""
    parser = argparse.ArgumentParser(prog="python -m tests.helpers.breaks")
    parser.add_argument("--part", default="1/1", help="3/6: every sixth break, from the third")
    part, parts = map(int, parser.parse_args().part.split("/"))
    rows = BREAKS[part - 1 :: parts]
    torch.set_num_threads(1)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins take longer to load than most of these tests
    os.environ["ANY_FAILURE"] = "1"  # the smallest one is not looked for (tests/conftest.py)
    for name in ("hypothesis", "transformers.modeling_utils", "vlm_rl.losses", "vlm_rl.run.directory"):
        import_module(name)  # heavy imports, once for all children
    faults = [row for row in rows if run_tests(row) != pytest.ExitCode.TESTS_FAILED]
    for row in faults:
        print(f"{row.name}: {row.tests} does not notice")
    print(f"{len(rows) - len(faults)} of {len(rows)} breaks noticed")
    return int(bool(faults))


def run_tests(row: Break) -> int:
    """Run the tests of a break in a child process, against the broken module; returns pytest's exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 99
    try:
        load_broken(row)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = int(pytest.main(["-q", "-x", "--tb=no", "-p", "no:cacheprovider", row.tests]))
    finally:
        sys.stderr.flush()
        os._exit(code)


def load_broken(row: Break) -> None:
    """Put the broken module in the place of the right one."""
    path = (ROOT / "vlm_rl").joinpath(*row.module.split(".")).with_suffix(".py")
    source = path.read_text(encoding="utf-8")
    assert source.count(row.right) >= 1, f"{row.name}: {path.name} no longer holds {row.right!r}"
    name = f"vlm_rl.{row.module}"
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path)
    exec(compile(source.replace(row.right, row.wrong), str(path), "exec"), module.__dict__)
    room, _, last = name.rpartition(".")
    setattr(import_module(room), last, module)


if __name__ == "__main__":
    sys.exit(main())
