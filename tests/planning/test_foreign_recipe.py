"""`vlm-rl init --from`: files in the form of other trainers become recipes, and no setting of theirs is lost.

The expected sizes are worked by hand from how each trainer counts: prompts, responses, updates, shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.images import plain_png
from tests.helpers.prepared_sets import write_problems
from vlm_rl import cli
from vlm_rl.config import Config, load_config
from vlm_rl.planning.foreign_files import ForeignFile, read_foreign
from vlm_rl.planning.foreign_rows import Conversion
from vlm_rl.planning.foreign_values import convert
from vlm_rl.types import Problem

EASYR1 = """\
data:
  train_files: org/triangles@train
  prompt_key: problem
  answer_key: answer
  max_prompt_length: 1024
  max_response_length: 512
  rollout_batch_size: 64
  filter_overlong_prompts: true
algorithm: {adv_estimator: grpo, disable_kl: false, use_kl_loss: true, kl_coef: 1e-2, online_filtering: true}
worker:
  actor:
    global_batch_size: 16
    clip_ratio_high: 0.28
    model: {model_path: Qwen/Qwen2.5-VL-7B-Instruct, freeze_vision_tower: true}
    optim: {lr: 1e-6, lr_warmup_ratio: 0.1}
    offload: {offload_optimizer: true, offload_params: true}
  rollout: {n: 5, temperature: 0.9, top_p: 0.99, tensor_parallel_size: 2, val_override_config: {temperature: 0.5}}
  reward: {reward_function: "./score/math.py:compute_score"}
trainer: {total_epochs: 3, logger: [console, wandb], n_gpus_per_node: 8, save_freq: -1, brand_new: 7}
"""
VERL = """\
set -x
touch RAN
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/data/geo/train.parquet \\
    data.train_batch_size=64 data.max_response_length=512 \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct \\
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.actor.clip_ratio_low=3e-4 actor_rollout_ref.actor.clip_ratio_high=4e-4 \\
    actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.01 \\
    actor_rollout_ref.rollout.name=${1:-vllm} actor_rollout_ref.rollout.n=5 \\
    trainer.total_training_steps=40 $@
"""
TRL = """\
model_name_or_path: Qwen/Qwen2.5-VL-3B-Instruct
dataset_name: org/maths
dataset_train_split: train
learning_rate: 1.0e-5
max_steps: 100
num_generations: 16
per_device_train_batch_size: 16
gradient_accumulation_steps: 4
steps_per_generation: 8
use_peft: true
lora_r: 64
warmup_steps: 3
lr_scheduler_type: cosine
"""
OPENRLHF = """\
MODEL=Qwen/Qwen2.5-VL-3B-Instruct
ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray \\
   --algo.kl.init_coef 0 --algo.advantage.estimator group_norm --actor.model_name_or_path ${MODEL} \\
   --train.batch_size 1024 --rollout.batch_size 256 --rollout.n_samples_per_prompt 8 \\
   --data.max_len 3072 --rollout.max_new_tokens 1024 --actor.adam.lr 2e-6 --data.prompt_dataset org/set \\
   --eps_clip_low_high 0.2 0.27 --actor.freeze_visual_encoder --vllm.enforce_eager > log.txt 2>&1
"""
SWIFT = """\
# eight cards
export MODEL='Qwen/Qwen2.5-VL-7B-Instruct'
NPROC_PER_NODE=8 MAX_PIXELS=602112 \\
swift rlhf --rlhf_type grpo --model $MODEL --train_type lora --lora_rank 32 --dataset org/charts#4000 \\
    --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --num_generations 8 \\
    --reward_funcs accuracy format --importance_sampling_level sequence --learning_rate 1e-6 --beta 0.0 \\
    --max_completion_length 1024 --num_train_epochs 2 --warmup_ratio 0.05 --deepspeed zero3 --torch_dtype bfloat16
"""
OLD_OPENRLHF = """\
python3 -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-VL-3B-Instruct --advantage_estimator group_norm \\
   --prompt_max_len 512 --generate_max_len 8192 --train_batch_size 128 --rollout_batch_size 32 \\
   --n_samples_per_prompt 8 --max_samples 160 --num_episodes 2 --prompt_data org/set
