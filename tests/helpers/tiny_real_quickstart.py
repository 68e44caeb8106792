"""`vlm-rl quickstart --real` with a tiny model of random weights in the place of SmolLM2, for train_worker."""

from __future__ import annotations

from pathlib import Path

from vlm_rl.cli import main as command_line
from vlm_rl.commands import real_quickstart
from vlm_rl.commands.real_quickstart import RealSizes
from vlm_rl.toy.tiny_model import build_tiny_model
from vlm_rl.toy.word_problems import SMALL, make_problems, make_traces

SIZES = RealSizes(traces=48, train=8, heldout=4, cold_steps=12, cold_batch=4, steps=2, prompts=2, max_tokens=32)


def make_tiny(out: Path) -> Path:
    """Write the model folder `out` unless it exists, and return it."""
    texts = make_traces(make_problems(40, SMALL, seed=0, split="traces"), seed=0)
    return out if out.is_dir() else build_tiny_model(out, tokenizer_texts=texts, hidden=64, layers=2)


def main(*words: str) -> int:
    """Run `vlm-rl quickstart --real --yes WORDS` at this size, and return the exit code."""
    whole = real_quickstart.real_quickstart
    real_quickstart.gguf_file = lambda: Path()
    real_quickstart.make_smollm = make_tiny
    real_quickstart.real_quickstart = lambda *args, **settings: whole(*args, **settings, sizes=SIZES)
    return command_line(["quickstart", "--real", "--yes", "--sampler", "transformers", *words])
