"""A resume that changes keys: they become the run's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.rollout_rows import CONFIG
from vlm_rl.config import SftConfig, load_sft_config, with_values
from vlm_rl.errors import UserError
from vlm_rl.run.configurations import check_unchanged, keep_changes
from vlm_rl.run.directory import SFT_CONFIG, RunDirectory


def test_what_a_resume_changes_is_the_run_s_from_then_on(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create(CONFIG)
    longer = with_values(CONFIG, {"train.steps": 200, "eval.samples": 4, "eval.temperature": 1})
    assert keep_changes(run, longer) == [
        "eval.samples is 4 from now on, and was 1",
        "eval.temperature is 1.0 from now on, and was 0.0",
        "train.steps is 200 from now on, and was 100",
    ]
    assert run.config() == longer
    assert [path.name for path in run.path.iterdir()] == ["config.yaml"]


def test_what_takes_other_memory_is_kept_too_and_another_engine_is_said(tmp_path: Path) -> None:
    """Options of DeepSpeed and vLLM that only one of the configurations has are named one by one."""
    run = RunDirectory(tmp_path / "run").create(CONFIG)
    offload = "train.deepspeed.zero_optimization.offload_optimizer"
    smaller = with_values(
        CONFIG,
        {
            "model.layer_patches": False,
            "model.gradient_checkpointing": True,
            f"{offload}.device": "cpu",
            "rollout.sampler": "transformers",
            "rollout.vllm.enforce_eager": True,
        },
    )
    check_unchanged(run.path, run.config(), smaller)
    assert keep_changes(run, smaller) == [
        "model.gradient_checkpointing is True from now on, and was False",
        "model.layer_patches is False from now on, and was 'auto'",
        "rollout.sampler is 'transformers' from now on, and was 'auto'",
        "rollout.vllm.enforce_eager is True from now on, and was None",
        f"{offload}.device is 'cpu' from now on, and was None",
        "with a different rollout.sampler, rollout.vllm.enforce_eager the run samples other responses than it would "
        "have, from the same distribution",
    ]
    assert run.config() == smaller
    for key, value in {"rollout.vllm.kv_cache_dtype": "fp8", f"{offload}.device": "cpu"}.items():
        longer = with_values(smaller, {key: value, "train.deepspeed.zero_optimization.zero_quantized_weights": True})
        with pytest.raises(UserError, match=r"rollout\.vllm\.kv_cache_dtype|zero_quantized_weights"):
            check_unchanged(run.path, run.config(), longer)


SERVED = {"rollout.sampler": "server", "rollout.servers": ["http://127.0.0.1:1"]}
HERE = {"rollout.sampler": "transformers"}
LEFT_OUT = {
    "model.lora.sync": (
        {"rollout.sampler": "vllm", "model.lora": {"sync": "adapter"}},
        HERE,
        "merged",
        "or model.lora.sync=merged",
    ),
    "rollout.servers": (SERVED, HERE, [], "leave servers out (rollout.servers=[] in a resume)"),
    "rollout.vllm.speculative_config": (
        {"rollout.sampler": "vllm", "rollout.vllm.speculative_config": {"method": "ngram"}},
        SERVED,
        None,
        "leave it out (null in a resume)",
    ),
}


@pytest.mark.parametrize("key", LEFT_OUT)
def test_a_resume_may_leave_out_what_its_other_sampler_does_not_take(key: str) -> None:
    """As the refusal advises."""
    own, sampler, value, advice = LEFT_OUT[key]
    run = with_values(CONFIG, own)
    with pytest.raises(UserError, match=re.escape(advice)):
        with_values(run, sampler)
    check_unchanged(Path("run"), run, with_values(run, {**sampler, key: value}))


def test_all_keys_that_a_resume_may_not_change_are_named_at_once_with_the_short_command(tmp_path: Path) -> None:
    other = with_values(CONFIG, {"train.lr": 0.5, "seed": 7, "algorithm.name": "ba", "train.steps": 200})
    with pytest.raises(UserError) as error:
        check_unchanged(tmp_path / "run", CONFIG, other)
    head, *keys, advice = str(error.value).splitlines()
    assert head == f"{tmp_path / 'run'}: cannot resume with 3 different keys:"
    assert [line.split()[0] for line in keys] == ["algorithm.name", "seed", "train.lr"]  # train.steps may change
    assert all("the run has" in line for line in keys) and keys[1].endswith("not 7")
    assert advice.endswith(f"With all of its own: vlm-rl train {tmp_path / 'run'} --resume")
    assert f"--start-from {tmp_path / 'run'}. With" in advice


def test_a_resume_without_changes_writes_nothing(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run").create(CONFIG)
    path = run.path / "config.yaml"
    path.write_text(f"# mine\n{path.read_text()}")
    before = path.read_bytes(), path.stat().st_ino
    assert keep_changes(run, CONFIG) == []
    assert (path.read_bytes(), path.stat().st_ino) == before


def test_the_model_s_folder_in_a_different_cache_is_not_a_change(tmp_path: Path) -> None:
    place = f"models--org--name/snapshots/{'0' * 40}"
    here, there = (with_values(CONFIG, {"model.path": f"/{cache}/{place}"}) for cache in ("here", "there"))
    run = RunDirectory(tmp_path / "run").create(here)
    assert keep_changes(run, with_values(there, {"train.steps": 7})) == ["train.steps is 7 from now on, and was 100"]
    assert run.config() == with_values(here, {"train.steps": 7})


def test_a_supervised_run_keeps_changes_too(tmp_path: Path) -> None:
    (tmp_path / "given.yaml").write_text("{out: x, model: {path: m}, data: {train: [d]}}")
    config = load_sft_config(tmp_path / "given.yaml")
    run = RunDirectory(tmp_path / "run", config_file=SFT_CONFIG).create(config)
    longer = config.model_copy(update={"train": config.train.model_copy(update={"steps": 7})})
    assert len(keep_changes(run, longer)) == 1
    kept = run.any_config()
    assert isinstance(kept, SftConfig) and kept == longer


def test_a_key_that_a_run_has_to_keep_is_not_kept_otherwise() -> None:
    known = f"cannot resume with a different seed: the run has {CONFIG.seed}, not 1;"
    with pytest.raises(UserError, match=rf"{known}.* --start-from run\. With"):
        check_unchanged(Path("run"), CONFIG, with_values(CONFIG, {"seed": 1, "train.steps": 7}))
