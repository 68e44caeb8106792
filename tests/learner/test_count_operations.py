"""perf/count_operations.py, which counts what an update asks of a GPU; and what may not grow unnoticed."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

PROMPT, RESPONSES, TOKENS = 100, 8, 32  # 66 of the prompt's tokens are an image's, at most
ALL = PROMPT + RESPONSES * TOKENS


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module: perf/ is not a package."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "perf"))
    return import_module("count_operations")


def counted(script: Any, name: str, *, update: bool = True) -> Any:
    way = next(way for way in script.WAYS if way.name == name)
    policy = script.make_policy("tiny", way)
    row = script.make_row(policy, prompt=PROMPT, responses=RESPONSES, tokens=TOKENS)
    return policy, script.count_pass(policy, row, update=update)[0]


def test_the_products_are_those_of_the_weights(script: Any) -> None:
    """A weight takes 2 operations a token forward and 4 backward, and 2 more where its layer is computed again."""
    policy, kept = counted(script, "transformers, kept")
    layers = policy.model.model.language_model.layers
    weights = sum(p.numel() for p in layers.parameters() if p.ndim == 2)
    assert kept.parts["products"].operations == 6 * weights * ALL
    _, recomputed = counted(script, "transformers, all recomputed")
    last = sum(layer.mlp.down_proj.weight.numel() for layer in layers)  # nothing reads its output again
    assert recomputed.parts["products"].operations == (8 * weights - 2 * last) * ALL
    vocabulary, width = policy.head.weight.shape
    products = 8 * vocabulary * width * RESPONSES * TOKENS  # the logits are computed again, too
    assert products < kept.parts["head"].operations < 1.5 * products
    _, forward = counted(script, "transformers, kept", update=False)
    assert forward.parts["products"].operations == 2 * weights * ALL


def test_attention_counts_the_pairs_that_attend(script: Any) -> None:
    """4 operations a pair and unit of width forward, 10 backward; of a token with itself half is counted."""
    policy, count = counted(script, "transformers, kept")
    text = policy.model.config.text_config
    pairs = PROMPT**2 / 2 + RESPONSES * (TOKENS * PROMPT + TOKENS**2 / 2)
    products = 14 * pairs * text.hidden_size * text.num_hidden_layers
    assert products < count.parts["attention"].operations < 1.1 * products


def test_bytes_of_an_operation_by_hand(script: Any) -> None:
    count = script.Count()
    with script.Counting(count, (1e12, 1e9)):
        a = torch.zeros(4, 5, device="meta")  # 80 bytes written
        b = a + a[:1]  # 80 + 20 read, 80 written
        b.t().reshape(2, 10)  # a copy: 80 read, 80 written
        b[:2].expand(3, 2, 5)  # views are free
        b.copy_(a)  # 80 and 80: what is written over is not read
        a.to(torch.bfloat16).index_select(0, torch.tensor([1]))  # 80 and 40; one row of 10 bytes, moved
    assert count.total.bytes == 80 + 180 + 160 + 160 + 120 + 20
    assert count.total.calls == 6 and count.total.seconds == pytest.approx(720e-9)


@pytest.mark.parametrize(
    ("name", "update", "bytes_a_token", "calls", "host_reads"),
    [
        ("transformers, all recomputed", True, 209e3, 882, 9),
        ("transformers, kept", True, 175e3, 718, 9),
        ("lean, kept", True, 158e3, 682, 9),
        ("Liger, all recomputed", True, 134e3, 542, 9),
        ("Liger, all recomputed, fused head", True, 113e3, 529, 9),
        ("transformers, kept", False, 63e3, 276, 9),
    ],
)
def test_what_a_row_asks_of_a_gpu_does_not_grow(
    script: Any, name: str, update: bool, bytes_a_token: float, calls: int, host_reads: int
) -> None:
    """The numbers are those of the last change that was meant; a library's new version may add 2 %."""
    _, count = counted(script, name, update=update)
    assert count.total.bytes / ALL <= 1.02 * bytes_a_token
    assert count.total.calls <= 1.02 * calls
    assert count.host_reads <= host_reads


@pytest.mark.slow
@pytest.mark.turn(2, days=4)
def test_the_pages_tables_are_what_is_counted(script: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["count_operations.py"])
    script.main()
    docs = Path(__file__).resolve().parents[2] / "docs"
    page = {line for file in docs.glob("performance*.md") for line in file.read_text(encoding="utf-8").splitlines()}
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 * (len(script.WAYS) + 2) and page.issuperset(" ".join(row.split()) for row in rows)
