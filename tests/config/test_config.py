"""The configuration: every refusal names the file, the key's path, the value and the next step."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from vlm_rl import cli
from vlm_rl.config import Config, HadwConfig, load_config, parse_config, save_config
from vlm_rl.config.foreign_names import settings
from vlm_rl.config.key_reference import find_keys, pages
from vlm_rl.errors import UserError
from vlm_rl.run.terminal import resume_command
from vlm_rl.study.runs import load_study
from vlm_rl.toy.quickstart import ToyData, quickstart_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SHIPPED = sorted([*CONFIGS.glob("*.yaml"), *CONFIGS.glob("papers/*/*.yaml")])
STUDIES = sorted((CONFIGS / "studies").glob("*.yaml"))
SUPERVISED = sorted((CONFIGS / "sft").glob("*.yaml"))
FP8 = ["rollout.quantization=fp8", "rollout.sampler=vllm", "rollout.max_gap=0.3"]
MINIMAL = """\
out: runs/x
model: {path: some/model}
data: {train: [data/toy]}
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "minimal.yaml"
    path.write_text(MINIMAL)
    return path


def tree(**sections: Any) -> dict[str, Any]:
    return {**yaml.safe_load(MINIMAL), **sections}


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert str(path) in message or "override" in message
    return message


# -- what is accepted ------------------------------------------------------------------------------


def test_some_files_are_shipped() -> None:
    assert SHIPPED and STUDIES and SUPERVISED
    assert {*SHIPPED, *STUDIES, *SUPERVISED} == {*CONFIGS.rglob("*.yaml")}


def test_the_page_of_the_papers_names_every_run_of_theirs() -> None:
    """Each name with braces stands for a file for every choice, as in a shell."""
    page = (CONFIGS.parent / "docs" / "papers.md").read_text(encoding="utf-8")
    patterns = re.findall(r"`(configs/[^`]*)`", page)
    named = {CONFIGS.parent / name for pattern in patterns for name in choices(pattern)}
    assert all(path.is_file() for path in named)
    papers = {path for path in (CONFIGS / "papers").rglob("*.yaml") if path.stem != "base"}
    assert papers <= named and len(papers) == 18 + 12 + 9 and len(named) == 18 + 12 + 9


@pytest.mark.parametrize(
    ("own", "shipped"),
    [
        *((f"qwen2.5_vl_7b_{rule}", f"virl39k_{rule}_7b") for rule in ("grpo", "gspo", "luspo")),
        *((f"qwen2.5_7b_{rule}", f"dapo_math_{rule}_qwen2.5_7b_text") for rule in ("gspo", "luspo")),
    ],
)
def test_luspos_runs_are_the_shipped_recipes_as_long_as_printed(own: str, shipped: str) -> None:
    """With GSPO at the paper's one clip, and text evaluated on AIME24 as avg@32."""
    added = ["train.steps=700"]
    if "vl" not in own:
        aime = "eval.by_set.aime24={samples: 32, temperature: 1.0, top_p: 0.7}"
        added = ["train.steps=140", "data.eval=[data/aime24,data/math500]", "eval.every=10", aime]
    if "gspo" in own:
        added += ["algorithm.clip_low=2e-3", "algorithm.clip_high=2.5e-3"]
    recipe = load_config(CONFIGS / f"{shipped}.yaml", [f"out=runs/papers/luspo/{own}", *added])
    assert load_config(CONFIGS / "papers" / "luspo" / f"{own}.yaml") == recipe


