"""The learner on a pretended GPU: every family, loaded, compared, computed and changed as in a run.

No test here moves a tensor that the product has to move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from tests.helpers.family_rows import BANNED, TEMPERATURE, WITH_EXPERTS, groups_of, packed_row, routed
from tests.helpers.groups import WeighedGroup, random_group
from tests.helpers.pretended_cuda import PretendedCuda
from tests.helpers.rotation import todays
from tests.helpers.torch_versions import VARLEN
from tests.helpers.videos import LONG, SHORT, VIDEO_TYPES, video_problem
from vlm_rl.config import LoraConfig
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.devices import default_device
from vlm_rl.doctor.attention import FUSED, AttentionKernels, attention_bf16, attention_fp32
from vlm_rl.learner.architectures import SUPPORTED
from vlm_rl.learner.attention import vision as vision_attention
from vlm_rl.learner.packing import PackedRow
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.learner.self_check import SelfCheck
from vlm_rl.losses import RATIOS, SURROGATES, policy_loss, supervised_loss
from vlm_rl.model_files.adapters import BaseModel
from vlm_rl.templates import TEMPLATES

TOLERANCE = 3e-5  # of log-probs, and of a gradient's distance over its norm
# Whose rows, towers and layers are of the kinds that another type has too.
LIKE_ANOTHER = (
    *("glm46v", "glm4v", "llama", "llava", "mistral"),
    *("qwen2", "qwen2_vl", "qwen3_5", "qwen3_vl", "smolvlm"),
)
OPTIONS = {"clip_low": 0.1, "clip_high": 0.1, "cap": 2.0}
FamilyModel = Callable[[str], Path]  # the fixture family_model


def each_of(types: Iterable[str]) -> pytest.MarkDecorator:
    """Run the test on half of these types a day, and on those like another among the slow tests."""
    names = [*types]
    slow = [pytest.param(name, marks=pytest.mark.slow) for name in names if name in LIKE_ANOTHER]
    return pytest.mark.parametrize(
        "model_type", [*todays([n for n in names if n not in LIKE_ANOTHER], days=2), *slow]
    )


def computed(
    model_type: str, folder: Path, dtype: torch.dtype, groups: list[WeighedGroup] | None = None
) -> tuple[Tensor, Tensor]:
    """Return log-probs [K] of a row and the gradient of all weights, end to end, as a run computes them."""
    vocabulary = AutoConfig.from_pretrained(folder).get_text_config().vocab_size
    groups = groups or groups_of(model_type, folder, vocabulary)
    model = load_model(folder, dtype=dtype)
    check = SelfCheck(model, [group.prompt for group in groups], banned_ids=BANNED, temperature=TEMPERATURE)
    policy = Policy(model, banned_ids=BANNED, temperature=TEMPERATURE, layer_patches=True)
    check.compare(policy, path=folder)
    policy.enable_checkpointing()
    device = default_device()
    logp_K, entropy_K = policy(packed_row(policy, groups).to(device))
    (logp_K.sum() + 0.1 * entropy_K.sum()).backward()
    grads = [p.grad for p in policy.model.parameters() if p.grad is not None]
    assert {x.device for x in (logp_K, entropy_K, *grads)} == {device}
    return logp_K.detach().cpu(), torch.cat([grad.flatten() for grad in grads]).float().cpu()


@each_of(SUPPORTED)
def test_a_family_computes_on_a_gpu_what_it_does_on_a_cpu(model_type: str, family_model: FamilyModel) -> None:
    """Experts are replayed, in packed and in padded rows; in the self-check before, routers choose their own."""
    folder = family_model(model_type)
    config = AutoConfig.from_pretrained(folder).get_text_config()
    groups = groups_of(model_type, folder, config.vocab_size)
    if model_type in WITH_EXPERTS:
        groups = [routed(group, config.num_hidden_layers, n) for n, group in enumerate(groups)]
    compare(model_type, folder, groups)


def compare(model_type: str, folder: Path, groups: list[WeighedGroup]) -> None:
    logp_K, grad = computed(model_type, folder, torch.float32, groups)
    with PretendedCuda():
        on_gpu_K, grad_on_gpu = computed(model_type, folder, torch.float32, groups)
    torch.testing.assert_close(on_gpu_K, logp_K, atol=TOLERANCE, rtol=0)
    assert (grad_on_gpu - grad).norm() < TOLERANCE * grad.norm()


@each_of(VIDEO_TYPES)
def test_videos_are_computed_on_a_gpu(model_type: str, family_model: FamilyModel) -> None:
    folder = family_model(model_type)
    builder = PromptBuilder(folder, template=TEMPLATES["plain"])
    builder.allow_videos([video_problem(SHORT)])
    vocabulary = AutoConfig.from_pretrained(folder).get_text_config().vocab_size
    prompts = [builder.build(video_problem(*videos)) for videos in ([SHORT], [LONG, SHORT])]
    compare(
        model_type, folder, [random_group(p, [5, 8], vocabulary=vocabulary, seed=n) for n, p in enumerate(prompts)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "gemma3_text", "internvl", "qwen3_vl_moe", "qwen3_5"])
def test_a_family_computes_in_bfloat16_on_a_gpu(model_type: str, family_model: FamilyModel) -> None:
    """By the flash kernel, where rows are packed; within bfloat16's rounding of what a CPU computes in float32."""
    folder = family_model(model_type)
    logp_K, _ = computed(model_type, folder, torch.float32)
    with PretendedCuda():
        rounded_K, _ = computed(model_type, folder, torch.bfloat16)
    assert (rounded_K - logp_K).abs().mean() < 0.2


