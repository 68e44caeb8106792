"""The learner on a pretended GPU: every family, loaded, compared, computed and changed as in a run.

No test here moves a tensor that the product has to move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
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
from vlm_rl.config import LoraConfig, RowFormat, parse_config
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.devices import default_device
from vlm_rl.doctor.attention import FUSED, AttentionKernels, attention_bf16, attention_fp32
from vlm_rl.learner.architectures import SUPPORTED
from vlm_rl.learner.attention import shared_prefix
from vlm_rl.learner.attention import vision as vision_attention
from vlm_rl.learner.checkpoint_files import host_copy
from vlm_rl.learner.deepspeed import offload_optimizer, reload_optimizer
from vlm_rl.learner.head import Head
from vlm_rl.learner.packing import PackedRow, move
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.learner.reference import Reference
from vlm_rl.learner.self_check import SelfCheck
from vlm_rl.losses import RATIOS, SURROGATES, policy_loss, supervised_loss
from vlm_rl.model_files.adapters import BaseModel
from vlm_rl.session.parts import load_reference
from vlm_rl.session.teacher import load_teacher
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
    ("model_type", "rows", "most"),
    [
        *(("qwen3", "auto", 1), ("qwen3_moe", "auto", 1), ("qwen3_moe", "padded", 1), ("internvl", "auto", 3)),
        *(("gemma3_text", "auto", 2), ("qwen2_5_vl", "auto", 19), ("qwen3_vl", "auto", 23)),
    ],
)
def test_the_host_seldom_waits_for_a_row(
    gpu: PretendedCuda, model_type: str, rows: RowFormat, most: int, family_model: FamilyModel
) -> None:
    """Each wait is until the GPU has nothing left to do. The towers' are transformers' own."""
    folder = family_model(model_type)
    model = load_model(folder, dtype=torch.bfloat16, rows=rows)
    policy = Policy(model, banned_ids=BANNED, temperature=TEMPERATURE, rows=rows)
    policy.enable_checkpointing()
    vocabulary = policy.model.config.get_text_config().vocab_size
    row = packed_row(policy, groups_of(model_type, folder, vocabulary))
    gpu.host_reads.clear()
    row = row.to("cuda")
    logp_K, entropy_K = policy(row)
    loss, _ = policy_loss(
        logp_K, entropy_K, row.loss, ratio="token", surrogate="sapo", kl_coef=0.0, entropy_coef=0.1, **OPTIONS
    )
    loss.backward()
    policy.routers.take()
    assert sum(gpu.host_reads.values()) <= most, gpu.host_reads


def test_a_row_of_text_brings_its_unused_image_without_a_wait(
    gpu: PretendedCuda, policy_and_row: tuple[Policy, PackedRow], tiny_model: Path
) -> None:
    policy, _ = policy_and_row
    text, *_ = groups_of("qwen2_5_vl", tiny_model, policy.model.config.get_text_config().vocab_size)
    row = packed_row(policy, [text])
    assert not row.vision
    gpu.host_reads.clear()
    policy(row.to("cuda"))
    assert not [what for what in gpu.host_reads if what.startswith("to cuda")]


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
    again = row.to("cuda").to("cuda")  # what is there cannot be pinned
    assert again.ids_T.is_cuda


def test_a_row_left_behind_is_refused(policy_and_row: tuple[Policy, PackedRow]) -> None:
    policy, row = policy_and_row
    with pytest.raises(RuntimeError, match="same device"):
        policy(row)


@pytest.mark.parametrize("ratio", list(RATIOS))
@pytest.mark.parametrize("surrogate", list(SURROGATES))
def test_the_loss_stays_on_its_device(policy_and_row: tuple[Policy, PackedRow], ratio: str, surrogate: str) -> None:
    """With everything that an algorithm may add to it, and a distillation over the teacher's likeliest ids."""
    _, row = policy_and_row
    size = len(row.target_K)
    before_K = torch.linspace(-2, -1, size)
    inputs = replace(
        row.loss,
        **dict.fromkeys(("old_logp_K", "sampler_logp_K", "reference_logp_K", "teacher_logp_K"), before_K),
        tenth_n=torch.zeros_like(row.loss.lengths_n),
        fresh_K=torch.ones(size, dtype=torch.bool),
        credit_K=torch.ones(size),
        blind_logp_K=before_K,
        teacher_top_Kk=before_K[:, None],
        mean_weight=torch.tensor(1 / size),
    )
    logp_K = torch.full((size,), -1.0, device="cuda", requires_grad=True)
    options: dict[str, Any] = {"kl_coef": 0.1, "entropy_coef": 0.1, "perception_coef": 0.1, "rejection": "token"}
    for top_Kk in (None, logp_K[:, None]):
        loss, sums = policy_loss(
            logp_K, logp_K, move(inputs, "cuda"), top_Kk, ratio=ratio, surrogate=surrogate, clip_dual=3.0,
            distillation_coef=0.1, **options, **OPTIONS,
        )  # fmt: skip
        loss.backward()
        assert all(value.is_cuda for value in (loss, *sums.values()))
    assert {"by_length", "fresh_tokens", "rejected", "kl", "perception", "teacher_mass", "clipped_dual"} < sums.keys()
    loss, sums = supervised_loss(logp_K, logp_K, move(inputs, "cuda"))
    assert loss.is_cuda and sums["tokens"].is_cuda