"""
LAUNCHED_TRL = """\
SYSTEM_PROMPT="Think first.
Then answer, and don't guess."
echo it is begun  # don't wait
accelerate launch --num_processes 8 train_grpo.py --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct \\
    --num_generations 8 --per_device_train_batch_size 8 --gradient_accumulation_steps 2 --max_steps 10
"""
FILES = {
    "old_openrlhf.sh": (
        OLD_OPENRLHF,
        {
            "data.max_prompt_tokens": 512,
            "rollout.max_tokens": 8192,
            "train.steps": 10,  # two passes over 160 of the 300 rows, 32 a step
            "algorithm.kl_coef": 0.0,
        },
        ["init_kl_coef, its default: 0.01  (a penalty in the reward"],
    ),
    "launched_trl.sh": (
        LAUNCHED_TRL,
        {
            # 8 responses x 2 passes x 8 processes are 128: 16 prompts of 8
            "rollout.prompts_per_step": 16,
            "rollout.responses_per_prompt": 8,
        },
        [],
    ),
    "easyr1.yaml": (
        EASYR1,
        {
            "rollout.prompts_per_step": 64,
            "train.mini_batch_prompts": 16,
            "rollout.responses_per_prompt": 5,
            "rollout.temperature": 0.9,
            "rollout.tensor_parallel": 2,
            "rollout.sampler": "vllm",
            "rollout.offload_optimizer": True,
            "model.freeze": ["tower", "merger"],
            "algorithm.kl_coef": 0.01,
            "algorithm.dynamic_sampling": True,
            "algorithm.aggregation": "token",
            "algorithm.clip_low": 0.2,
            "algorithm.clip_high": 0.28,
            "algorithm.clip_dual": 3.0,
            "train.betas": (0.9, 0.999),
            "log.trackers": ["wandb"],
            # 300 rows are 5 batches of 64, so three passes are ceil(900 / 64) = 15 steps; a tenth of them is 1
            "train.steps": 15,
            "train.warmup_rollout_steps": 1,
            "train.warmup_steps": 0,
        },
        [
            "reward_function: ./score/math.py:compute_score  (the grader judges answers",
            "top_p: 0.99",
            "offload_params: true",
            "brand_new: 7",
            "n_gpus_per_node: 8",
        ],
    ),
    "verl.sh": (
        VERL,
        {
            "algorithm.name": "gspo",
            "algorithm.aggregation": None,  # the rule's own
            "algorithm.clip_low": 3e-4,
            "algorithm.clip_high": 4e-4,
            "algorithm.kl_coef": 0.0,
            "rollout.sampler": "vllm",
            "train.steps": 40,
        },
        ["kl_loss_coef: 0.01"],
    ),
    "trl.yaml": (
        TRL,
        {
            # 16 responses a device x 8 passes are 128 responses: 8 prompts of 16; updates after 4 passes: 4 prompts
            "rollout.prompts_per_step": 8,
            "train.mini_batch_prompts": 4,
            "train.steps": 50,  # 100 updates, two a batch
            "train.warmup_steps": 3,
            "train.schedule": "cosine",
            "algorithm.aggregation": "token",
            "algorithm.kl_coef": 0.0,
            "model.lora.rank": 64,
            "train.lr": 1e-5,
        },
        [],
    ),
    "openrlhf.sh": (
        OPENRLHF,
        {
            "model.path": "Qwen/Qwen2.5-VL-3B-Instruct",
            "data.max_prompt_tokens": 2048,  # 3072 of both less 1024 of the response
            "rollout.prompts_per_step": 256,
            "train.mini_batch_prompts": 128,  # 1024 responses, eight to a prompt
            "algorithm.clip_high": 0.27,
            "train.schedule": "cosine",  # its default
            "rollout.vllm.enforce_eager": True,
            "model.freeze": ["tower", "merger"],
        },
        [],
    ),
    "swift.sh": (
        SWIFT,
        {
            # 4 responses x 2 x 8 processes are 64: 8 prompts of 8 responses
            "rollout.prompts_per_step": 8,
            "train.mini_batch_prompts": 8,
            "algorithm.ratio": "sequence",
            "algorithm.aggregation": None,
            "algorithm.kl_coef": 0.0,
            "reward.format": 1.0,
            "data.max_pixels": 602_112,
            "model.lora.rank": 32,
            "model.freeze": [],
            "train.zero_stage": 3,
            "train.steps": 75,  # two passes over 300 rows, 8 a step
            "train.warmup_steps": 3,  # a twentieth of 75
        },
        ["rlhf_type: grpo"],
    ),
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    image = plain_png(56, 56)
    problems = [Problem(f"p{n}", f"<image>\n{n}?", (image,), str(n), "integer") for n in range(300)]
    return write_problems(problems, tmp_path_factory.mktemp("foreign") / "mine", {"kept": 300})


def value_of(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = value[name] if isinstance(value, Mapping) else getattr(value, name)
    return value


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_theirs_is_a_recipe_of_ours(
    name: str, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, expected, left = FILES[name]
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    assert cli.main(["init", "--from", name, "--data", str(prepared), "--out", "ours.yaml"]) == 0
    printed, recipe = capsys.readouterr().out, Path("ours.yaml").read_text()
    assert "to change before it trains" not in printed
    config = load_config("ours.yaml")
    assert {key: value_of(config, key) for key in expected} == expected
    assert (config.reward.overlong_buffer, config.data.train) == (0, [str(prepared)])
    assert all(line in printed and line in recipe for line in left), printed
    assert not Path("RAN").exists()
    # every setting is a value, a line of what is left, or named as needing no key
    file = read_foreign(Path(name))
    conversion = convert(file, rows=300, processes=None)
    told = [there for _, there in conversion.values.values()] + conversion.left + conversion.same
    sources = [str(item) for items in conversion.data.values() for item in items] + [*conversion.columns.values()]
    for key, value in file.settings.items():
        assert any(key in line for line in told) or any(str(value) in (item, *item.split("@")) for item in sources), (
            key
        )
    capsys.readouterr()
    assert cli.main(["init", "--from", name, "--out", "ours.yaml"]) == 2
    assert "exists already" in capsys.readouterr().err


def converted(trainer: str, settings: Mapping[str, Any]) -> Conversion:
    return convert(ForeignFile(Path("file"), trainer, settings), rows=None, processes=None)


@pytest.mark.parametrize(
    ("trainer", "own", "others"),
    [
        (
            "verl",
            {"actor_rollout_ref.model.path": "policy", "actor_rollout_ref.actor.optim.lr": 1e-6},
            {"critic.model.path": "value", "critic.optim.lr": 1e-5, "reward_model.model.path": "judge"},
        ),
        (
            "EasyR1",
            {"worker.actor.model.model_path": "policy", "worker.actor.optim.lr": 1e-6},
            {"worker.critic.model.model_path": "value", "worker.critic.optim.lr": 1e-5},
        ),
    ],
)
def test_what_is_said_of_a_critic_or_a_reward_model_is_not_the_policys(
    trainer: str, own: dict[str, Any], others: dict[str, Any]
) -> None:
    conversion = converted(trainer, own | others)
    assert (conversion.value("model.path", ""), conversion.value("train.lr", 0)) == ("policy", 1e-6)
    for key, value in others.items():
        assert any(line.startswith(f"{key}: {value}  (a ") for line in conversion.left), conversion.left
    penalty = converted("verl", {"reward_model.overlong_buffer.len": 99, "reward_model.overlong_buffer.enable": True})
    assert penalty.value("reward.overlong_buffer", 0) == 99


OPTIMIZER, PARAM = (f"train.deepspeed.zero_optimization.offload_{part}.device" for part in ("optimizer", "param"))
OFFLOADS = {OPTIMIZER: "cpu", PARAM: "cpu"}


@pytest.mark.parametrize(
    ("trainer", "settings", "ours", "left"),
    [
        # LoRA is what ms-swift trains where nothing is said, and TRL only with use_peft
        ("ms-swift", {"lora_alpha": 64}, {"model.lora.rank": 8, "model.lora.alpha": 64}, ""),
        ("ms-swift", {"train_type": "full", "lora_rank": 8}, {"model.lora.rank": None}, ""),
        ("ms-swift", {"tuner_type": "full"}, {"model.lora.rank": None}, ""),
        ("ms-swift", {"micro_batch_size": 4}, {"model.lora.rank": None}, "micro_batch_size: 4"),  # of Megatron
        ("ms-swift", {"train_type": "adalora"}, {"model.lora.rank": None}, "train_type: adalora  (adapters here"),
        ("TRL", {"lora_r": 32}, {"model.lora.rank": None}, "lora_r: 32  (without use_peft"),
        ("TRL", {"lora_r": 32, "use_peft": False}, {"model.lora.rank": None}, "lora_r: 32  (without use_peft"),
        ("TRL", {"use_peft": True}, {"model.lora.rank": 16}, ""),
        ("verl", {"actor_rollout_ref.model.lora_rank": 0}, {"model.lora.rank": None}, ""),
        # ms-swift's own DeepSpeed files
        ("ms-swift", {"deepspeed": "zero2_offload"}, OFFLOADS | {"train.zero_stage": 2, PARAM: None}, ""),
        ("ms-swift", {"deepspeed": "zero3_offload"}, OFFLOADS | {"train.zero_stage": 3}, ""),
        ("ms-swift", {"deepspeed": "zero3"}, dict.fromkeys(OFFLOADS) | {"train.zero_stage": 3}, ""),
        ("ms-swift", {}, {"model.gradient_checkpointing": True}, ""),
        ("ms-swift", {"gradient_checkpointing": False}, {"model.gradient_checkpointing": False}, ""),
        # alpha, beside which ours is 32
        ("verl", {"actor_rollout_ref.model.lora_rank": 8}, {"model.lora.rank": 8, "model.lora.alpha": 16}, ""),
        ("OpenRLHF", {"lora_rank": 8}, {"model.lora.rank": 8, "model.lora.alpha": 16}, "init_kl_coef"),
        ("EasyR1", {"lora.rank": 8, "algorithm.disable_kl": True}, {"model.lora.alpha": 64}, ""),
        ("EasyR1", {"algorithm.disable_kl": True}, {"model.gradient_checkpointing": True}, ""),
        ("OpenRLHF", {"lora_rank": 0}, {"model.lora.alpha": None}, "init_kl_coef"),
        # a switch without a coefficient takes the trainer's own, .001
        ("verl", {"actor.use_kl_loss": True}, {"algorithm.kl_coef": 1e-3}, ""),
        ("EasyR1", {"algorithm.use_kl_loss": True}, {"algorithm.kl_coef": 1e-3}, ""),
        ("EasyR1", {}, {"algorithm.kl_coef": 0.0}, "kl_coef, its default: 0.001  (a penalty in the reward"),
        ("EasyR1", {"algorithm.disable_kl": True}, {"algorithm.kl_coef": 0.0}, ""),
        ("verl", {}, {"algorithm.kl_coef": 0.0}, ""),
        (
            "verl",
            {"actor.kl_loss_coef": 0.01},
            {"algorithm.kl_coef": 0.0},
            "kl_loss_coef: 0.01  (without use_kl",
        ),
    ],
)
def test_what_a_switch_of_theirs_turns_on_or_off(
    trainer: str, settings: dict[str, Any], ours: dict[str, Any], left: str
) -> None:
    conversion = converted(trainer, settings)
    assert {key: conversion.value(key, None) for key in ours} == ours
    assert any(left in line for line in conversion.left) if left else not conversion.left


CLIPS = ("algorithm.clip_low", "algorithm.clip_high")
CISPO = {"loss_type": "cispo"}


@pytest.mark.parametrize(
    ("trainer", "settings", "ours", "left"),
    [
        # dr_grpo of TRL and ms-swift sums otherwise, and scales by the group's deviation unless they say no
        ("TRL", {"loss_type": "dr_grpo"}, {"algorithm.advantage": "group_norm"}, ""),
        ("TRL", {"loss_type": "dr_grpo", "scale_rewards": True}, {"algorithm.advantage": "group_norm"}, ""),
        ("TRL", {"loss_type": "dr_grpo", "scale_rewards": False}, {"algorithm.advantage": "group_center"}, ""),
        ("ms-swift", {"loss_type": "dr_grpo"}, {"algorithm.advantage": "group_norm"}, ""),
        ("ms-swift", {"advantage_estimator": "rloo"}, {"algorithm.advantage": "leave_one_out"}, ""),
        ("TRL", {"scale_rewards": "mean"}, {"algorithm.advantage": None}, "scale_rewards: mean  (the scale is"),
        ("OpenRLHF", {"algo.advantage.no_std_norm": True}, {"algorithm.advantage": "group_center"}, ""),
        ("OpenRLHF", {"algo.advantage.no_std_norm": False}, {"algorithm.advantage": None}, ""),
        ("OpenRLHF", {"advantage_estimator": "dr_grpo"}, {"algorithm.aggregation": "token"}, ""),
        # EasyR1's older files have one number, beside which its later defaults say nothing
        ("EasyR1", {"worker.actor.clip_ratio": 0.1}, dict.fromkeys(CLIPS, 0.1), ""),
        ("EasyR1", {}, dict(zip(CLIPS, (0.2, 0.3), strict=True)), ""),
        # what TRL and ms-swift cut a weight of cispo off at is 5 itself, and 1 + 4 here; there is no least one
        ("TRL", CISPO | {"epsilon_high": 5.0}, {CLIPS[0]: None, CLIPS[1]: 4.0}, ""),
        ("ms-swift", CISPO | {"epsilon": 0.2}, dict.fromkeys(CLIPS), "epsilon: 0.2  (a weight of cispo has no least"),
        ("TRL", CISPO | {"epsilon_high": 0.28}, dict.fromkeys(CLIPS), "epsilon_high: 0.28  (the largest weight"),
        ("EasyR1", CISPO | {"clip_ratio_high": 0.28}, {CLIPS[1]: 0.28}, ""),
        ("OpenRLHF", {"vllm_is_truncated_threshold": [0.5, 5]}, {}, "threshold: [0.5, 5]  (one number here)"),
    ],
)
def test_a_rule_of_theirs_is_computed_as_there(
    trainer: str, settings: dict[str, Any], ours: dict[str, Any], left: str
) -> None:
    conversion = converted(trainer, settings)
    assert {key: conversion.value(key, None) for key in ours} == ours
    assert not left or any(left in line for line in conversion.left), conversion.left


TWO_UPDATES = {"num_generations": 8, "per_device_train_batch_size": 64, "steps_per_generation": 2, "max_steps": 200}


@pytest.mark.parametrize(
    ("trainer", "settings", "ours", "left"),
    [
        # of 8 prompts each, two for each 16 prompts that are sampled: 100 rollout steps
        ("TRL", TWO_UPDATES | {"save_steps": 50}, {"train.steps": 100, "checkpoint.every": 25}, ""),
        ("TRL", TWO_UPDATES | {"eval_steps": 1, "save_steps": 3}, {"eval.every": 1, "checkpoint.every": 1}, ""),
        ("TRL", TWO_UPDATES | {"save_steps": 0.1}, {"checkpoint.every": None}, "save_steps: 0.1  (a share"),
        ("verl", {"trainer.save_freq": 50}, {"checkpoint.every": 50}, ""),
        # 0 is transformers' own number of warm-up steps, beside which the ratio counts; of verl it is none
        ("TRL", TWO_UPDATES | {"warmup_steps": 0, "warmup_ratio": 0.1}, {"train.warmup_steps": 20}, ""),
        ("TRL", TWO_UPDATES | {"warmup_steps": 0.05}, {"train.warmup_steps": 10}, ""),
        ("TRL", TWO_UPDATES | {"warmup_steps": 7, "warmup_ratio": 0.1}, {"train.warmup_steps": 7}, ""),
        (
            "verl",
            {"trainer.total_training_steps": 50, "optim.lr_warmup_steps": 0, "optim.lr_warmup_steps_ratio": 0.1},
            {"train.warmup_rollout_steps": 0},
            "",
        ),
        (
            "verl",
            {"trainer.total_training_steps": 50, "optim.lr_warmup_steps": -1, "optim.lr_warmup_steps_ratio": 0.1},
            {"train.warmup_rollout_steps": 5},
            "",
        ),
        # a device of ms-swift has one response where nothing is said: 1 x 8 x 16 are 16 prompts of 8
        (
            "ms-swift",
            {"gradient_accumulation_steps": 8, "NPROC_PER_NODE": 16, "train_type": "full"},
            {"rollout.prompts_per_step": 16, "train.mini_batch_prompts": 16, "train.lr": 1e-5},
            "",
        ),
        ("ms-swift", {"train_type": "lora"}, {"train.lr": 1e-4}, ""),
        ("ms-swift", {"train_type": "lora", "learning_rate": 3e-6}, {"train.lr": 3e-6}, ""),
        # rows of verl's ranks that share one are as long together
        (
            "verl",
            {"actor.ppo_max_token_len_per_gpu": 9000, "actor.ulysses_sequence_parallel_size": 2},
            {"train.micro_batch_tokens": 18_000},
            "",
        ),
    ],
)
def test_what_they_count_in_other_units(
    trainer: str, settings: dict[str, Any], ours: dict[str, Any], left: str
) -> None:
    conversion = converted(trainer, settings)
    assert {key: conversion.value(key, None) for key in ours} == pytest.approx(ours)
    assert not left or any(left in line for line in conversion.left), conversion.left


COMPUTED = """\
gpus=4
gpus=$((gpus * 2))
n=$((gpus * 2))  # responses
lr=1e-6  # of the paper
python3 -m verl.trainer.main_ppo data.train_files=~/sets/geo.parquet data.val_files=$HOME/sets/val.parquet \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-3B-Instruct actor_rollout_ref.rollout.n=$n \\
    actor_rollout_ref.actor.optim.lr=$lr trainer.n_gpus_per_node=$gpus data.train_batch_size=$((gpus * 8)) \\
    data.max_prompt_length=$LONGEST actor_rollout_ref.actor.clip_ratio=`cat clip` trainer.total_training_steps=9 $MORE