@pytest.fixture
def gpu() -> Iterator[PretendedCuda]:
    with PretendedCuda() as pretended:
        yield pretended


@pytest.fixture
def policy_and_row(gpu: PretendedCuda, tiny_model: Path) -> tuple[Policy, PackedRow]:
    """A policy of the tiny model, and a row of three prompts with and without images, not moved yet."""
    policy = Policy(load_model(tiny_model, dtype=torch.float32), banned_ids=BANNED, temperature=TEMPERATURE)
    vocabulary = policy.model.config.get_text_config().vocab_size
    return policy, packed_row(policy, groups_of("qwen2_5_vl", tiny_model, vocabulary))


@pytest.mark.parametrize(
    ("model_type", "most"), [("qwen3", 1), ("qwen3_moe", 1), ("internvl", 3), ("qwen2_5_vl", 10), ("qwen3_vl", 8)]
)
def test_the_host_seldom_waits_for_a_row(
    gpu: PretendedCuda, model_type: str, most: int, family_model: FamilyModel
) -> None:
    """Each read of a tensor's values makes the host wait until the GPU has nothing left to do."""
    folder = family_model(model_type)
    policy = Policy(load_model(folder, dtype=torch.bfloat16), banned_ids=BANNED, temperature=TEMPERATURE)
    policy.enable_checkpointing()
    vocabulary = policy.model.config.get_text_config().vocab_size
    row = packed_row(policy, groups_of(model_type, folder, vocabulary)).to("cuda")
    gpu.host_reads.clear()
    logp_K, entropy_K = policy(row)
    loss, _ = policy_loss(
        logp_K, entropy_K, row.loss, ratio="token", surrogate="clip", kl_coef=0.0, entropy_coef=0.1, **OPTIONS
    )
    loss.backward()
    assert sum(gpu.host_reads.values()) <= most, gpu.host_reads


def tensors_in(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, f"{name}[{key}]")
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{name}[{index}]")


def test_every_tensor_of_a_row_moves(policy_and_row: tuple[Policy, PackedRow]) -> None:
    _, row = policy_and_row
    moved = dict(tensors_in(row.to("cuda"), "row"))
    assert moved.keys() == dict(tensors_in(row, "row")).keys()
    assert {"row.loss.weights_n", "row.layout.own.queries", "row.vision[pixel_values]"} < moved.keys()
    assert not [name for name, tensor in moved.items() if not tensor.is_cuda]


def test_a_row_left_behind_is_refused(policy_and_row: tuple[Policy, PackedRow]) -> None:
    policy, row = policy_and_row
    with pytest.raises(RuntimeError, match="same device"):
        policy(row)


