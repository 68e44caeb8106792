"""Attacks on what docs/reliability.md promises: what each expects, and what it observes."""

from __future__ import annotations

from tests.attack import demo, grader, inputs, runs, sandbox, servers
from tests.attack.attack import Attack

# One module per area; each exports its ATTACKS.
ATTACKS: tuple[Attack, ...] = (
    *demo.ATTACKS,
    *grader.ATTACKS,
    *inputs.ATTACKS,
    *runs.ATTACKS,
    *sandbox.ATTACKS,
    *servers.ATTACKS,
)
