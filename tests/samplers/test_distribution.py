"""From logits to a sampled token, by hand."""

from __future__ import annotations

import torch

from vlm_rl.samplers.distribution import process_logits, sample, uniforms


def test_inverse_cdf_by_hand() -> None:
    """Masses 0, .25, .25, 0, .5: the CDF steps at .25, .5 and 1; token 0 and 3 have no interval."""
    logits = torch.tensor([0.0, 0.25, 0.25, 0.0, 0.5]).log()
    points = [0.0, 0.2, 0.25, 0.49, 0.5, 0.99, 1 - 2**-53]
    sampled = sample(logits.expand(len(points), -1), torch.tensor(points, dtype=torch.float64))
    assert sampled.tolist() == [1, 1, 2, 2, 4, 4, 4]


def test_the_last_token_may_be_banned() -> None:
    logits = torch.tensor([[1.0, 2.0, -float("inf"), -float("inf")]])
    assert sample(logits, torch.tensor([1 - 2**-53], dtype=torch.float64)).item() == 1


def test_processing_order_by_hand() -> None:
    """Ban first, then temperature, then top-k: the banned logit must not take one of the k places."""
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    scaled = process_logits(logits, banned=torch.tensor([0]), temperature=0.5, top_k=2)
    inf = float("inf")
    assert scaled.tolist() == [[-inf, 6.0, 4.0, -inf]]
    # masses .6439, .2369, .0871, .0321: two are needed to reach .7
    assert process_logits(
        logits, banned=torch.tensor([], dtype=torch.int64), temperature=1.0, top_p=0.7
    ).tolist() == [[4.0, 3.0, -inf, -inf]]


def test_noise_of_a_row_is_its_seeds_alone() -> None:
    together, alone = uniforms([5, 6, 7], 40), uniforms([6], 40)
    assert torch.equal(together[1], alone[0]) and not torch.equal(together[0], together[1])
