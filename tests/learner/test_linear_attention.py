"""Layers of linear attention over packed rows: each response continues from the state of its own prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.delta_rule import functions_of, use_exact_rule
from tests.helpers.family_rows import BANNED, TEMPERATURE, groups_of, packed_row, text_prompt, unmodified_logp
from tests.helpers.groups import WeighedGroup, load_reference, random_group
from vlm_rl.errors import UserError
from vlm_rl.learner.attention import linear
from vlm_rl.learner.attention.linear import CHUNK, state_runs
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.learner.self_check import SelfCheck

TOLERANCE = 1e-5  # of a log-prob in nats, and of a gradient's distance over its norm
FamilyModel = Callable[[str], Path]  # the fixture family_model


def policy_of(folder: Path) -> Policy:
    return Policy(load_model(folder, dtype=torch.float32), banned_ids=BANNED, temperature=TEMPERATURE)


def distance(ours: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """||ours - wanted|| / ||wanted||, over all gradients."""
    assert ours.keys() == wanted.keys()
    square = sum(float((ours[name] - wanted[name]).double().square().sum()) for name in wanted)
    return (square / sum(float(grad.double().square().sum()) for grad in wanted.values())) ** 0.5


def test_what_follows_what_by_hand() -> None:
    """A row of p p p | a | b b | q | c c c, with a window of 3 tokens, and prompts of less than that."""
    runs = state_runs([((0, 3), [(3, 1), (4, 2)]), ((6, 1), [(7, 3)])], width=3)
    windows = {int(first): window.tolist() for first, window in zip(runs.first_F, runs.windows_FW, strict=True)}
    assert windows == {
        0: [-1, -1, 0],
        1: [-1, 0, 1],
        3: [1, 2, 3],
        4: [1, 2, 4],
        5: [2, 4, 5],
        6: [-1, -1, 6],
        7: [-1, 6, 7],
        8: [6, 7, 8],
    }
    prompts, responses = runs.batches
    assert prompts.tokens_NL.tolist() == [[0, 1, 2], [6, 0, 0]] and prompts.after_N is None
    assert prompts.is_filler_NL.tolist() == [[False] * 3, [False, True, True]]
    assert responses.tokens_NL.tolist() == [[3, 0, 0], [4, 5, 0], [7, 8, 9]]
    assert responses.after_N is not None and responses.after_N.tolist() == [0, 0, 1]
    in_batches = torch.cat([batch.tokens_NL.flatten() for batch in runs.batches])
    assert in_batches[runs.place_T].tolist() == [*range(10)]


def test_filler_is_less_than_what_it_fills_up() -> None:
    """However lengths are mixed, but for the ends of chunks; what follows a prompt finds it in its own batch."""
    rng = np.random.default_rng(0)
    for _ in range(8):
        spans, start = [], 0
        for _ in range(int(rng.integers(1, 5))):
            prompt, *responses = (int(2**x) for x in rng.uniform(0, 13, size=int(rng.integers(2, 9))))
            starts = np.cumsum([start, prompt, *responses]).tolist()
            spans.append(((start, prompt), [*zip(starts[1:], responses, strict=False)]))
            start = starts[-1]
        runs = state_runs(spans, width=4)
        in_batches = torch.cat([batch.tokens_NL.flatten() for batch in runs.batches])
        assert in_batches[runs.place_T].tolist() == [*range(start)]
        num_sequences = sum(len(batch.tokens_NL) for batch in runs.batches)
        assert len(in_batches) < 2 * start + CHUNK * num_sequences
        first_of_prompts = torch.cat([batch.tokens_NL[:, 0] for batch in runs.batches if batch.after_N is None])
        prompt_of = {response: prompt for (prompt, _), responses in spans for response, _ in responses}
        for batch in runs.batches:
            if batch.after_N is not None:
                firsts = batch.tokens_NL[:, 0].tolist()
                assert first_of_prompts[batch.after_N].tolist() == [prompt_of[first] for first in firsts]


def mixed_groups(model_type: str, folder: Path, size: int) -> list[WeighedGroup]:
    """Return prompts of 1, 2 and 70 tokens and, for a vision model, with images; responses end about chunks' ends."""
    texts = [text_prompt(length, seed=length) for length in (1, 2, CHUNK + 6)]
    seen = groups_of(model_type, folder, size)[1:] if model_type == "qwen3_5" else []
    lengths = [[1, 3, 2], [CHUNK, 5], [1, 2 * CHUNK + 1, 9]]
    return seen + [
        random_group(prompt, each, vocabulary=size, seed=n, banned=BANNED)
        for n, (prompt, each) in enumerate(zip(texts, lengths, strict=True))
    ]