"""


def test_what_a_shell_computes_is_no_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named with its line, a default does not take its place, and paths of one's home are written out."""
    monkeypatch.chdir(tmp_path)
    Path("computed.sh").write_text(COMPUTED)
    assert cli.main(["init", "--from", "computed.sh"]) == 0
    printed, recipe = capsys.readouterr().out, Path("computed_vlm_rl.yaml").read_text()
    for line in (
        "actor_rollout_ref.rollout.n: $n  (line 3 says n=$((gpus * 2))  # responses), which is not resolved",
        "trainer.n_gpus_per_node: $gpus  (line 2 says gpus=$((gpus * 2))), which is not resolved",
        "data.train_batch_size: $((gpus * 8))  (line 7; only a shell can compute it), which is not resolved",
        "the words $MORE: $MORE  (line 8; the file gives MORE no value), which is not resolved",
        "data.max_prompt_length: $LONGEST  (line 8; the file gives LONGEST no value), which is not resolved",
        "actor_rollout_ref.actor.clip_ratio: `cat clip`  (line 8; only a shell can compute it)",
    ):
        assert line in printed and line in recipe
    values = recipe.partition("# Not converted")[0]
    assert "$" not in values and "clip_low" not in values
    config = load_config("computed_vlm_rl.yaml", ["rollout.responses_per_prompt=4"])
    assert (config.train.lr, config.train.steps, config.data.train) == (1e-6, 9, ["data/sets_geo"])
    commands = printed.partition("next:\n")[2].splitlines()
    assert commands == [
        f"  vlm-rl prepare {Path.home()}/sets/geo.parquet --out data/sets_geo",
        f"  vlm-rl prepare {Path.home()}/sets/val.parquet --out data/sets_val",
        "  vlm-rl train computed_vlm_rl.yaml --dry-run",
    ]


