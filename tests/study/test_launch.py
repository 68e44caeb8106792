"""How the runs of a study are started: words, machines, cores and cards."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from vlm_rl.errors import UserError
from vlm_rl.run.cores import allowed_cores
from vlm_rl.study import launch as module
from vlm_rl.study.launch import Launch

TRAIN = ["train", "runs/my study/grpo.yaml"]
HERE = [sys.executable, "-m", "vlm_rl", *TRAIN]


def test_one_rank_is_python_and_several_are_torchrun_with_a_port_of_their_own() -> None:
    assert Launch().words(TRAIN, 0) == HERE
    words = Launch(ranks=4).words(TRAIN, 0)
    assert words[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    assert words[-4:] == HERE[1:]


def test_a_template_gets_words_or_a_text_that_a_shell_splits_into_the_same() -> None:
    assert Launch(template="srun --gpus 8 {command}").words(TRAIN, 0) == ["srun", "--gpus", "8", *HERE]
    urls = Launch(template="{command} rollout.servers=[{machine}]", machines=("http://a:1", "http://b:1"))
    assert urls.words(TRAIN, 1) == [*HERE, "rollout.servers=[http://b:1]"]
    remote = Launch(template="ssh -tt {machine} 'cd /repo && {command}'", machines=("node-1",)).words(TRAIN, 0)
    assert remote[:3] == ["ssh", "-tt", "node-1"] and remote[3].startswith("cd /repo && ")
    assert shlex.split(remote[3])[3:] == HERE


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"jobs": 0}, "--jobs is 0"),
        ({"ranks": 0}, "--ranks is 0"),
        ({"template": "srun train"}, "does not say where the command goes"),
        ({"template": "ssh 'a {command}"}, "cannot be split into words: No closing quotation"),
        ({"template": "ssh {host} {command}"}, r"unknown placeholder \{host\}"),
        ({"template": "ssh {machine} {command}"}, "give both or neither"),
        ({"machines": ("a",)}, "give both or neither"),
        ({"template": "ssh {machine} {command}", "machines": ("a", "b"), "jobs": 3}, "--machines names 2"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Launch(**settings)


def test_jobs_share_the_cards_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cards, two jobs of three ranks: 0 to 2 and 3 to 5; three such jobs would need nine."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(module, "_CARDS", tmp_path)
    for number in range(8):
        (tmp_path / f"0000:{number:02x}:00.0").mkdir()
    launch = Launch(jobs=2, ranks=3)
    assert [launch.environment(slot)["CUDA_VISIBLE_DEVICES"] for slot in (0, 1)] == ["0,1,2", "3,4,5"]
    assert launch.environment(0)["OMP_NUM_THREADS"] == str(max(1, allowed_cores() // 6))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b,5")
    assert Launch(jobs=2).environment(1)["CUDA_VISIBLE_DEVICES"] == "5"
    assert Launch(jobs=9, template="srun {command}").environment(3) == {}
    for hidden in ("", "-1", "-1,0"):  # a run on processors
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert "CUDA_VISIBLE_DEVICES" not in Launch(jobs=4).environment(0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,2,-1,0")  # CUDA stops at the first that is negative
    assert Launch(ranks=2).environment(0)["CUDA_VISIBLE_DEVICES"] == "4,2"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ranks": 9}, "1 x 9 ranks need 9 GPUs (visible: 8): give fewer --ranks;"),
        ({"jobs": 9}, "9 x 1 ranks need 9 GPUs (visible: 8): give fewer --jobs;"),
        ({"jobs": 3, "ranks": 3}, "3 x 3 ranks need 9 GPUs (visible: 8): give fewer --jobs or --ranks;"),
    ],
)
def test_too_few_cards_name_the_options_that_can_be_less(
    settings: dict, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    with pytest.raises(UserError, match=re.escape(said)):
        Launch(**settings)