@pytest.mark.parametrize(("model_type", "checkpointing"), [("qwen3_5", True), ("qwen3_next", False)])
def test_long_rows_equal_the_unmodified_model(
    model_type: str, checkpointing: bool, family_model: FamilyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs, and the gradients of a weighed sum of them: those of all responses to a prompt meet in it.

    Both sides compute the states in float64. transformers' function computes them in float32, by which the unmodified
    model itself errs by up to 4e-5 here.
    """
    folder = family_model(model_type)
    policy, reference = policy_of(folder), load_reference(folder)
    use_exact_rule(policy, monkeypatch)
    groups = mixed_groups(model_type, folder, policy.model.config.get_text_config().vocab_size)
    expected_K = unmodified_logp(reference, groups)
    if checkpointing:
        policy.enable_checkpointing()
    logp_K, _ = policy(packed_row(policy, groups))
    torch.testing.assert_close(logp_K, expected_K, atol=TOLERANCE, rtol=0)
    weights_K = torch.from_numpy(np.random.default_rng(0).normal(size=len(expected_K))).float()
    gradients = []
    for model, computed_K in ((policy.model, logp_K), (reference, expected_K)):
        (weights_K * computed_K).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert distance(*gradients) < TOLERANCE


def test_every_token_is_computed_once(family_model: FamilyModel) -> None:
    """P + G R tokens go through each layer, G (P + R) in padded rows; and the tower sees each image once."""
    folder = family_model("qwen3_5")
    for rows in ("auto", "padded"):
        policy = Policy(load_model(folder, dtype=torch.float32, rows=rows), banned_ids=[], temperature=1.0, rows=rows)
        prompt = groups_of("qwen3_5", folder, 90)[1].prompt  # with an image
        group = random_group(prompt, [7] * 4, vocabulary=90, seed=0)
        tokens: set[int] = set()
        patches: list[int] = []
        for name, module in policy.model.named_modules():
            if name.endswith(("in_proj_qkv", "q_proj", "gate_proj", "visual.patch_embed")):
                found = patches.append if "visual" in name else tokens.add
                module.register_forward_hook(
                    lambda _module, _inputs, output, found=found: found(output.shape[:-1].numel())
                )
        with torch.no_grad():
            policy(packed_row(policy, [group]))
        size = len(prompt.ids)
        assert tokens == {size + 4 * 7 if rows == "auto" else 4 * (size + 7)}
        assert patches == [len(prompt.vision["pixel_values"])]


def test_no_state_leaks_from_one_response_into_another(
    family_model: FamilyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With transformers' own functions it does, without a word: they know no cu_seqlens on a CPU."""
    folder = family_model("qwen3_5")
    policy = policy_of(folder)
    size = policy.model.config.get_text_config().vocab_size
    prompt = text_prompt(11, seed=0)
    one, other = (random_group(prompt, [6, 8], vocabulary=size, seed=seed, banned=BANNED) for seed in (1, 2))
    mixed = WeighedGroup(prompt, [other.rollouts[0], one.rollouts[1]], one.advantages_G, one.weights_G)

    def change_of_the_second() -> float:
        with torch.no_grad():
            before_K, after_K = (policy(packed_row(policy, [group]))[0] for group in (one, mixed))
        assert not torch.equal(before_K[:6], after_K[:6])
        return float((before_K[6:] - after_K[6:]).abs().max())

    assert change_of_the_second() < 1e-6
    functions = functions_of(policy)
    for name in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"):
        with monkeypatch.context() as patch:
            patch.setattr(functions, name, getattr(functions, name).theirs)
            assert change_of_the_second() > 1e-3, name


def test_the_self_check_sees_a_state_that_leaks(family_model: FamilyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = family_model("qwen3_next")
    model = load_model(folder, dtype=torch.float32)
    check = SelfCheck(model, [text_prompt(11, seed=0)], banned_ids=BANNED, temperature=TEMPERATURE)
    policy = Policy(model, banned_ids=BANNED, temperature=TEMPERATURE)
    check.compare(policy, path=folder)
    functions = functions_of(policy)
    monkeypatch.setattr(functions, "torch_chunk_gated_delta_rule", functions.torch_chunk_gated_delta_rule.theirs)
    with pytest.raises(UserError, match="log-probs differ"):
        check.compare(policy, path=folder)


def test_layers_that_call_other_functions_are_refused(
    family_model: FamilyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a newer transformers' might; without a row's layout ours are transformers' own."""
    policy = policy_of(family_model("qwen3_next"))
    functions = functions_of(policy)
    linear.install(policy.model)  # again, which changes nothing
    assert not isinstance(functions.causal_conv1d_fn.theirs, type(functions.causal_conv1d_fn))
    monkeypatch.delattr(functions, "causal_conv1d_fn")
    with pytest.raises(UserError, match=r"qwen3_next\.causal_conv1d_fn, .* set model\.rows=padded"):
        linear.install(policy.model)