def test_sets_that_are_not_prepared_get_their_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("easyr1.yaml").write_text(EASYR1)
    assert cli.main(["init", "--from", "easyr1.yaml"]) == 0
    printed = capsys.readouterr().out
    prepare = (
        "vlm-rl prepare org/triangles --split train --question problem --answer answer --out data/triangles_train"
    )
    assert prepare in printed and "trainer.total_epochs: 3  (train.steps is 3 x rows / 64" in printed
    assert load_config("easyr1_vlm_rl.yaml").data.train == ["data/triangles_train"]
    Path("trl.yaml").write_text(TRL)
    assert cli.main(["init", "--from", "trl.yaml"]) == 0
    assert "vlm-rl prepare org/maths --split train --out data/maths_train\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("none.yaml", None, "is not there"),
        ("list.yaml", "- 1\n", "no mapping of settings"),
        ("broken.yaml", "a: [", "cannot be read as YAML"),
        ("digits.yaml", "num_generations: 0x" + "f" * 10_000, "cannot be read as YAML: line 1: a number of 10002"),
        ("time.yaml", "num_generations: 2001-99-99", "cannot be read as YAML: month must be in"),
        ("other.yaml", "model: {path: x}\n", "none of the files that are known"),
        ("other.sh", "python train.py --lr 1\n", "no line starts a trainer that is known"),
        ("quote.sh", "swift rlhf --model 'x\n", "cannot be read as a shell script"),
        ("empty.sh", "swift rlhf --rlhf_type grpo\n", "names no model: add --model"),
    ],
)
def test_what_cannot_be_converted_is_said(
    name: str, text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    assert cli.main(["init", "--from", str(path), "--out", str(tmp_path / "out.yaml")]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "out.yaml").exists()


def test_init_without_a_file_needs_model_and_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init"]) == 2
    assert "--model and --data missing" in capsys.readouterr().err


def test_a_file_of_theirs_given_to_train_is_answered_by_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "easyr1.yaml"
    path.write_text(EASYR1)
    assert cli.main(["train", str(path), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "keys of another trainer, EasyR1 by their names" in said.splitlines()[0]
    assert said.splitlines()[-1] == f"to convert it: vlm-rl init --from {path}"
    assert all(line.startswith("  ") for line in said.splitlines()[1:-1]), "nothing but the table between them"
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in said.splitlines() if line.startswith("  ")}
    assert rows["worker.rollout.n"] == "rollout.responses_per_prompt"
    assert rows["worker.rollout.val_override_config.temperature"] == "eval.temperature"
    assert rows["worker.actor.optim.lr_warmup_ratio"] == "train.warmup_rollout_steps"
    assert rows["trainer.brand_new"] == "not known"  # although its parent is known to nobody


@pytest.mark.parametrize(
    ("text", "trainer"),
    [
        ("actor_rollout_ref: {rollout: {n: '${oc.env:N}'}}\n", "verl"),
        ("worker: {actor: {global_batch_size: 16}}\ntrainer: {save_checkpoint_path: '${out}'}\n", "EasyR1"),
        (f"{TRL}output_dir: ${{OUT}}\n", "TRL"),
        (
            "actor: {model_name_or_path: m, adam: {lr: 1e-6}}\n"
            "rollout: {n_samples_per_prompt: 8, max_new_tokens: 9}\n"
            "algo: {advantage: {estimator: group_norm}}\nckpt: {output_dir: '${oc.env:OUT}'}\n",
            "OpenRLHF",
        ),
    ],
)
def test_an_interpolation_in_a_file_of_theirs_leads_to_its_conversion(
    text: str, trainer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    assert cli.main(["train", str(path), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert said == f"vlm-rl: {path} is a file of {trainer}, by its keys; to convert it: vlm-rl init --from {path}\n"
    assert read_foreign(path).trainer == trainer


def test_a_slip_in_a_name_of_theirs_leads_to_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "num_generation"]) == 2
    assert "did you mean 'num_generations'?" in (said := capsys.readouterr().err)
    assert "is rollout.responses_per_prompt here" in said
    path = tmp_path / "mine.yaml"
    path.write_text("out: runs/x\nmodel: {path: m}\ndata: {train: [d]}\ntrain: {max_completion_lenght: 5}\n")
    assert cli.main(["train", str(path), "--dry-run"]) == 2
    assert "is rollout.max_tokens here" in capsys.readouterr().err
    path.write_text("out: runs/x\nmodel: {path: m}\ndata: {train: [d]}\nactor: {ppo_mini_batch_siz: 3}\n")
    assert cli.main(["train", str(path), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "unknown key actor.ppo_mini_batch_siz: did you mean 'ppo_mini_batch_size'?" in said
    assert "is train.mini_batch_prompts here" in said
