"""The engine that a quickstart on a GPU starts beside its warm start: vLLM compiles its kernels meanwhile."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.helpers.pretended_cuda import PretendedCuda
from tests.helpers.toy_runs import Runner, Toys
from vlm_rl.config import load_config
from vlm_rl.errors import UserError
from vlm_rl.samplers import factory
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.toy import first_start as module
from vlm_rl.toy.first_start import first_start


@pytest.mark.slow
def test_it_draws_with_the_engine_of_the_run(toys: Toys, runner: Runner) -> None:
    config = toys.config("first", rollout={"sampler": "vllm"})
    result = runner(module="vlm_rl.toy.first_start", arguments=[str(config)])
    assert result.code == 0, result.output
    assert result.output.endswith("vllm sampled 4 responses\n")  # rollout.prompts_per_step


@pytest.mark.parametrize("script", ["exit 3", "exec sleep 600"], ids=["fails", "hangs"])
@pytest.mark.parametrize("error", [None, KeyboardInterrupt], ids=["", "stopped"])
def test_what_goes_wrong_with_it_changes_nothing_and_none_is_left(
    error: type[BaseException] | None, script: str, toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, pid = tmp_path / "python", tmp_path / "pid"
    python.write_text(f"#!/bin/sh\necho $$ > {pid}\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(module, "has_gpu", lambda: True)
    monkeypatch.setattr(module, "LONGEST", 0.1)
    monkeypatch.setattr(sys, "executable", str(python))
    config = load_config(toys.config("wrong", rollout={"sampler": "vllm"}))
    with pytest.raises(error) if error else nullcontext(), first_start(config, tmp_path / "config.yaml"):
        while not pid.is_file() or not pid.read_text().endswith("\n"):
            time.sleep(0.01)
        if error:
            raise error
    assert not Path("/proc", pid.read_text().strip()).exists()
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(("has_gpu", "sampler"), [(False, "vllm"), (True, "transformers")])
def test_without_a_gpu_or_vllm_none_is_started(
    has_gpu: bool, sampler: str, toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "has_gpu", lambda: has_gpu)
    config = load_config(toys.config("quiet", rollout={"sampler": sampler}))
    with first_start(config, tmp_path / "config.yaml"):
        assert not (tmp_path / "config.yaml").exists()


def test_on_a_gpu_it_compiles_for_the_dtype_of_the_run(toys: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(_: str, settings: EngineSettings) -> None:
        raise UserError(str(settings.dtype))

    monkeypatch.setattr(factory, "make_sampler", started)
    with PretendedCuda(), pytest.raises(UserError, match=r"^torch\.bfloat16$"):
        module.main(str(toys.config("typed", rollout={"sampler": "vllm"})))
