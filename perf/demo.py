"""Measure how fast the demo is: `python -m perf.demo [--problems 5000] [--checkpoints 6] [--tokens 400]`.

Prints CPU seconds: from gradio's own import to the first data (server and page built, the first panel's HTML made),
of the next problem, each filter, the table, the panels of lengths and of reasoning; and the most memory held. With
`--bundle` also those of the static bundle, and its size.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np


def write_run(path: Path, *, problems: int, checkpoints: int, tokens: int) -> Path:
    """Write a run with evaluations of many problems, whose texts are as long as real ones."""
    from vlm_rl.config import parse_config
    from vlm_rl.run.directory import RunDirectory

    config = {
        "out": str(path),
        "model": {"path": "none"},
        "data": {"train": ["a"], "eval": ["b"]},
        "algorithm": {"name": "ba"},
        "rollout": {"max_tokens": 2 * tokens},
        "reward": {"overlong_buffer": 16},
        "eval": {"every": 0},
    }
    run = RunDirectory(path).create(parse_config(config))
    rng = np.random.default_rng(0)
    words = np.array(["the", "angle", "of", "a", "line", "is", "then", "so", "we", "get", "three", "and", "because"])
    for step in range(0, 100 * checkpoints, 100):
        run.write_eval(
            "large", step, [_row(rng, words, i, tokens, step) for i in range(problems)], {"template": "think_box"}
        )
    return path


def _row(rng: np.random.Generator, words: np.ndarray, index: int, tokens: int, step: int) -> dict:
    length = int(rng.gamma(6, tokens / 6)) + 2
    reasoning = rng.choice(words, length).astype(object)
    reasoning[11::12] = [f"is {value}." for value in rng.integers(0, 10_000, len(reasoning[11::12]))]  # statements
    right = rng.random() < 0.4 + 0.001 * step
    return {
        "problem_id": f"p{index:05d}", "sample_index": 0, "prompt_text": "",
        "response": f"<think>{' '.join(reasoning)}</think>\\boxed{{{index}}}",
        "length": length, "stop_reason": "length" if length > 2 * tokens else "stop",
        "extracted": str(index), "gold": str(index if right else -1), "verdict": "correct" if right else "wrong",
        "path": "number", "reason": "", "has_box": True, "category": f"category {index % 12}",
        "image_sha256": [], "image_sizes": [], "cluster": None, "image": None,
        "question": f"What is the angle number {index}?",
    }  # fmt: skip


def best(run, repeats: int = 5) -> tuple[float, float]:
    """Return the milliseconds of the first call and of the fastest of the others."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return 1000 * seconds[0], 1000 * min(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=5000)
    parser.add_argument("--checkpoints", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--bundle", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = write_run(
            Path(folder) / "run",
            problems=options.problems,
            checkpoints=options.checkpoints,
            tokens=options.tokens,
        )
        start = time.process_time()
        import gradio  # noqa: F401

        imported = time.process_time()
        print(f"import gradio                         {imported - start:6.2f} s")
        from vlm_rl.demo.files.bundle import write_bundle
        from vlm_rl.demo.numbers.url_state import UrlState
        from vlm_rl.demo.panels.lengths import lengths_panel
        from vlm_rl.demo.panels.page_state import PageStates
        from vlm_rl.demo.panels.problem import problem_panel
        from vlm_rl.demo.panels.reasoning import reasoning_panel
        from vlm_rl.demo.panels.summary_cards import summary_html
        from vlm_rl.demo.panels.table import table_panel
        from vlm_rl.demo.server import make_server

        make_server([path])
        built = time.process_time()
        from vlm_rl.demo.numbers.library import Library

        states = PageStates(Library([path]))
        others = tuple(f"run@{100 * index}" for index in range(1, options.checkpoints))
        everything = UrlState(base="run@0", others=others)
        state = states.of(everything)
        _ = problem_panel(state), summary_html(state)
        print(f"from there: page built                {built - imported:6.2f} s")
        print(f"            first data                {time.process_time() - imported:6.2f} s")
        places = iter(range(1, options.problems))
        walk = best(lambda: problem_panel(states.of(everything.patched(f"at=p{next(places):05d}"))))
        print(f"            next problem, ms        {'{:7.0f} {:7.0f}'.format(*walk)}")
        size = f"{options.problems:,} problems x {options.checkpoints} checkpoints"
        print(f"\nfilter {size}, panel and cards included; ms, first and best")
        for query in (
            "change=right", "flags=cut", "category=category 3", "low=300&high=500", "sort=growth",
            "text=angle number 77", "text=nowhere", "flags=format", "change=changed&text=because&low=200",
        ):  # fmt: skip

            def show(query: str = query) -> None:
                state = states.of(everything.patched(query))
                _ = problem_panel(state), summary_html(state)

            print(f"  {query:40} {'{:7.0f} {:7.0f}'.format(*best(show))}")
        state = states.of(everything)
        print(f"\npanel of lengths, {size}: {len(lengths_panel(state)) / 1e6:.2f} MB of HTML; ms, first and best")
        print(f"  {'':40} {'{:7.0f} {:7.0f}'.format(*best(lambda: lengths_panel(state)))}")
        panel = best(lambda: reasoning_panel(state), 2)
        print(f"panel of reasoning: {'':20} {'{:7.0f} {:7.0f}'.format(*panel)}")
        print(f"table: {'':33} {'{:7.0f} {:7.0f}'.format(*best(lambda: table_panel(state)))}")
        print(f"most memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")
        if options.bundle:
            start = time.process_time()
            written = write_bundle([path], Path(folder) / "bundle", view=everything.query())
            print(f"bundle: {written}, {time.process_time() - start:.0f} s")


if __name__ == "__main__":
    main()
