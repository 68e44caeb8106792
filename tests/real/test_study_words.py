"""The study in real language, whole, at a tiny size: sets, cold start, a run of two rules, tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from perf import study_words
from vlm_rl.commands.real_quickstart import RealSizes
from vlm_rl.toy.word_problems import SMALL, STYLES

SIZES = RealSizes(traces=16, train=8, heldout=4, cold_steps=2, cold_batch=4)
CHANGES = (
    "seeds=[0]",
    "base.train.steps=2",
    "base.train.mini_batch_prompts=1",
    "base.eval.every=2",
    "base.rollout.prompts_per_step=1",
    "base.rollout.responses_per_prompt=4",
    "base.rollout.max_tokens=48",
    "base.rollout.sampler=transformers",
)


def test_the_study_ends_in_its_tables(
    smollm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(study_words, "NUMBERS", {"small": (SMALL, SIZES)})
    monkeypatch.setattr(study_words, "CPU_CHANGES", CHANGES)
    (tmp_path / "SmolLM2-135M-Instruct").symlink_to(smollm)
    study_words.main([str(tmp_path), "--on-cpu", "--tasks", "small"])
    printed = capsys.readouterr().out
    sampled, styles, greedy = printed.split("## small\n\n")[1].strip().split("\n\n")
    assert [line.split("|")[1:3] for line in sampled.splitlines()[2:]] == [
        [f" `{rule}` ", f" {window} "] for rule in ("grpo", "luspo") for window in ("first", "last")
    ]
    assert len(styles.splitlines()) == 6 and all(style in styles.splitlines()[0] for style in STYLES)
    for line in styles.splitlines()[2:]:
        assert abs(sum(int(share) for share in re.findall(r"\| (\d+) ?%", line)) - 100) <= 2
    assert len(greedy.splitlines()) == 4 and greedy.splitlines()[2].endswith("| - | - |")

    study_words.main([str(tmp_path), "--tables", "--tasks", "small"])
    assert capsys.readouterr().out == printed[printed.index("\n## small") :]
