"""How fast the demo is: `python -m perf.demo [--problems 5000] [--tokens 400]`.

Prints the seconds from gradio's own import to the first data (server, page and first url built, and the
first panel's HTML made), and how long 5,000 problems of two checkpoints take to pass each filter.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np


def write_run(path: Path, *, problems: int, tokens: int) -> Path:
    """A run with two evaluations of many problems, with texts as long as they are in earnest."""
    from vlm_rl.config import parse_config
    from vlm_rl.run.directory import RunDirectory

    config = {
        "out": str(path),
        "model": {"path": "none"},
        "data": {"train": ["a"], "eval": ["b"]},
        "algorithm": {"name": "ba"},
        "rollout": {"max_tokens": 2 * tokens},
        "reward": {"overlong_buffer": 16},
    }
    run = RunDirectory(path).create(parse_config(config))
    rng = np.random.default_rng(0)
    words = np.array(["the", "angle", "of", "a", "line", "is", "then", "so", "we", "get", "three", "and", "because"])
    for step in (0, 100):
        run.write_eval(
            "large", step, [_row(rng, words, i, tokens, step) for i in range(problems)], {"template": "think_box"}
        )
    return path


def _row(rng: np.random.Generator, words: np.ndarray, index: int, tokens: int, step: int) -> dict:
    length = int(rng.gamma(6, tokens / 6)) + 2
    right = rng.random() < 0.4 + 0.002 * step
    return {
        "problem_id": f"p{index:05d}", "sample_index": 0, "prompt_text": "",
        "response": f"<think>{' '.join(rng.choice(words, length))}</think>\\boxed{{{index}}}",
        "length": length, "stop_reason": "length" if length > 2 * tokens else "stop",
        "extracted": str(index), "gold": str(index if right else -1), "verdict": "correct" if right else "wrong",
        "path": "number", "reason": "", "has_box": True, "category": f"category {index % 12}",
        "image_sha256": [], "image_sizes": [], "image": None, "question": f"What is the angle number {index}?",
    }  # fmt: skip


def best(run, repeats: int = 5) -> tuple[float, float]:
    """(first, best of the others) in milliseconds."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return 1000 * seconds[0], 1000 * min(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=5000)
    parser.add_argument("--tokens", type=int, default=400)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = write_run(Path(folder) / "run", problems=options.problems, tokens=options.tokens)
        start = time.perf_counter()
        import gradio  # noqa: F401

        imported = time.perf_counter()
        print(f"import gradio                         {imported - start:6.2f} s")
        from vlm_rl.demo.page_state import PageStates
        from vlm_rl.demo.problem_panel import problem_panel
        from vlm_rl.demo.server import make_server
        from vlm_rl.demo.summary_cards import summary_html
        from vlm_rl.demo.url_state import UrlState

        make_server([path])
        built = time.perf_counter()
        from vlm_rl.demo.library import Library

        states = PageStates(Library([path]))
        state = states.of(UrlState())
        _ = problem_panel(state), summary_html(state)
        print(f"from there: page built                {built - imported:6.2f} s")
        print(f"            first data                {time.perf_counter() - imported:6.2f} s")
        print(f"\nfilter {options.problems:,} problems x 2 checkpoints, panel and cards included; ms, first and best")
        for query in (
            "change=right", "flags=cut", "category=category 3", "low=300&high=500", "sort=growth",
            "text=angle number 77", "text=nowhere", "flags=format", "change=changed&text=because&low=200",
        ):  # fmt: skip

            def show(query: str = query) -> None:
                state = states.of(UrlState.parse(query))
                _ = problem_panel(state), summary_html(state)

            print(f"  {query:40} {'{:7.0f} {:7.0f}'.format(*best(show))}")


if __name__ == "__main__":
    main()
