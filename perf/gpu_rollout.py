"""Where the host's time goes in a decode step of vLLM's, by part, and what our sampler spares of it.

    python perf/gpu_rollout.py                        # the tiny model; 16, 64 and 128 responses; on a card or a CPU
    python perf/gpu_rollout.py --responses 128 --model FOLDER

All ways take turns in one engine, each behind a run of vLLM's own, with which it is compared. A row has medians over
the rounds, and in a round over the decode steps with all responses in progress. Times of the host are of this thread:
what waits, as for a card, does not count. On a CPU the sampler's arithmetic is among them, and the forward pass
stands alone. On a card a step of the device lasts from its first operation to its last, gaps included.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.devices import has_gpu
from vlm_rl.samplers.base import SamplingParams
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.factory import make_sampler
from vlm_rl.samplers.vllm.engine import VllmSampler
from vlm_rl.samplers.vllm.options import prompt_request, sampling_options
from vlm_rl.templates import TEMPLATES
from vlm_rl.toy.tiny_model import build_tiny_model
from vlm_rl.types import Problem, Prompt

PARTS = ("schedule", "execute", "sample", "update", "output", "other")
"""The scheduler; the worker's states and inputs; the sampler, with its arithmetic on a CPU, and its bookkeeping; the
scheduler again, with what was sampled; vLLM's output processor; the rest of a step."""


@dataclass(frozen=True)
class Way:
    """Whose each part is: "ours", "vllm" (its own way) or "off" (not there at all)."""

    logprobs: str = "ours"
    seeds: str = "ours"
    bias: str = "ours"
    blocks: str = "ours"


OWN = "vLLM's own"
WAYS: Mapping[str, Way] = {
    OWN: Way("vllm", "vllm", "vllm", "vllm"),
    "without log-probs": Way("off", "vllm", "vllm", "vllm"),
    "without seeds": Way("vllm", "off", "vllm", "vllm"),
    "without bias": Way("vllm", "vllm", "off", "vllm"),
    "without any of the three": Way("off", "off", "off", "vllm"),
    "our log-probs": Way("ours", "vllm", "vllm", "vllm"),
    "our seeds": Way("vllm", "ours", "vllm", "vllm"),
    "our mask": Way("vllm", "vllm", "ours", "vllm"),
    "our blocks": Way("vllm", "vllm", "vllm", "ours"),
    "all of ours": Way(),
}


@dataclass
class Clock:
    """The seconds of one step by part; what a part calls counts there alone."""

    now: Callable[[], float] = time.thread_time
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _open: list[float] = field(default_factory=list)  # seconds inside each open part, of parts that it called

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._open.append(0.0)
        begun = self.now()
        try:
            yield
        finally:
            whole = self.now() - begun
            self.seconds[name] += whole - self._open.pop()
            if self._open:
                self._open[-1] += whole

    def timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Count each call to a part."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return call(*args, **kwargs)

        return timed


