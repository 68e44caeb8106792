"""What all engines share: seeds, and a protocol that is light to import."""

from __future__ import annotations

import subprocess
import sys

from vlm_rl.samplers.base import response_seed


def test_response_seeds_are_63_bits_and_all_different() -> None:
    keys = [
        (seed, step, name, index)
        for seed in (0, 1)
        for step in range(50)
        for name in ("1", "11")
        for index in range(50)
    ]
    assert response_seed(*keys[0], drawn=0) == response_seed(*keys[0])
    assert len({response_seed(*keys[0], drawn=drawn) for drawn in range(50)}) == 50  # of a response that continues
    seeds = {response_seed(*key) for key in keys}
    assert len(seeds) == len(keys) == 10_000
    assert all(0 <= seed < 1 << 63 for seed in seeds) and max(seeds) > 1 << 62


def test_the_protocol_loads_no_torch() -> None:
    code = "import sys, vlm_rl.samplers.base; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
