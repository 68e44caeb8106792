"""`vlm-rl doctor --model`: a model that works, and each way in which one does not."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.odd_models import save_odd
from tests.helpers.pretended_cuda import PretendedCuda
from vlm_rl import cli
from vlm_rl.doctor import model as doctor_model
from vlm_rl.learner.self_check import FLOAT32_LIMIT
from vlm_rl.planning.fits import Card
from vlm_rl.samplers.transformers import TransformersSampler

NAMES = ["folder", "model type", "tokenizer", "chat template", "weights", "packed rows", "sampler"]


@pytest.fixture
def outcomes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Path], tuple[int, dict[str, str], str]]:
    """Run the command on a folder, without vLLM: exit code, the outcome of each check, and the page."""
    monkeypatch.setitem(sys.modules, "vllm", None)

    def run(folder: Path) -> tuple[int, dict[str, str], str]:
        capsys.readouterr()
        try:
            code = cli.main(["doctor", "--model", str(folder)])
        except SystemExit as stopped:
            assert isinstance(stopped.code, int)
            code = stopped.code
        page = capsys.readouterr().out
        lines = [line for line in page.splitlines()[:-2] if not line.startswith(" ")]  # the last one sums up
        return code, {line[5:21].strip(): line.split()[0] for line in lines}, " ".join(page.split())

    return run


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "pretended gpu"])
def test_a_model_that_works(on_gpu: bool, tiny_model: Path, outcomes: Callable) -> None:
    with PretendedCuda() if on_gpu else nullcontext():
        code, found, page = outcomes(tiny_model)
        limit = doctor_model.ModelUnderTest(tiny_model).policy[2]
    assert (limit > FLOAT32_LIMIT) == on_gpu, "a GPU computes in bfloat16"
    assert (code, found) == (0, dict.fromkeys(NAMES, "ok")), page
    assert "transformers holds the synced weights" in page


def test_a_name_of_the_hub_is_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that is not in the cache and cannot be downloaded is answered with the command that downloads it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert cli.main(["doctor", "--model", "nobody/no-such-model"]) == 2
    said = capsys.readouterr().err
    assert "hf download nobody/no-such-model" in said and "is not there" not in said


def test_a_model_that_is_not_supported(tiny_model: Path, tmp_path: Path, outcomes: Callable) -> None:
    code, found, page = outcomes(save_odd(tmp_path, "llava", tiny_model))
    assert code == 1
    assert (found["model type"], found["packed rows"], found["sampler"]) == ("OFF", "?", "?")
    assert "it depends on" in page and "report this" not in page


def test_weights_that_are_not_finite(tiny_model: Path, tmp_path: Path, outcomes: Callable) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], torch.nan)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    code, found, page = outcomes(folder)
    assert (code, found["weights"], found["packed rows"]) == (1, "OFF", "?")
    assert "'model.norm.weight' holds NaN" in page


def test_a_learner_or_a_sampler_that_computes_differently(
    tiny_model: Path, outcomes: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = TransformersSampler.load_weights

    def load_less(self: TransformersSampler, tensors, *, version: int) -> None:
        load(self, ((name, 2 * tensor) for name, tensor in tensors), version=version)

    with monkeypatch.context() as patched:
        patched.setattr(TransformersSampler, "load_weights", load_less)
        code, found, page = outcomes(tiny_model)
        assert (code, found["packed rows"], found["sampler"]) == (1, "ok", "OFF")
        assert "does not hold the learner's weights" in page
    policy = doctor_model.Policy
    monkeypatch.setattr(
        doctor_model, "Policy", lambda model, **kwargs: policy(model, **{**kwargs, "temperature": 0.9})
    )
    code, found, page = outcomes(tiny_model)
    assert (code, found["packed rows"]) == (1, "OFF")
    assert "log-probs differ from the unmodified model's by" in page


def test_a_path_stays_in_one_piece(tmp_path: Path, outcomes: Callable) -> None:
    """Whoever copies it, or a command, from the page would copy half of it."""
    for length in range(40, 130, 9):
        missing = tmp_path / ("a-model-of-mine-" * 10)[:length]
        missing.mkdir()
        code, _, page = outcomes(missing)
        assert code == 1 and f" {missing}" in page


def test_a_model_that_is_too_large_for_this_machine(
    tiny_model: Path, outcomes: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not an error of the model: exit code 2."""
    memory = type("Memory", (), {"available": 10**6, "total": 10**6})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    code, found, page = outcomes(tiny_model)
    assert (code, found["packed rows"], found["sampler"]) == (2, "?", "?")
    assert "on the machine that will train" in page


def test_a_gpu_holds_a_model_in_half_the_bytes(tiny_model: Path) -> None:
    """On a card of a third of its float32 weights it is too large, and too small to be on one of two thirds."""
    size = sum(tensor.numel() for tensor in load_file(tiny_model / "model.safetensors").values()) * 4
    with PretendedCuda():
        for part, fits in ((3, False), (1.5, True)):
            model = doctor_model.ModelUnderTest(tiny_model)
            vars(model)["card"] = Card(size / part, size / part)
            assert (model.too_large(copies=1) == "") is fits


@pytest.mark.skipif(bool(find_spec("fla") or find_spec("causal_conv1d")), reason="they are installed")
def test_kernels_of_linear_attention_that_a_gpu_misses_are_named(family_model: Callable[[str], Path]) -> None:
    """transformers computes the same without them, by loops in torch."""
    words = "pip install flash-linear-attention causal-conv1d"
    for model_type, is_named in (("qwen3_5", True), ("qwen3", False)):
        model = doctor_model.ModelUnderTest(family_model(model_type))
        assert words not in doctor_model.model_type(model).detail
        with PretendedCuda():
            assert (words in doctor_model.model_type(model).detail) == is_named
