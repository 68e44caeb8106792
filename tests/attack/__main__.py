"""Print the table of attacks, what each expects and what is observed: `python -m tests.attack [WORD ...]`.

Words choose the attacks whose name or promise holds one of them. The exit code is 1 where an observation differs.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.attack import ATTACKS


def main(words: list[str]) -> int:
    chosen = [
        attack for attack in ATTACKS if not words or any(word in attack.name + attack.promise for word in words)
    ]
    width = max((len(attack.name) for attack in chosen), default=0)
    differing = 0
    for attack in chosen:
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="attack-") as folder:
            try:
                observed = attack.observe(Path(folder))
            except Exception as error:
                observed = f"could not attack: {error!r}"
        same = observed == attack.expected
        differing += not same
        verdict = "as expected" if same else f"EXPECTED {attack.expected!r}"
        print(f"{attack.name:{width}}  {observed}  [{verdict}, {time.monotonic() - start:.1f} s]", flush=True)
    print(f"{len(chosen)} attacks, {differing} not as expected")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
