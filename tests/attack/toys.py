"""The sets, the random policy and the runner of commands that the attacks on runs and on inputs share."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from tests.helpers.toy_runs import Toys, shared_runner, toy_set


@cache
def toys() -> Toys:
    """Make them once, in a folder that goes with this process."""
    from vlm_rl.toy.counting_squares import SQUARES
    from vlm_rl.toy.tiny_model import build_tiny_model

    folder = Path(tempfile.mkdtemp(prefix="attack-toys-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = build_tiny_model(folder / "tiny", seed=0, tokenizer_texts=SQUARES.tokenizer_texts())
    train, heldout = (toy_set(folder / name, count=4, split=name) for name in ("train", "heldout"))
    return Toys(folder, train, heldout, model, model, shared_runner())
