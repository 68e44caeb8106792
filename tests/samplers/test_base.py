"""What all engines share: seeds, and a protocol that is light to import."""

from __future__ import annotations

import subprocess
import sys

from tests.helpers.groups import bare_prompt
from vlm_rl.samplers.base import response_seed


def test_response_seeds_are_63_bits_and_all_different() -> None:
    keys = [
        (seed, step, prompt, index)
        for seed in (0, 1)
        for step in range(25)
        for prompt in (bare_prompt("1"), bare_prompt("11"), bare_prompt("1", epoch=1), bare_prompt("1", epoch=2))
        for index in range(50)
    ]
    assert response_seed(*keys[0], sampled=0) == response_seed(*keys[0])
    assert len({response_seed(*keys[0], sampled=n) for n in range(50)}) == 50  # of a response that continues
    # An epoch is not taken for tokens: (1 token, epoch 0) and (0 tokens, epoch 1) differ.
    later = {response_seed(0, 0, bare_prompt("1", epoch=e), 0, sampled=n) for e in range(9) for n in range(9)}
    assert len(later) == 81
    seeds = {response_seed(*key) for key in keys}
    assert len(seeds) == len(keys) == 10_000
    assert all(0 <= seed < 1 << 63 for seed in seeds) and max(seeds) > 1 << 62


def test_the_protocol_loads_no_torch() -> None:
    code = "import sys, vlm_rl.samplers.base; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
