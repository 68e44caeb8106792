"""A teacher on a vLLM server scores what the one in this process scores, and a run outlives its loss."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.rollout_servers import RolloutServer
from tests.helpers.toy_runs import Toys
from vlm_rl.errors import EXIT_STOPPED
from vlm_rl.toy.counting_squares import SQUARES
from vlm_rl.toy.tiny_model import build_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")]


@pytest.mark.turn(1, days=2)
def test_a_served_teacher_scores_as_the_one_here(toys: Toys, tmp_path: Path) -> None:
    """Of the sampled ids and of its own likeliest. Without a server the run saves its beginning, and is resumed."""
    texts = SQUARES.tokenizer_texts()
    teacher = build_tiny_model(tmp_path / "teacher", seed=5, tokenizer_texts=texts, hidden=192, heads=6, mlp=256)
    token = {"server_token": str(tmp_path / "token")}
    served = toys.config(
        "served-teacher", model={"path": str(teacher)}, rollout={"max_tokens": 40, "sampler": "vllm", **token}
    )
    train = {"steps": 1, "mini_batch_prompts": 2, "micro_batch_tokens": 170}
    rollout: dict[str, Any] = {"temperature": 1.0, "server_timeout": 3.0, **token}

    def options(top_k: int, *servers: str) -> dict[str, Any]:
        rule = {"teacher": str(teacher), "top_k": top_k, "hint": " It is {answer}.", "servers": list(servers)}
        return {"algorithm": {"distillation": rule}, "train": train, "rollout": rollout}

    with RolloutServer(served, tmp_path / "log") as server:
        here = [toys.train_run(f"teacher-here-{k}", **options(k)).metrics()[0] for k in (0, 8)]
        server.wait()
        for k, expected in zip((0, 8), here, strict=True):
            config = toys.config(f"teacher-served-{k}", **options(k, server.url, "http://127.0.0.1:9"))
            result = toys.runner("train", str(config), ranks=2)
            assert result.code == 0, result.output[-3000:]
            (record,) = toys.run(f"teacher-served-{k}").metrics()
            # Its softmax has the banned ids too, which weigh a few in a hundred of a random model.
            assert record["teacher/kl"] == pytest.approx(expected["teacher/kl"], abs=0.05)
            assert record["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)
        gone = str(toys.config("teacher-gone", **options(0, server.url)))
        server.send(signal.SIGKILL)
        stopped = toys.runner("train", gone)
    assert stopped.code == EXIT_STOPPED, stopped.output[-3000:]
    assert "no server of the teacher has answered" in stopped.output
