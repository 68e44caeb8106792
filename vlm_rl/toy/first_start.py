"""vLLM's first start on a machine, in a separate process beside the quickstart's warm start.

    python -m vlm_rl.toy.first_start CONFIG.yaml

The first engine of a machine compiles vLLM's kernels, on an H200 for half a minute, and keeps them for later ones.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlm_rl.config import Config, load_config, save_config
from vlm_rl.devices import default_device, has_gpu, model_dtype

LONGEST = 30.0  # seconds that a run waits for it; what is missing then is compiled by the run's own engine


@contextmanager
def first_start(config: Config, file: Path) -> Iterator[None]:
    """Start the engine of a run beside what this process does, on a GPU, and end it. A failure of it changes nothing.

    Args:
        config: of the run, but for `model.path`, a folder with the same config.json.
        file: to write it to.
    """
    if not has_gpu() or config.rollout.sampler == "transformers":
        yield
        return
    save_config(config, file)
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    process = subprocess.Popen([sys.executable, "-m", "vlm_rl.toy.first_start", file], **quiet)
    try:
        yield
        process.wait(LONGEST)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()
        process.wait()


def main(file: str) -> int:
    """Start the engine of a run as `train` does, and sample a response to each prompt of its first step."""
    from vlm_rl.data.prompts import PromptBuilder
    from vlm_rl.data.sets import load_training_sets
    from vlm_rl.samplers.base import SampleRequest, SamplingParams
    from vlm_rl.samplers.engine_settings import EngineSettings
    from vlm_rl.samplers.factory import make_sampler

    config = load_config(file)
    builder = PromptBuilder(config.model.path, template=config.data.prompt_template)
    sampler = make_sampler(
        "vllm",
        EngineSettings(
            model_path=config.model.path,
            builder=builder,
            max_model_len=config.context_tokens,
            batch_size=config.rollout.batch_size,
            dtype=model_dtype(default_device()),
        ),
    )
    problems = load_training_sets(config.data)[: config.rollout.prompts_per_step]
    prompts = [builder.build(problem) for problem in problems]
    params = SamplingParams(temperature=1.0, max_tokens=config.rollout.max_tokens, responses=1)
    groups = sampler.generate(SampleRequest(prompts, params, seed=config.seed, step=0))
    print(f"{sampler.name} sampled {len(groups)} responses")
    sampler.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