@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1), (2,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_head_stays_on_its_device(
    gpu: PretendedCuda, dtype: torch.dtype, soft_cap: float | None, wanted: tuple[int, ...]
) -> None:
    """Whichever of log-probs, entropies and log-probs of further ids have a gradient, and nobody waits for it."""
    head = Head(nn.Linear(4, 8, bias=False).to("cuda", dtype), banned_ids=[1], temperature=0.7, soft_cap=soft_cap)
    hidden_KH = torch.ones(3, 4, device="cuda", dtype=dtype, requires_grad=True)
    ids_Kk = torch.zeros(3, 2, dtype=torch.int64, device="cuda") if 2 in wanted else None
    gpu.host_reads.clear()
    scores = head(hidden_KH, torch.zeros(3, dtype=torch.int64, device="cuda"), ids_Kk=ids_Kk)
    sum((scores[n].sum() for n in wanted), torch.zeros((), device="cuda")).backward()
    assert hidden_KH.grad is not None and hidden_KH.grad.is_cuda and head.weight.grad is not None
    likeliest = head(hidden_KH, torch.zeros(3, dtype=torch.int64, device="cuda"), top_k=2)[2:]
    assert all(x.is_cuda for x in likeliest) and not gpu.host_reads


def test_what_a_checkpoint_writes_later_is_copied_to_the_host(gpu: PretendedCuda) -> None:
    """Once for all tensors that share it."""
    whole, here = torch.arange(4.0, device="cuda"), torch.ones(2)
    copy = host_copy({"whole": whole, "part": whole[1:3], "here": here})
    for tensor in (whole, here):
        tensor.zero_()
    assert [x.tolist() for x in copy.values()] == [[0, 1, 2, 3], [1, 2], [1, 1]]
    assert not any(x.is_cuda for x in copy.values())
    copy["part"].zero_()
    assert copy["whole"].tolist() == [0, 0, 0, 3]


def test_adapters_are_where_the_model_is(policy_and_row: tuple[Policy, PackedRow]) -> None:
    policy, row = policy_and_row
    expected_K, _ = policy(row.to("cuda"))
    policy.add_adapters(LoraConfig(rank=4), base=BaseModel("base", "0" * 64), seed=0)
    logp_K, _ = policy(row.to("cuda"))
    torch.testing.assert_close(logp_K, expected_K)
    logp_K.sum().backward()
    assert {p.device.type for p in policy.parameters()} == {"cuda"}
    assert all(p.grad is None or p.grad.is_cuda for p in policy.parameters())


def test_activations_go_to_host_memory_and_return(
    gpu: PretendedCuda, policy_and_row: tuple[Policy, PackedRow]
) -> None:
    policy, row = policy_and_row
    row = row.to("cuda")
    policy(row)[0].sum().backward()
    expected = [p.grad.clone() for p in policy.parameters()]
    policy.zero_grad()
    policy.enable_checkpointing(offload=True)
    logp_K, _ = policy(row)
    gpu.host_reads.clear()
    logp_K.sum().backward()
    assert not [what for what in gpu.host_reads if what.startswith("to cuda")], "what returns was not pinned"
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
    monkeypatch.setattr(shared_prefix, "can_use_flash_attention", lambda _: False)  # of an older card
    answer = attention_bf16(None)
    assert answer.outcome == "off" and f"not {FUSED}" in answer.detail, answer
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


@pytest.mark.parametrize("offload", [True, False], ids=["offloaded", "stays"])
def test_frozen_models_are_on_the_card_while_they_score(gpu: PretendedCuda, offload: bool, tiny_model: Path) -> None:
    """The reference leaves its room to the update and the engine; so does a teacher, unless it may stay.

    They do where memory ends while they score, too: the rows are then made shorter, and scored again.
    """
    path = str(tiny_model)
    algorithm = {"kl_coef": 0.1, "distillation": {"teacher": path, "coef": 0.1, "offload": offload}}
    config = parse_config(
        {"out": "x", "model": {"path": path}, "data": {"train": ["x"]}, "algorithm": algorithm}, where="here"
    )
    builder = PromptBuilder(tiny_model, template=TEMPLATES["plain"])
    learner: Any = SimpleNamespace(device=default_device())
    teacher = load_teacher(config, learner, builder, is_stopped=lambda: False, note=lambda _: None)
    assert teacher is not None
    for frozen, stays in ((load_reference(config, learner, builder), False), (teacher.model, not offload)):
        assert isinstance(frozen, Reference)
        weights = frozen.model
        places = [{weight.is_cuda for weight in weights.parameters()}]
        with frozen.on_device(learner.device):
            places.append({weight.is_cuda for weight in weights.parameters()})
        places.append({weight.is_cuda for weight in weights.parameters()})
        with pytest.raises(torch.OutOfMemoryError), frozen.on_device(learner.device):
            raise torch.OutOfMemoryError
        places.append({weight.is_cuda for weight in weights.parameters()})
        assert places == [{stays}, {True}, {stays}, {stays}]


def test_an_optimizer_that_gives_way_to_the_engine_is_pinned(
    gpu: PretendedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By DeepSpeed in ZeRO 2, and by ourselves in ZeRO 3, after which the card has the room back."""
    asked: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append(True))
    whole: Any = SimpleNamespace(
        device=default_device(),
        zero_optimization_stage=lambda: 2,
        offload_states=lambda include, pin_memory: asked.append(pin_memory),
    )
    offload_optimizer(whole)
    assert asked.pop()
    master, moment = torch.ones(3, device="cuda"), torch.ones(3, device="cuda")
    optimizer = SimpleNamespace(
        offloaded_states=set(),
        fp16_partitioned_groups_flat=[],
        fp32_partitioned_groups_flat=[master],
        optimizer=SimpleNamespace(state={0: {"exp_avg": moment}}),
    )
    shards: Any = SimpleNamespace(device=default_device(), zero_optimization_stage=lambda: 3, optimizer=optimizer)
    offload_optimizer(shards)
    assert [(tensor.is_cuda, tensor.is_pinned()) for tensor in (master, moment)] == [(False, True)] * 2 and asked
    reload_optimizer(shards)
    assert master.is_cuda and moment.is_cuda
