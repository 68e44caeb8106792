"""What the host does for a group before its first token: the prompt, the request, its responses in the queue.

    OMP_NUM_THREADS=1 python perf/host_work.py          # a minute

CPU milliseconds of one prompt with a picture of 896 x 1,120 pixels (1,280 visual tokens) and 8 responses, the median
of several prompts. The model is tiny: what it computes is not part of this. Pictures come with their hash; the second
row leaves it out, so that vLLM takes its own for each response, as it does by default.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.samplers.base import SamplingParams
from vlm_rl.samplers.vllm import VllmSampler
from vlm_rl.samplers.vllm_options import prompt_request
from vlm_rl.templates import TEMPLATES
from vlm_rl.toy.counting_squares import SQUARES
from vlm_rl.toy.tiny_model import build_tiny_model
from vlm_rl.types import Problem

PROMPTS, RESPONSES = 5, 8
SAMPLING = SamplingParams(temperature=1.0, max_tokens=4, responses=RESPONSES)


def problem(rng: np.random.Generator, index: int) -> Problem:
    """Return a problem with a picture of noise."""
    file = BytesIO()
    Image.fromarray(rng.integers(0, 256, (1120, 896, 3), dtype=np.uint8)).save(file, format="PNG")
    return Problem(str(index), "<image>How many?", (file.getvalue(),), answer="4", answer_type="integer")


def milliseconds(work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Return the CPU time of a call, and its result."""
    begun = time.process_time()
    result = work(*arguments)
    return 1e3 * (time.process_time() - begun), result


def main() -> None:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        tiny = build_tiny_model(Path(folder) / "tiny", seed=0, tokenizer_texts=SQUARES.tokenizer_texts())
        builder = PromptBuilder(tiny, template=TEMPLATES["think_answer"], max_pixels=1_003_520)
        sampler = VllmSampler(
            model_path=str(tiny), builder=builder, max_model_len=1400, batch_size=RESPONSES, dtype=torch.float32
        )
        engine: Any = sampler._llm.llm_engine
        print("| picture's hash | prompt | request | first response | each further one | group of 8, in all |")
        print("|---|---|---|---|---|---|")
        for with_hash in (True, False):
            rows = []
            for index in range(PROMPTS):
                built, prompt = milliseconds(builder.build, problem(rng, index))
                made, request = milliseconds(prompt_request, prompt.sampler_ids.tolist(), prompt.images)
                if not with_hash:
                    del request["multi_modal_uuids"]
                added = []
                for g in range(RESPONSES):
                    setting, name = sampler._sampling(SAMPLING, g), f"{with_hash}-{index}-{g}"
                    added.append(milliseconds(engine.add_request, name, request, setting)[0])
                rows.append([built, made, added[0], statistics.median(added[1:]), built + made + sum(added)])
            medians = [statistics.median(column) for column in zip(*rows[1:], strict=True)]  # the first one warms up
            cells = " | ".join(f"{value:.1f}" for value in medians)
            print(f"| {'ours, once' if with_hash else 'by vLLM, each time'} | {cells} |", flush=True)
        sampler.close()


if __name__ == "__main__":
    main()
