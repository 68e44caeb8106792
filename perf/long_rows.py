"""Compare a long row that ranks compute together with the same row on one rank: log-probs and gradients.

    torchrun --nproc-per-node 2 -m perf.long_rows                    # a response of 32,768 tokens, one of 16,384
    torchrun --nproc-per-node 4 -m perf.long_rows --tokens 8192

A tiny Qwen2.5-VL of random weights in float32, on CPUs over gloo; one prompt with an image. Every rank computes the
whole row first.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from tests.helpers.family_rows import packed_row
from tests.helpers.groups import make_prompt, noise_image, random_group
from tests.helpers.learner_worker import banned_ids
from tests.helpers.sequence_worker import policy_of, whole_response_loss, with_old_log_probs
from vlm_rl.distributed import from_main, init_ranks, rank, world_size
from vlm_rl.learner.packing import PackedRow
from vlm_rl.learner.policy import Policy
from vlm_rl.learner.sequence_parallel import group_of_ranks
from vlm_rl.toy.counting_squares import SQUARES
from vlm_rl.toy.tiny_model import build_tiny_model

Found = tuple[Tensor, dict[str, Tensor]]


def computed(policy: Policy, row: PackedRow) -> Found:
    """Return the log-probs [K] and the gradients, summed over the ranks that share the row."""
    policy.enable_checkpointing(zero_stage=0)
    logp_K, entropy_K = policy(row)
    loss, _ = whole_response_loss(logp_K, entropy_K, row.loss)
    loss.backward()
    grads = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
    return logp_K.detach(), {name: policy.ranks.sum(grad) for name, grad in grads.items()}


def distance(ours: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return ||ours - wanted|| / ||wanted||."""
    apart = sum(float((ours[name] - grad).double().square().sum()) for name, grad in wanted.items())
    return (apart / sum(float(grad.double().square().sum()) for grad in wanted.values())) ** 0.5


def compare(model: Path, tokens: int) -> None:
    """Compute the row both ways, and print how far they are apart."""
    alone, shared = policy_of(model), policy_of(model)
    shared.share_rows(group_of_ranks(world_size()))
    config = alone.model.config
    prompt = make_prompt(model, "How many red squares are there, and why?", [noise_image(84, 112, 1)])
    lengths = [tokens, tokens // 2]
    vocabulary = config.get_text_config().vocab_size
    group = random_group(prompt, lengths, vocabulary=vocabulary, seed=0, banned=banned_ids(config))
    row = with_old_log_probs(packed_row(alone, [group]))
    begun = time.monotonic()
    logp_K, grads = computed(alone, row)
    between = time.monotonic()
    ours_K, our_grads = computed(shared, row)
    gap = float((ours_K - logp_K).abs().max())
    if rank() == 0:
        print(
            f"{world_size()} ranks, a row of {len(row.ids_T):,} tokens: log-probs differ by at most {gap:.1e}, the "
            f"gradient's distance over its norm is {distance(our_grads, grads):.1e} "
            f"({between - begun:.0f} s alone on each rank, {time.monotonic() - between:.0f} s together)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768, help="of the longer response")
    options = parser.parse_args()
    init_ranks()
    torch.set_num_threads(1)
    with TemporaryDirectory() as name:
        texts = SQUARES.tokenizer_texts()
        # Every rank reads the first one's folder, which is there until all have ended.
        model = from_main(lambda: build_tiny_model(Path(name) / "model", tokenizer_texts=texts))
        compare(model, options.tokens)
        torch.distributed.barrier()


if __name__ == "__main__":
    main()