def choices(pattern: str) -> list[str]:
    """Return the names that a pattern with {a,b} stands for."""
    parts = [part.strip("{}").split(",") for part in re.split(r"(\{[^}]*\})", pattern)]
    return ["".join(words) for words in itertools.product(*parts)]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_file_parses_and_survives_saving(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_shipped_study_makes_valid_runs(path: Path) -> None:
    study = load_study(path)
    assert len(study.runs(Path("runs"))) == len(study.rules) * len(study.seeds)


def test_round_trip_of_a_config_far_from_the_defaults(minimal: Path, tmp_path: Path) -> None:
    overrides = [
        "seed=3",
        "model.dtype=float32",
        "data.eval=[data/a,data/b]",
        "algorithm.name=ba",
        "algorithm.clip_low=3e-4",
        "algorithm.hadw.enabled=true",
        "rollout.vllm.gpu_memory_utilization=0.5",
        "train.betas=[0.9,0.999]",
        "train.deepspeed.zero_optimization.offload_optimizer.device=cpu",
        "eval.max_tokens=64",
        "eval.every=5",
        "log.trackers=[tensorboard]",
    ]
    config = load_config(minimal, overrides)
    assert config != load_config(minimal)
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


def test_exponents_are_numbers_in_files_and_overrides(minimal: Path) -> None:
    minimal.write_text(MINIMAL + "train: {lr: 1e-5, weight_decay: 1E-2}\n")
    config = load_config(minimal, ["algorithm.clip_low=3e-4"])
    assert (config.train.lr, config.train.weight_decay) == (1e-5, 1e-2)
    assert config.algorithm.clip_low == 3e-4


def test_overrides_win_over_the_file_and_the_last_over_the_first(minimal: Path) -> None:
    minimal.write_text(MINIMAL + "train: {steps: 5, lr: 0.5}\n")
    config = load_config(minimal, ["train.steps=7", "train.steps=9"])
    assert (config.train.steps, config.train.lr) == (9, 0.5)


def test_a_file_takes_what_it_does_not_give_from_the_one_it_extends(minimal: Path, tmp_path: Path) -> None:
    minimal.write_text(MINIMAL + "train: {steps: 5, lr: 0.5}\nlog: {trackers: [wandb]}\n")
    child = tmp_path / "child.yaml"
    child.write_text(f"extends: {minimal.name}\nout: elsewhere\ntrain: {{steps: 7}}\nlog: {{trackers: []}}\n")
    config = load_config(child, ["train.warmup_steps=3"])
    assert (config.out, config.train.steps, config.train.lr, config.train.warmup_steps) == ("elsewhere", 7, 0.5, 3)
    assert config.log.trackers == [] and config.data == load_config(minimal).data
    assert load_config(child) == load_config(minimal, ["out=elsewhere", "train.steps=7", "log.trackers=[]"])


@pytest.mark.parametrize(
    ("extends", "words"),
    [
        ("none.yaml", ["extends is 'none.yaml'", "must name a YAML file"]),
        ("3", ["extends is 3", "must name a YAML file"]),
        ("child.yaml", ["extends a third file"]),
        ("${oc.env:BASE}", ["extends is '${oc.env:BASE}'", "interpolation is not supported"]),
        ("${foo}", ["extends is '${foo}'", "interpolation is not supported"]),
    ],
)
def test_what_a_file_cannot_extend_is_refused(extends: str, words: list[str], tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "base.yaml").write_text(MINIMAL)
    monkeypatch.setenv("BASE", "base.yaml")
    child = tmp_path / "child.yaml"
    child.write_text(f"extends: {extends}\n")
    said = refusal(child)
    assert "child.yaml" in said or extends in said
    assert all(word in said for word in words), said


def test_a_list_in_the_place_of_a_section_names_both_files(minimal: Path, tmp_path: Path) -> None:
    child = tmp_path / "child.yaml"
    child.write_text(f"extends: {minimal.name}\ndata: [x]\n")
    said = refusal(child)
    assert said.startswith(f"{child}, which extends {minimal.name}: a list cannot replace a section"), said


def test_a_mistake_names_both_files(minimal: Path, tmp_path: Path) -> None:
    minimal.write_text(MINIMAL + "train: {stepps: 5}\n")
    child = tmp_path / "child.yaml"
    child.write_text(f"extends: {minimal.name}\n")
    assert f"child.yaml, which extends {minimal.name}: unknown key train.stepps" in refusal(child)


def test_the_context_has_room_for_the_longest_response_of_an_evaluation(minimal: Path) -> None:
    wide = ["data.max_prompt_tokens=100", "rollout.max_tokens=50", "eval.max_tokens=400", "reward.overlong_buffer=0"]
    assert load_config(minimal, [*wide, "eval.every=3"]).context_tokens == 500
    assert load_config(minimal, wide).context_tokens == 150  # nothing is evaluated
    assert load_config(minimal, [*wide, "eval.every=3", "eval.max_tokens=null"]).context_tokens == 150


def test_the_engines_own_blocks_pass_through_verbatim(minimal: Path) -> None:
    deepspeed = {"zero_optimization": {"stage3_max_live_parameters": 1e9, "overlap_comm": True}, "made_up": [1, None]}
    vllm = {"enforce_eager": True, "hf_overrides": {"a": {"b": "c"}}}
    minimal.write_text(MINIMAL + yaml.safe_dump({"train": {"deepspeed": deepspeed}, "rollout": {"vllm": vllm}}))
    config = load_config(minimal)
    assert (config.train.deepspeed, config.rollout.vllm) == (deepspeed, vllm)


def test_the_old_key_of_a_frozen_tower_is_read(minimal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run directories hold it, true or false."""
    assert load_config(minimal, ["model.freeze_vision=false"]) == load_config(minimal)
    assert capsys.readouterr().err == ""
    assert load_config(minimal, ["model.freeze_vision=true"]).model.freeze == ["tower", "merger"]
    note = capsys.readouterr().err
    assert note.count("\n") == 1 and "model.freeze_vision=true is read as model.freeze=[tower, merger]" in note
    load_config(minimal, ["model.freeze_vision=true"])
    assert capsys.readouterr().err == "", "a note is printed once"
    said = refusal(minimal, "model.freeze_vision=true", "model.freeze=[tower]")
    assert "model.freeze_vision" in said and "remove it" in said


def test_a_whole_number_may_stand_where_a_fraction_may(minimal: Path) -> None:
    assert load_config(minimal, ["rollout.temperature=1", "train.grad_clip=2"]).train.grad_clip == 2.0


# -- unknown keys ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("sede", "seed"),
        ("modle.path", "model"),
        ("train.learning_rte", None),
        ("train.lrr", "lr"),
        ("train.warmup", "warmup_steps"),
        ("rollout.responses_per_promt", "responses_per_prompt"),
        ("algorithm.hadw.scal", "scale"),
        ("checkpoint.keep", None),
        ("eval.temprature", "temperature"),
    ],
)
def test_an_unknown_key_is_refused_with_its_path_and_the_nearest_known_one(minimal: Path, key: str, nearest) -> None:
    message = refusal(minimal, f"{key}=1")
    shown = key if "modle" not in key else "modle"
    assert f"unknown key {shown}:" in message
    if nearest:
        assert f"did you mean {nearest!r}?" in message


def test_an_unknown_key_far_from_all_lists_the_known_ones(minimal: Path) -> None:
    message = refusal(minimal, "checkpoint.zzzzzz=1")
    assert "known keys: async_save, every, keep_best, keep_every, keep_last, minutes" in message


def sections(model: type[BaseModel], path: str = "") -> list[str]:
    """The dotted path of every section, the top ("") included."""
    paths = [path]
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            paths += sections(field.annotation, f"{path}.{name}" if path else name)
    return paths


@pytest.mark.parametrize("section", sections(Config))
def test_no_section_takes_an_unknown_key(minimal: Path, section: str) -> None:
    key = f"{section}.surprise" if section else "surprise"
    assert f"unknown key {key}:" in refusal(minimal, f"{key}=1")


def test_all_faults_of_a_file_are_reported_together(minimal: Path) -> None:
    lines = refusal(minimal, "train.lrr=1", "seed=x", "eval.every=-1").splitlines()
    assert len(lines) == 3


# -- wrong values ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.lr=abc", ["train.lr", "'abc'"]),
        ("train.lr=-1", ["train.lr", "-1", "greater than 0"]),
        ("train.steps=1.5", ["train.steps", "1.5"]),
        ("train.steps='10'", ["train.steps", "'10'"]),
        ("train.steps=true", ["train.steps", "True"]),
        ("train.zero_stage=4", ["train.zero_stage", "4"]),
        ("train.betas=[0.9]", ["train.betas"]),
        ("train.betas=[0.9,1.0]", ["train.betas.1", "1.0", "less than 1"]),
        ("train.optimizer=lion", ["train.optimizer", "'lion'", "adamw"]),
        ("seed=null", ["seed", "None"]),
        ("model=some/model", ["model", "'some/model'"]),
        ("data.train=[]", ["data.train", "[]"]),
        ("data.train=data/toy", ["data.train", "'data/toy'"]),
        ("data.template=free", ["data.template", "'free'", "think_answer"]),
        ("algorithm.hadw.enabled=1", ["algorithm.hadw.enabled", "1"]),
        ("rollout.sampler=sglang", ["rollout.sampler", "'sglang'", "transformers"]),
        ("log.trackers=[neptune]", ["log.trackers.0", "'neptune'"]),
    ],
)
def test_a_wrong_value_is_refused_with_its_path_and_itself(minimal: Path, override: str, words: list[str]) -> None:
    message = refusal(minimal, override)
    assert all(word in message for word in words), message


def test_a_part_that_no_model_has_is_refused(minimal: Path) -> None:
    for override in ("model.freeze=[towr]", "train.lr_by_part.towr=1e-6"):
        said = refusal(minimal, override)
        assert "towr" in said and "'tower', 'merger' or 'language_model'" in said
    assert "-1e-06" in refusal(minimal, "train.lr_by_part.tower=-1e-6")


@pytest.mark.parametrize("key", ["out", "model", "data"])
def test_what_has_no_default_must_be_there(key: str) -> None:
    with pytest.raises(UserError, match=f"{key} is missing"):
        parse_config({name: value for name, value in tree().items() if name != key})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.top_p=0.7"], ["rollout", "top_p is 0.7", "set top_k"]),
        (["rollout.top_k=50"], ["rollout", "top_k is 50", "sampler is auto"]),
        (["rollout.server_timeout=7200"], ["rollout", "server_timeout is 7200", "most 3600 s"]),
        (["train.mini_batch_prompts=256"], ["train.mini_batch_prompts (256)", "rollout.prompts_per_step (128)"]),
        (["train.micro_batch_tokens=100"], ["train.micro_batch_tokens (100)", "rollout.max_tokens (4096)"]),
        (["reward.overlong_buffer=5000"], ["reward.overlong_buffer (5000)", "rollout.max_tokens (4096)"]),
        (["eval.samples=4"], ["eval", "greedy", "4"]),
        (["model.offload_activations=true"], ["offload_activations", "gradient_checkpointing"]),
        (["train.deepspeed.gradient_clipping=0.1"], ["deepspeed.gradient_clipping", "decided by train.grad_clip"]),
        (["train.deepspeed.zero_optimization.stage=3"], ["zero_optimization.stage", "decided by train.zero_stage"]),
        (
            ["train.deepspeed.zero_optimization.offload_optimizer.device=cpu", "train.zero_stage=1"],
            ["zero_stage is 1", "in bfloat16", "set zero_stage=3"],
        ),
        (
            ["train.deepspeed.zero_optimization.offload_param.device=cpu", "train.zero_stage=2"],
            ["zero_stage is 2", "offload_param.device is cpu", "set zero_stage=3"],
        ),
        (["train.deepspeed.zero_optimization.cpu_offload=true"], ["cpu_offload", "offload_optimizer: {device: cpu}"]),
        (["train.deepspeed.zero_optimization=3"], ["zero_optimization is 3", "must hold DeepSpeed's keys"]),
        (
            ["train.deepspeed.zero_optimization.offload_optimizer=cpu", "rollout.offload_optimizer=true"],
            ["zero_optimization.offload_optimizer is 'cpu'", "{device: cpu}"],
        ),
        (["rollout.vllm.logprobs_mode=raw_logprobs"], ["vllm.logprobs_mode", "decided by the learner's needs"]),
        (
            ["rollout.vllm.speculative_config={method: eagle, model: x}"],
            [
                "vllm.speculative_config is {'method': 'eagle', 'model': 'x'}",
                "no checksum covers the weights of a draft model",
            ],
        ),
        (
            ["rollout.vllm.speculative_config={method: ngram}", "rollout.top_k=8", "rollout.sampler=vllm"],
            ["vllm.speculative_config is set, and top_k is 8"],
        ),
        (
            ["rollout.vllm.speculative_config={method: ngram}", "rollout.sampler=server"],
            ["vllm.speculative_config is set, and sampler is server"],
        ),
        (
            ["rollout.vllm.quantization=fp8"],
            ["vllm.quantization", "decided by rollout.quantization"],
        ),
        (
            ["rollout.quantization=fp8", "rollout.sampler=vllm"],
            ["quantization is fp8, and max_gap is null", "set max_gap, to begin with to 0.3"],
        ),
        (
            ["rollout.quantization=fp8", "rollout.max_gap=0.3", "rollout.sampler=transformers"],
            ["quantization is fp8, and sampler is transformers", "set sampler to vllm or server"],
        ),
        (
            [*FP8, "train.old_logprobs=sampler"],
            ["train.old_logprobs is sampler, and rollout.quantization is fp8", "importance correction"],
        ),
        (
            [*FP8, "model.lora={sync: adapter}"],
            ["model.lora.sync is adapter, and rollout.quantization is fp8", "model.lora.sync=merged"],
        ),
        (
            [*FP8, "model.dtype=float32"],
            ["model.dtype is float32, which vLLM does not round"],
        ),
        (["rollout.vllm.gpu_memory_utilization=high"], ["vllm.gpu_memory_utilization is 'high'", "at most 1"]),
        (["rollout.vllm.gpu_memory_utilization=null"], ["vllm.gpu_memory_utilization is None"]),
        (["train.deepspeed.zero_optimization.reduce_bucket_size=big"], ["reduce_bucket_size is 'big'", "or auto"]),
        (["rollout.vllm.max_model_len=9"], ["decided by data.max_prompt_tokens and rollout.max_tokens"]),
        (
            ["rollout.batch_invariant=true", "rollout.sampler=transformers"],
            ["batch_invariant is true", "sampler is transformers", "set sampler to vllm or server"],
        ),
        (
            ["rollout.offload_optimizer=true", "train.zero_stage=1"],
            ["train.zero_stage is 1", "set train.zero_stage=2"],
        ),
        (
            ["rollout.offload_optimizer=true", "train.deepspeed.zero_optimization.offload_optimizer.device=cpu"],
            ["rollout.offload_optimizer is true", "offload_optimizer.device is cpu", "leave one of them out"],
        ),
    ],
)
def test_values_that_do_not_fit_together_are_refused_with_both(minimal: Path, overrides, words) -> None:
    message = refusal(minimal, *overrides)
    assert all(word in message for word in words), message


def test_what_is_not_built_for_episodes_is_refused_by_name(minimal: Path) -> None:
    """Each with the reason. An environment that is off refuses nothing."""
    with_tool = "environment.name=zoom"
    for override, word in {
        "rollout.carry_over=0.75": "token by token",
        "rollout.replay_routing=true": "routing of observed tokens",
        "rollout.tensor_parallel=2": "answered at different times",
        "environment.max_pixels=9000000": "which the engine keeps images to",
        "environment.min_pixels=2000000": "above its max_pixels",
        "environment.name=zooom": "give zoom, python, answer_check",
        "environment.name=mine.Guess": "allow_class=true",
        "train.micro_batch_tokens=5000": "rollout.max_tokens + environment.max_observed_tokens (6144)",
    }.items():
        assert word in refusal(minimal, with_tool, "rollout.sampler=vllm", override), override
    ahead = ["rollout.sampler=server", "rollout.servers=[http://127.0.0.1:1]", "rollout.ahead=1"]
    assert "of several weights" in refusal(minimal, with_tool, *ahead)
    assert load_config(minimal, ["rollout.carry_over=0.75"]).observed_tokens == 0


def test_all_conflicts_are_listed_at_once(minimal: Path) -> None:
    """Those inside sections and those between them, together."""
    wrong = ["rollout.top_p=0.7", "eval.samples=4", "model.offload_activations=true", "model.freeze=[tower]"]
    wrong += ["model.lora={targets: [tower]}", "train.mini_batch_prompts=256", "reward.overlong_buffer=5000"]
    lines = refusal(minimal, *wrong, "data.eval=[data/x]").splitlines()
    words = [
        "top_p is 0.7",
        "greedy",
        "offload_activations needs",
        "freeze names tower",
        "(256)",
        "(5000)",
        "eval.every",
    ]
    assert len(lines) == len(words)
    assert all(any(word in line for line in lines) for word in words), lines


def test_conflicts_wait_for_values_of_the_right_type(minimal: Path) -> None:
    message = refusal(minimal, "rollout.top_p=0.7", "train.mini_batch_prompts=many")
    assert "top_p is 0.7" in message and "train.mini_batch_prompts is 'many'" in message and message.count("\n") == 1


def test_sets_to_evaluate_on_need_a_time_to_do_so(minimal: Path, tmp_path: Path) -> None:
    assert "data.eval names data/a, and eval.every is not given" in refusal(minimal, "data.eval=[data/a]")
    switched_off = load_config(minimal, ["data.eval=[data/a]", "eval.every=0"])
    save_config(switched_off, tmp_path / "config.yaml")  # as every older run directory has it
    assert load_config(tmp_path / "config.yaml") == switched_off


# -- other trainers' names, and the pages -----------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "ours"),
    [
        ("train.learning_rate=1e-6", "train.lr"),
        ("learning_rate=1e-6", "train.lr"),
        ("rollout.n=8", "rollout.responses_per_prompt"),
        ("algorithm.clip_ratio=0.2", "algorithm.clip_low and algorithm.clip_high"),
        ("actor_rollout_ref.actor.kl_loss_coef=0.1", "algorithm.kl_coef"),
        ("worker.rollout.n=5", "rollout.responses_per_prompt"),
        ("data.rollout_batch_size=512", "rollout.prompts_per_step"),
        ("train.num_generations=8", "rollout.responses_per_prompt"),
        ("init_kl_coef=0.1", "algorithm.kl_coef"),
    ],
)
def test_the_names_of_other_trainers_are_understood(minimal: Path, override: str, ours: str) -> None:
    message = refusal(minimal, override)
    assert f" is {ours} here" in message and "did you mean" not in message and override.split("=")[0] in message


def test_what_they_have_and_we_do_not_is_said(minimal: Path) -> None:
    assert "ppo_epochs of EasyR1 and verl is not a key here: each rollout" in refusal(minimal, "train.ppo_epochs=2")


def test_every_setting_of_theirs_leads_to_a_key() -> None:
    known = {key.path for key in find_keys()}
    for setting in settings():
        assert {*filter(None, setting.ours.split(" and "))} <= known, setting
        assert setting.ours or setting.note, setting


def test_every_key_is_described_and_the_pages_are_current() -> None:
    assert [key.path for key in find_keys() if not key.text] == []
    for name, page in pages().items():
        assert (CONFIGS.parent / "docs" / name).read_text() == page, "run: python -m vlm_rl.config.key_reference docs"


def test_a_key_is_found_by_path_section_and_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert [key.path for key in find_keys("train.lr")] == [key.path for key in find_keys("lr")] == ["train.lr"]
    assert {key.path for key in find_keys("algorithm.hadw")} == {
        f"algorithm.hadw.{name}" for name in HadwConfig.model_fields
    }
    assert cli.main(["config", "rollout.top_k"]) == 0
    assert capsys.readouterr().out.startswith("rollout.top_k: a whole number at least 0; default 0\n    Sample")
    assert cli.main(["config", "clip_ratio"]) == 2 and "algorithm.clip_low" in capsys.readouterr().err
    assert cli.main(["config", "train.lrr"]) == 2 and "did you mean 'train.lr'?" in capsys.readouterr().err


# -- who is to blame -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("trian.lr=1", "unknown key trian: did you mean 'train'?"),
        ("train.lr=abc", "train.lr is 'abc'"),
        ("train=5", "train is 5"),
        ("train.lr.x=1", "train.lr is {'x': 1}"),
        ("data.train=[a,5]", "data.train.1 is 5"),
        ("data.train=[a,'${seed}']", "data.train[1] is '${seed}'"),
        ("train.lr=[1", "cannot be read"),
        ("data=[data/virl39k]", "a list cannot replace a section"),
        ("model=[1]", "a list cannot replace a section"),
        ("data.train[0]=x", "give a list whole"),
        ("data.train.0=x", "give a list whole"),
        ("data.train={a: 1}", "nor a section a list"),
    ],
)
def test_a_mistake_in_an_override_is_blamed_on_that_override(minimal: Path, wrong: str, words: str) -> None:
    message = refusal(minimal, "seed=4", wrong, "log.samples_every=5")
    assert message.startswith(f"override {wrong!r}") and words in message
    assert str(minimal) not in message and "\n" not in message


def test_a_mistake_in_the_file_is_blamed_on_the_file_beside_good_overrides(minimal: Path) -> None:
    minimal.write_text(MINIMAL + "train: {lrr: 1}\n")
    message = refusal(minimal, "seed=4", "train.lr=1")
    assert message == f"{minimal}: unknown key train.lrr: did you mean 'lr'?"


def test_values_of_the_file_and_of_overrides_that_do_not_fit_together_name_both(minimal: Path) -> None:
    minimal.write_text(MINIMAL + "rollout: {prompts_per_step: 4}\n")
    assert refusal(minimal, "train.mini_batch_prompts=8").startswith(
        f"{minimal} with train.mini_batch_prompts=8: train.mini_batch_prompts (8) is above"
    )
    assert refusal(minimal, "eval.samples=2", "seed=3").startswith(f"{minimal} with eval.samples=2: eval: greedy")


# -- files and attacks -----------------------------------------------------------------------------


def test_a_missing_file_is_said_with_where_the_others_are(tmp_path: Path) -> None:
    assert "configs/" in refusal(tmp_path / "none.yaml")


@pytest.mark.parametrize("text", ["a: [1", "a: b: c", "\tx: 1", "- 1\n- 2\n", "just words\n", ""])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    refusal(path)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"out: \xe9"])
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "binary.yaml"
    path.write_bytes(content)
    refusal(path)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    refusal(tmp_path)


def test_an_override_without_a_value_is_refused(minimal: Path) -> None:
    message = refusal(minimal, "train.lr")
    assert "'train.lr'" in message and "key.path=value" in message


def test_the_same_key_twice_is_refused(minimal: Path) -> None:
    minimal.write_text(MINIMAL + "seed: 1\nseed: 2\n")
    assert "duplicate key seed" in refusal(minimal)


@pytest.mark.parametrize(
    "value", ["${oc.env:VLM_RL_SECRET}", "${seed}", "a-${oc.decode:'1'}", "${oc.create:{}}", "x\\${seed}"]
)
def test_interpolation_is_refused_and_not_carried_out(minimal: Path, value: str, monkeypatch) -> None:
    monkeypatch.setenv("VLM_RL_SECRET", "hunter2")
    minimal.write_text(yaml.safe_dump(tree(out=value)))
    message = refusal(minimal)
    assert "out is" in message and "interpolation" in message and "hunter2" not in message


def test_an_override_does_not_carry_out_the_interpolation_that_it_changes(minimal: Path) -> None:
    minimal.write_text(MINIMAL + "train: ${oc.create:{lr:0.5}}\n")
    assert "train is '${oc.create:{lr:0.5}}': interpolation" in refusal(minimal, "train.steps=5")


def test_interpolation_is_refused_inside_the_verbatim_blocks_too(minimal: Path) -> None:
    minimal.write_text(yaml.safe_dump(tree(train={"deepspeed": {"a": [{"b": "${oc.env:HOME}"}]}})))
    message = refusal(minimal)
    assert "train.deepspeed.a[0].b" in message and os.environ.get("HOME", "?") not in message.replace(
        str(minimal), ""
    )


def test_paths_of_ones_home_are_written_out(minimal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves ~ in out=~/runs as it is. What is printed later can be pasted: there is nothing to expand."""
    monkeypatch.setenv("HOME", str(tmp_path))
    minimal.write_text(
        yaml.safe_dump(tree(model={"path": "$HOME/models/m"}, data={"train": ["~/sets/a", "sets/~/b"]}))
    )
    config = load_config(minimal, ["out=~/runs/x"])
    assert (config.model.path, config.out) == (f"{tmp_path}/models/m", f"{tmp_path}/runs/x")
    assert config.data.train == [f"{tmp_path}/sets/a", "sets/~/b"]
    assert resume_command(config.out) == f"vlm-rl train {tmp_path}/runs/x --resume"


@pytest.mark.parametrize("url", ["h:80", "http://h", "http://u:p@h:80", "http://h:80/v1", "http://h:80?a=1"])
def test_a_server_is_named_by_host_and_port_alone(minimal: Path, url: str) -> None:
    assert f"servers: '{url}' is not an address" in refusal(minimal, f"rollout.servers=['{url}']")


def test_targets_are_unknown_keys(minimal: Path) -> None:
    assert "unknown key model._target_" in refusal(minimal, "model._target_=os.system")


def test_yaml_tags_create_nothing(minimal: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    minimal.write_text(MINIMAL + f"seed: !!python/object/apply:os.mkdir ['{marker}']\n")
    refusal(minimal)
    assert not marker.exists()


def test_a_config_cannot_be_changed_after_it_was_read(minimal: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config(minimal).seed = 5  # type: ignore[misc]


def test_the_pods_of_the_cluster_get_every_file_of_their_configuration(tmp_path: Path) -> None:
    """As its ConfigMap lays them out: under the name before the sign, or their own."""
    for name, file in re.findall(
        r"--from-file=(?:([\w.]+)=)?(\S+)", (CONFIGS.parent / "launch" / "kubernetes.yaml").read_text()
    ):
        shutil.copy(CONFIGS.parent / file, tmp_path / (name or Path(file).name))
    assert load_config(tmp_path / "run.yaml") == load_config(CONFIGS / "virl39k_luspo_7b_servers.yaml")


def test_the_toy_configuration_is_the_quickstarts() -> None:
    folder = Path("runs/quickstart-data")
    toy = ToyData(folder, folder / "train", folder / "heldout", [], [], "")
    model = folder / "warm-model"
    quick = quickstart_config(toy, model, Path("runs/toy"), seed=0, sampler="auto", algorithm="luspo")
    assert load_config(CONFIGS / "toy.yaml") == quick


def test_a_set_may_be_sampled_in_its_own_way(minimal: Path) -> None:
    sets = ["data.eval=[data/aime24, data/math500]", "eval.every=5"]
    config = load_config(minimal, [*sets, "eval.top_p=0.9", "eval.by_set.aime24={samples: 32, temperature: 1}"])
    assert config.eval.sampling("aime24") == (32, 1.0, 0.9)
    assert config.eval.sampling("math500") == (1, 0.0, 0.9)
    for changes, told in (
        ("eval.by_set.aime25.samples=1", r"eval\.by_set\.aime25.* did you mean 'aime24'\?"),
        ("eval.by_set.math500.samples=4", r"by_set\.math500: greedy decoding .* not 4"),
        ("eval.by_set.math500.k=4", r"eval\.by_set\.math500\.k"),
    ):
        with pytest.raises(UserError, match=told):
            load_config(minimal, [*sets, changes])
