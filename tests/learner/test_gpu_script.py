"""perf/gpu_learner.py, which measures the learner on a GPU: what of it a CPU can check."""

from __future__ import annotations

from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vlm_rl.learner.attention import shared_prefix as attention
from vlm_rl.learner.attention.shared_prefix import may_attend, shared_prefix_attention
from vlm_rl.learner.packing import row_layout
from vlm_rl.planning import memory

CPU = torch.device("cpu")
ROWS = [  # spans of each prompt, and of its responses
    [((0, 5), [(5, 3), (8, 1)])],
    [((0, 17), [(17, 16), (33, 40)]), ((73, 1), [(74, 9)])],
    [((0, 32), [(32, 64)]), ((96, 16), [(112, 16), (128, 48)])],  # whole blocks of 16
]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module: perf/ is not a package."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "perf"))
    return import_module("gpu_learner")


@pytest.fixture
def flex(script: Any) -> Any:
    return import_module("flex_rows")


def size_of(spans: Any) -> int:
    return max(start + length for _, responses in spans for start, length in responses)


@pytest.mark.parametrize("spans", ROWS)
def test_the_block_mask_is_that_of_the_row(spans: Any, flex: Any) -> None:
    """Each block is left out, whole or in part as the dense mask says; so is each pair inside a block."""
    size, block = size_of(spans), 16
    layout = row_layout(spans)
    dense = may_attend(layout, size)
    mask = flex.block_mask(layout, size, block)
    index = torch.arange(size)
    assert torch.equal(mask.mask_mod(0, 0, index[:, None], index), dense)
    blocks = -(-size // block)
    wanted = torch.zeros(blocks, blocks, dtype=torch.int64)  # 0 left out, 1 in part, 2 whole
    for q in range(blocks):
        for kv in range(blocks):
            part = dense[q * block : (q + 1) * block, kv * block : (kv + 1) * block]
            wanted[q, kv] = 2 if int(part.sum()) == block**2 else int(part.any())
    got = torch.zeros_like(wanted)
    for kind, counts, order in (
        (1, mask.kv_num_blocks, mask.kv_indices),
        (2, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        for q in range(blocks):
            got[q, order[0, 0, q, : counts[0, 0, q]].long()] += kind
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("spans", ROWS)
def test_flex_attention_agrees_with_ours(spans: Any, flex: Any) -> None:
    torch.manual_seed(0)
    size, layout = size_of(spans), row_layout(spans)
    q, k, v = (torch.randn(1, heads, size, 16) for heads in (4, 2, 2))
    with torch.no_grad():
        got = flex.flex_rows(nn.Identity(), q, k, v, None, 0.3, layout)[0]
        wanted = shared_prefix_attention(nn.Identity(), q, k, v, None, 0.3, layout)[0]
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_the_check_finds_wrong_gradients(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In our rows, which err by a twentieth here, and nowhere else."""
    right = attention._CPU

    def backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return tuple(1.05 * grad for grad in right.backward(*args, **kwargs))

    monkeypatch.setattr(attention, "_CPU", right._replace(backward=backward))
    assert not script.is_correct("tiny", CPU, tokens=12, side=4)
    printed = capsys.readouterr().out.splitlines()
    lines = [cells for line in printed if len(cells := line.strip("| ").split(" | ")) >= 4 and "float" in cells[1]]
    assert len(lines) == 10
    assert all(float(logp) < (1e-5 if dtype == "float32" else 0.1) for _, dtype, logp, *_ in lines)
    wrong = {way for way, _, _, gap, *_ in lines if "ABOVE" in gap}
    assert wrong == {"auto", "patched", "unpatched"}


def test_the_policy_is_on_its_device(script: Any) -> None:
    """With all that the forward pass reads beside the weights: rotary frequencies and the banned ids."""
    policy = script.make_policy(script.make_config("tiny"), torch.device("meta"), torch.float32, way="auto")
    tensors = dict(policy.named_buffers()) | dict(policy.named_parameters())
    assert "head.banned" in tensors and not [name for name, t in tensors.items() if t.device.type != "meta"]


def test_the_planned_peak_is_the_dry_runs_count(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With this script's optimizer: masters beside the moments, or nothing."""
    groups = script.make_groups(512, prompts=1, responses=2, tokens=40, side=8, text=30)
    policy = script.make_policy(script.make_config("tiny"), torch.device("meta"), torch.float32, way="auto")
    options = Namespace(device="cuda", checkpointing=False, offload=False, optimizer="adamw")

    def planned(**changes: Any) -> float:
        return script.planned_peak(policy, groups, "auto", Namespace(**(vars(options) | changes))) * 2**30

    parameters = sum(p.numel() for p in policy.model.parameters())
    assert planned() - planned(optimizer="none") == pytest.approx(12 * parameters)
    before = planned()
    assert before > 16 * parameters and planned(checkpointing=True) < before
    for name in ("_head", "_activations"):
        counted = getattr(memory, name)
        monkeypatch.setattr(memory, name, lambda *a, _f=counted, **k: _f(*a, **k) + 2**20)
    assert planned() - before == pytest.approx(2 * 2**20)


def test_the_plan_is_for_one_image_of_the_groups_size(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(script, "memory_of_rank", lambda config, *a, **k: seen.append(config) or nothing())

    def nothing() -> Any:
        return memory.Memory(0, 0, 0, 0, 0, 0, 0, 0)

    policy = script.make_policy(script.make_config("tiny"), torch.device("meta"), torch.float32, way="auto")
    groups = script.make_groups(512, prompts=1, responses=2, tokens=40, side=8, text=30)
    options = Namespace(device="cuda", checkpointing=False, offload=False, optimizer="none")
    script.planned_peak(policy, groups, "auto", options)
    (config,) = seen
    tokens = len(groups[0].prompt.ids) + sum(len(rollout.ids) for rollout in groups[0].rollouts)
    assert memory.row_images(config) == 1
    assert memory.row_tokens(config) == tokens + 1  # a prompt, and one token of a response at least
    assert config.data.max_pixels == (8 * 28) ** 2


def test_another_flash_attention_is_activated_where_torch_offers_it(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", asked.append)
    assert script.activate_flash("fa3") == "" and asked == ["FA3"]

    def refuse(name: str) -> None:
        raise ValueError(f"Unknown flash attention impl '{name}'.")

    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", refuse)
    assert script.activate_flash("fa4") == "ValueError: Unknown flash attention impl 'FA4'."
    monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl")
    assert script.activate_flash("fa4") == "this torch knows no other"