class Bench:
    """An engine whose steps are timed, in any of the ways."""

    def __init__(self, model: Path, *, most: int, tokens: int) -> None:
        self.tokens = tokens
        self.builder = PromptBuilder(model, template=TEMPLATES["think_box"], max_pixels=100_352)
        sampler = make_sampler(
            "vllm",
            EngineSettings(
                model_path=str(model),
                builder=self.builder,
                max_model_len=512 + tokens,
                batch_size=most,
                dtype=torch.bfloat16 if has_gpu() else torch.float32,
            ),
        )
        assert isinstance(sampler, VllmSampler)
        self.sampler = sampler
        self.engine: Any = sampler._llm.llm_engine
        core = self.engine.engine_core.engine_core
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.model = self.runner.get_model()
        self.manager = core.scheduler.kv_cache_manager
        self.clock = Clock()
        self.ours = {"logits": self.model.compute_logits, "blocks": self.manager.allocate_slots}
        if not has_gpu():
            sampler = self.runner.sampler
            self.ours |= {"gather": sampler.gather_logprobs, "draw": sampler.topk_topp_sampler.forward}
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # on a card, around each step there
        for owner, method, part in (
            (core.scheduler, "schedule", "schedule"),
            (core.scheduler, "update_from_output", "update"),
            (self.engine.output_processor, "process_outputs", "output"),
            (self.runner, "execute_model", "execute"),
            (self.runner, "sample_tokens", "sample"),
            (self.model, "forward", "forward"),
        ):
            setattr(owner, method, self.clock.timed(getattr(owner, method), part))
        if has_gpu():
            self._watch_device()

    def _watch_device(self) -> None:
        execute, sample = self.runner.execute_model, self.runner.sample_tokens
        begun: list[torch.cuda.Event] = []  # of the step in progress; one without tokens samples nothing

        def recorded() -> torch.cuda.Event:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event

        def execute_model(*args: Any, **kwargs: Any) -> Any:
            begun[:] = [recorded()]
            return execute(*args, **kwargs)

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            sampled = sample(*args, **kwargs)
            self.events.append((begun[0], recorded()))
            return sampled

        self.runner.execute_model, self.runner.sample_tokens = execute_model, sample_tokens

    def choose(self, way: Way) -> None:
        """Put in our parts, or vLLM's own."""
        own = type(self.model).compute_logits.__get__(self.model)
        logits = self.ours["logits"] if way.bias == "ours" else own
        self.model.compute_logits = self.clock.timed(logits, "forward")
        allocate = type(self.manager).allocate_slots.__get__(self.manager)
        self.manager.allocate_slots = self.ours["blocks"] if way.blocks == "ours" else allocate
        if not has_gpu():
            sampler = self.runner.sampler
            gather, chooser = type(sampler).gather_logprobs, sampler.topk_topp_sampler
            sampler.gather_logprobs = self.ours["gather"] if way.logprobs == "ours" else gather
            chooser.forward = self.ours["draw"] if way.seeds == "ours" else chooser.forward_cpu

    def steps(self, responses: int, way: Way) -> list[dict[str, float]]:
        """Sample so many responses; return the seconds of each decode step by part, on a card with "device"."""
        self.choose(way)
        for index in range(responses):
            self._add(index, way)
        steps: list[dict[str, float]] = []
        self.events.clear()
        while self.engine.has_unfinished_requests():
            self.clock.seconds.clear()
            with self.clock.part("other"):
                self.engine.step()
            steps.append(dict(self.clock.seconds))
        self.sampler._log.clear()
        if has_gpu():
            torch.cuda.synchronize()
            for step, (begin, end) in zip(steps, self.events, strict=False):
                step["device"] = begin.elapsed_time(end) / 1e3
        return steps[len(steps) // 8 : -2]  # without the prompts, and the responses' end

    def _add(self, index: int, way: Way) -> None:
        banned = list(self.builder.banned_ids) if way.bias == "vllm" else []
        setting = sampling_options(
            self.sampler._vllm,
            SamplingParams(temperature=1.0, max_tokens=self.tokens, responses=1),
            seed=index,
            eos_ids=[],
            banned_ids=banned,
        )
        setting.ignore_eos = True
        if way.seeds == "off":
            setting.seed = None
        if way.logprobs == "off":
            setting.logprobs = None
        prompt = self._prompt(index // 8)
        name = self.engine.add_request(str(index), prompt_request(prompt.sampler_ids.tolist(), ()), setting)
        if way.logprobs == "ours":
            self.sampler._log.keep(name)

    def _prompt(self, index: int) -> Prompt:
        text = f"How many are there in picture {index}?"
        return self.builder.build(Problem(id=str(index), question=text, images=(), answer="4", answer_type="integer"))


def measure(bench: Bench, responses: int, *, rounds: int) -> Iterator[list[dict[str, dict[str, float]]]]:
    """Yield after each round the milliseconds of a step by way and part, of each round the medians over its steps.

    vLLM's own way runs anew in front of each other one, which is compared with that run: "of vLLM's own".
    """
    kinds = [*PARTS, "forward", *["device"] * has_gpu()]

    def of(name: str) -> dict[str, float]:
        steps = bench.steps(responses, WAYS[name])
        parts = {kind: 1e3 * statistics.median(step.get(kind, 0.0) for step in steps) for kind in kinds}
        return parts | {"host": sum(parts[part] for part in PARTS)}

    measured: list[dict[str, dict[str, float]]] = []
    for index in range(rounds + 1):
        by_way: dict[str, dict[str, float]] = {}
        for name in WAYS:
            own = of(OWN)
            parts = own if name == OWN else of(name)
            by_way[name] = parts | {"of vLLM's own": parts["host"] / own["host"]}
        if index:  # the first warms up
            measured.append(by_way)
            yield measured


def print_table(responses: int, measured: list[dict[str, dict[str, float]]]) -> None:
    """Print medians over the rounds."""
    columns = [*PARTS, "host", "us a token", "of vLLM's own", "forward", *["device"] * has_gpu()]
    print(f"\n| {responses} responses, ms a step | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for name, parts in measured[0].items():
        row = {kind: statistics.median(of_round[name][kind] for of_round in measured) for kind in parts}
        row["us a token"] = 1e3 * row["host"] / responses
        print(f"| {name} | {' | '.join(f'{row[column]:.2f}' for column in columns)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--tokens", type=int, default=32, help="of a response")
    parser.add_argument("--rounds", type=int, default=6, help="beside one that warms up")
    parser.add_argument("--model", type=Path, help="a folder (default: the tiny model)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or build_tiny_model(Path(folder, "model"))
        bench = Bench(model, most=max(options.responses), tokens=options.tokens)
        for responses in options.responses:
            for measured in measure(bench, responses, rounds=options.rounds):
                if len(measured) in (1, options.rounds):  # the first in case the time ends
                    print_table(responses, measured)


if __name__ == "__main__":
    main()
