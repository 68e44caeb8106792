"""The study in real language, whole, at a tiny size: sets, cold start, runs of two rules, tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from perf import small_vlm, study_words
from vlm_rl.commands.real_quickstart import RealSizes
from vlm_rl.data_prep.picture_sets import PictureCounts
from vlm_rl.toy.drawn_pictures import PICTURE_TRACE_SHARE
from vlm_rl.toy.word_problems import STYLES

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


@pytest.fixture
def tiny(smollm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for a study whose parts are all tiny."""
    monkeypatch.setattr(study_words, "SIZES", dict.fromkeys(study_words.SIZES, SIZES))
    monkeypatch.setattr(study_words, "CPU_CHANGES", CHANGES)
    counts = PictureCounts(drawn=16, published=16, heldout=4, test=1)
    monkeypatch.setitem(small_vlm.SIZES, False, small_vlm.VlmSizes(counts, steps=2, batch=4))
    for folder in (tmp_path, tmp_path / "small-vlm"):
        folder.mkdir(exist_ok=True)
        (folder / "SmolLM2-135M-Instruct").symlink_to(smollm)
    return tmp_path


def test_the_study_ends_in_its_tables(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Word problems by two rules, and pictures by one, after the small VLM has begun to see."""
    study_words.main([str(tiny), "--on-cpu", "--tasks", "small"])
    printed = capsys.readouterr().out
    sampled, styles, greedy = printed.split("## small\n\n")[1].strip().split("\n\n")
    assert [line.split("|")[1:3] for line in sampled.splitlines()[2:]] == [
        [f" `{rule}` ", f" {window} "] for rule in ("grpo", "luspo") for window in ("first", "last")
    ]
    assert len(styles.splitlines()) == 6 and all(style in styles.splitlines()[0] for style in STYLES)
    for line in styles.splitlines()[2:]:
        assert abs(sum(int(share) for share in re.findall(r"\| (\d+) ?%", line)) - 100) <= 2
    assert len(greedy.splitlines()) == 4 and greedy.splitlines()[2].endswith("| - | - |")

    study_words.main([str(tiny), "--tables", "--tasks", "small"])
    assert capsys.readouterr().out == printed[printed.index("\n## small") :]

    study_words.run_task(tiny, "pictures", rules=["grpo"], changes=CHANGES)
    _, styles, _ = study_words.table_of(tiny / "runs" / "pictures", study_words.TASKS["pictures"]).split("\n\n")
    assert all(style in styles.splitlines()[0] for style in PICTURE_TRACE_SHARE) and styles.count("`grpo`") == 2
