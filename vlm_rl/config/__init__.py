"""The configuration of a run: strict models, read from YAML with dotted overrides.

    config = load_config("configs/toy.yaml", ["algorithm.name=ba", "train.lr=1e-5"])

    base            what every section does: it refuses unknown keys and values that do not fit together
    policy          the sections model and data
    templates       the section data.template, a prompt template of one's own
    rewards         the section reward
    algorithm       the section algorithm
    distillation    the section algorithm.distillation
    rollout         the section rollout
    environments    the section environment
    evaluation      the section eval
    engines         what DeepSpeed's and vLLM's own options may not set
    training        the sections train, checkpoint and log, and the whole of a training run
    resuming        which keys a resume may change
    sft             the whole of a supervised fine-tuning
    reading         from YAML and overrides to a checked configuration, and back
    messages        what is wrong in it, in words
    names           checks of names and addresses
    foreign_names   what other trainers call our keys
    key_reference   describe every key, in the terminal and in docs/config.md

The text below each key is its documentation: `vlm-rl config` and docs/config.md are made from it. Options of
DeepSpeed and vLLM pass through unchanged in ``train.deepspeed`` and ``rollout.vllm``. Nothing here imports torch.
"""

from vlm_rl.config.algorithm import AlgorithmConfig, HadwConfig
from vlm_rl.config.base import ConfigSection
from vlm_rl.config.distillation import DistillationConfig
from vlm_rl.config.environments import SHIPPED_ENVIRONMENTS, EnvironmentConfig
from vlm_rl.config.messages import explain
from vlm_rl.config.names import check_benchmark_name, is_plain_address, is_server_address, is_variable_name
from vlm_rl.config.policy import (
    Checkpointing,
    DataConfig,
    LayerPatches,
    LoraConfig,
    ModelConfig,
    ModelPart,
    RowFormat,
)
from vlm_rl.config.reading import (
    changed_keys,
    find_template,
    leaves,
    load_config,
    load_sft_config,
    parse_config,
    parse_tree,
    put,
    read_template,
    read_tree,
    recorded_template,
    save_config,
    with_values,
)
from vlm_rl.config.resuming import ENGINE_KEYS, MUTABLE_KEYS
from vlm_rl.config.rewards import (
    FunctionConfig,
    GroundingConfig,
    IouConfig,
    JudgeConfig,
    RewardConfig,
    RewardModelConfig,
    RewardPartConfig,
)
from vlm_rl.config.rollout import ENGINE_SHARE, LARGEST_ENGINE_SHARE, Quantization, RolloutConfig
from vlm_rl.config.sft import SftConfig
from vlm_rl.config.training import CheckpointConfig, Config, TrackersConfig, TrainConfig

__all__ = [
    "ENGINE_KEYS",
    "ENGINE_SHARE",
    "LARGEST_ENGINE_SHARE",
    "MUTABLE_KEYS",
    "SHIPPED_ENVIRONMENTS",
    "AlgorithmConfig",
    "CheckpointConfig",
    "Checkpointing",
    "Config",
    "ConfigSection",
    "DataConfig",
    "DistillationConfig",
    "EnvironmentConfig",
    "FunctionConfig",
    "GroundingConfig",
    "HadwConfig",
    "IouConfig",
    "JudgeConfig",
    "LayerPatches",
    "LoraConfig",
    "ModelConfig",
    "ModelPart",
    "Quantization",
    "RewardConfig",
    "RewardModelConfig",
    "RewardPartConfig",
    "RolloutConfig",
    "RowFormat",
    "SftConfig",
    "TrackersConfig",
    "TrainConfig",
    "changed_keys",
    "check_benchmark_name",
    "explain",
    "find_template",
    "foreign_names",
    "is_plain_address",
    "is_server_address",
    "is_variable_name",
    "key_reference",
    "leaves",
    "load_config",
    "load_sft_config",
    "parse_config",
    "parse_tree",
    "put",
    "read_template",
    "read_tree",
    "recorded_template",
    "save_config",
    "with_values",
]
_USES = ["untrusted"]