@pytest.mark.parametrize("ratio", list(RATIOS))
@pytest.mark.parametrize("surrogate", list(SURROGATES))
def test_the_loss_stays_on_its_device(policy_and_row: tuple[Policy, PackedRow], ratio: str, surrogate: str) -> None:
    _, row = policy_and_row
    inputs = row.to("cuda").loss
    logp_K = torch.full((len(row.target_K),), -1.0, device="cuda", requires_grad=True)
    loss, sums = policy_loss(
        logp_K, logp_K, inputs, ratio=ratio, surrogate=surrogate, kl_coef=0.0, entropy_coef=0.1, **OPTIONS
    )
    loss.backward()
    assert all(value.is_cuda for value in (loss, *sums.values()))
    assert supervised_loss(logp_K, logp_K, inputs)[0].is_cuda


def test_adapters_are_where_the_model_is(policy_and_row: tuple[Policy, PackedRow]) -> None:
    policy, row = policy_and_row
    expected_K, _ = policy(row.to("cuda"))
    policy.add_adapters(LoraConfig(rank=4), base=BaseModel("base", "0" * 64), seed=0)
    logp_K, _ = policy(row.to("cuda"))
    torch.testing.assert_close(logp_K, expected_K)
    logp_K.sum().backward()
    assert {p.device.type for p in policy.parameters()} == {"cuda"}
    assert all(p.grad is None or p.grad.is_cuda for p in policy.parameters())


def test_activations_go_to_host_memory_and_return(policy_and_row: tuple[Policy, PackedRow]) -> None:
    policy, row = policy_and_row
    row = row.to("cuda")
    policy(row)[0].sum().backward()
    expected = [p.grad.clone() for p in policy.parameters()]
    policy.zero_grad()
    policy.enable_checkpointing(offload=True)
    policy(row)[0].sum().backward()
    for parameter, grad in zip(policy.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_a_forward_pass_without_gradients_recomputes_nothing_and_warns_of_nothing(
    policy_and_row: tuple[Policy, PackedRow], zero_stage: int, recwarn: pytest.WarningsRecorder
) -> None:
    """torch warned once a layer and step, where layers are checkpointed and no input has a gradient."""
    policy, row = policy_and_row
    policy.enable_checkpointing(zero_stage=zero_stage)
    with torch.no_grad():
        policy(row.to("cuda"))
    assert not [str(warning.message) for warning in recwarn if "requires_grad" in str(warning.message)]


def test_the_doctor_sees_the_kernels_of_a_gpu(gpu: PretendedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    from vlm_rl.doctor import attention

    monkeypatch.setattr(attention, "ON_GPU", attention.ON_CPU)  # a reference in Python computes them
    attention._expected.cache_clear()  # an earlier test's are on the CPU
    answer = attention_bf16(None)
    assert answer.outcome == "ok" and FUSED in answer.detail, answer
    assert attention_fp32(None).outcome == "ok"
    attention._expected.cache_clear()


@pytest.mark.parametrize("version", [None, *VARLEN])
def test_windows_of_the_vision_tower_take_one_call(
    gpu: PretendedCuda, version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through this torch's function, and with the arguments that a version's has."""
    if version is not None:
        stand_in = VARLEN[version]

        def varlen_attn(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            signature(stand_in).bind(query, *args, **kwargs)
            return stand_in(query, *args, **kwargs)

        monkeypatch.setattr(vision_attention, "varlen_attn", varlen_attn)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 4, 12, 8, generator=generator).bfloat16() for _ in range(3)]
    cuts, options = torch.tensor([0, 4, 8, 12], dtype=torch.int32), {"scaling": 8**-0.5, "max_length_q": 4}
    expected, _ = vision_attention.windowed_attention(nn.Module(), *inputs, None, cu_seq_lens_q=cuts, **options)
    with AttentionKernels() as kernels:
        on_gpu = [x.cuda() for x in (*inputs, cuts)]
        output, _ = vision_attention.windowed_attention(
            nn.Module(), *on_gpu[:3], None, cu_seq_lens_q=on_gpu[3], **options
        )
    assert output.is_cuda and output.shape == (1, 12, 4, 8)
    torch.testing.assert_close(output.cpu(), expected, atol=2e-2, rtol=0)
    if version is None:
        assert kernels.names == {"torch_attn::_varlen_attn"}, "the doctor names this kernel"
