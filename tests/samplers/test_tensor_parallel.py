"""An engine on two ranks against one on each: the same responses, and a proof that sees what one rank holds."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.helpers.families import build_family
from tests.helpers.tensor_parallel_worker import WRONG
from tests.helpers.toy_runs import Runner, Toys, rollouts_of, toy_set
from vlm_rl.cli import main
from vlm_rl.config import RolloutConfig, load_config, parse_config
from vlm_rl.errors import UserError
from vlm_rl.model_files.model_folder import check_divides, read_model_config
from vlm_rl.planning.dry_run import dry_run
from vlm_rl.planning.memory import side_by_side
from vlm_rl.run.directory import RunDirectory
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.remote.serve import server_options
from vlm_rl.session.preflight import preflight, preflight_eval

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
WORKER = "tests.helpers.tensor_parallel_worker"


@pytest.fixture
def left_behind() -> Iterator[None]:
    """Shared memory as a killed engine of vLLM's own leaves it. Ours must start all the same, and leave none."""
    shared = Path("/dev/shm")
    there = set(shared.glob("*cpushm*"))
    paths = [shared / f"-tp:0-[0-1]-cpushm_{rank}" for rank in range(2)]
    for path in paths:
        path.touch()
    yield
    for path in paths:
        path.unlink()
    deadline = time.monotonic() + 120
    while set(shared.glob("*cpushm*")) - there and time.monotonic() < deadline:  # of tests beside this one
        time.sleep(1)
    assert set(shared.glob("*cpushm*")) - there == set()


@pytest.mark.turn(0, days=2)
@pytest.mark.slow
@pytest.mark.usefixtures("left_behind")
def test_two_ranks_draw_and_prove_what_each_would_alone(tiny_model: Path, runner: Runner, tmp_path: Path) -> None:
    """A model with images, experts, and a head of keys and values that both ranks hold."""
    pytest.importorskip("vllm")
    model = build_family("qwen3_vl_moe", tmp_path / "model", tokenizer_of=tiny_model, num_key_value_heads=1)
    done = runner("vllm", tmp_path / "results.json", model, module=WORKER, ranks=2, deadline=500)
    assert done.code == 0, done.output[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["same tokens"] == [True, True]
    assert results["gap"] < 1e-5
    refusals = results["refusals"]
    assert refusals.keys() == {*WRONG, "buffer"}
    assert {end for end, said in refusals.items() if len(said) != 2 or not all(said)} == set()
    assert all("cos_sin_cache" in said for said in refusals["buffer"])


@pytest.mark.turn(1, days=2)
@pytest.mark.slow
def test_a_run_on_a_divided_engine_draws_what_whole_engines_draw(toys: Toys) -> None:
    """With ZeRO 3, and with one problem to evaluate, which leaves one rank without any."""
    pytest.importorskip("vllm")
    heldout = toy_set(toys.folder / "one", count=1, split="heldout")
    runs = []
    for name, ranks, rollout in (("whole", 1, {}), ("divided", 2, {"tensor_parallel": 2})):
        path = toys.config(
            f"tensor-parallel/{name}",
            data={"eval": [str(heldout)]},
            rollout={"sampler": "vllm", **rollout},
            train={"steps": 1, "zero_stage": 3},
            eval={"every": 1},
        )
        done = toys.runner("train", path, ranks=ranks)
        assert done.code == 0, done.output[-3000:]
        runs.append(toys.run(f"tensor-parallel/{name}"))
    whole, divided = (rollouts_of(run)[0] for run in runs)
    assert [row["token_ids"] for row in divided] == [row["token_ids"] for row in whole]
    for run in runs:
        assert run.metrics()[0]["rollout/logprob_gap"] < 1e-5
        assert [result.step for result in run.evals()] == [0, 1]


@pytest.mark.slow
def test_an_evaluation_on_a_divided_engine_has_the_answers_of_a_whole_one(toys: Toys) -> None:
    """Of three problems, one rank has two and the other one."""
    pytest.importorskip("vllm")
    heldout = toy_set(toys.folder / "heldout-three", count=3, split="heldout")
    command = ["eval", "--model", toys.model, "--data", heldout, "--sampler", "vllm", "--max-tokens", 12]
    command += ["--temperature", 1, "--samples", 2, "--batch-size", 2]
    results = []
    for name, ranks, words in (("whole", 1, []), ("divided", 2, ["--tensor-parallel", 2])):
        out = toys.folder / "evaluations" / name
        done = toys.runner(*command, "--out", out, *words, ranks=ranks)
        assert done.code == 0, done.output[-3000:]
        (result,) = RunDirectory(out).evals()
        assert result.summary["tensor_parallel"] == {1: None, 2: 2}[ranks]  # of an older result there is none
        results.append(result.rows().to_pylist())
    assert len(results[0]) == 6 and results[0] == results[1]


def test_an_evaluation_asks_for_the_engine_of_as_many_ranks(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers cannot show it: they are those of whole engines."""
    heldout, asked = toy_set(tmp_path / "one", count=1, split="heldout"), {}

    class AskedError(Exception):
        pass

    def no_engine(name: str, settings: EngineSettings) -> None:
        asked["settings"] = settings
        raise AskedError  # a UserError would wait for the other rank

    monkeypatch.setattr("vlm_rl.evaluation.command.make_sampler", no_engine)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    command = ["eval", "--model", tiny_model, "--data", heldout, "--out", tmp_path / "out", "--sampler", "vllm"]
    with pytest.raises(AskedError):
        main([*map(str, command), "--tensor-parallel", "2"])
    assert asked["settings"].tensor_parallel == 2


@pytest.mark.parametrize(
    ("sampler", "size", "reason"),
    [
        ("auto", 2, "--sampler is auto: only vLLM divides"),
        ("vllm", 4, "--tensor-parallel is 4, and this machine has 6 ranks"),
        ("vllm", 0, "--tensor-parallel is 0"),
    ],
)
def test_engines_that_no_evaluation_can_have_are_refused(
    sampler: str, size: int, reason: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    with pytest.raises(UserError, match=reason):
        preflight_eval(tiny_model, [], sampler=sampler, tensor_parallel=size)
    assert preflight_eval(tiny_model, [], sampler="vllm", tensor_parallel=3) == tiny_model


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"rollout": {"sampler": "auto"}}, "sampler is auto: only vLLM divides"),
        ({"rollout": {"vllm": {"enable_expert_parallel": True}}}, "vllm.enable_expert_parallel is true"),
        ({"model": {"lora": {"sync": "adapter"}}}, "merged weights alone"),
    ],
)
def test_settings_that_no_divided_engine_takes_are_refused(settings: dict[str, Any], reason: str) -> None:
    tree: dict[str, Any] = {"out": "x", "model": {"path": "x"}, "data": {"train": ["x"]}}
    tree["rollout"] = {"sampler": "vllm", "tensor_parallel": 2}
    for section, values in settings.items():
        tree[section] = tree[section] | values
    with pytest.raises(UserError, match=reason):
        parse_config(tree)


@pytest.mark.parametrize(
    ("model", "ranks", "reason"),
    [
        ("Qwen2.5-VL-7B-Instruct", 4, ""),
        ("Qwen2.5-VL-7B-Instruct", 8, "num_attention_heads of the text model, 28"),
        ("Qwen2.5-VL-3B-Instruct", 8, "intermediate_size of the vision model, 3420"),
        ("Qwen2.5-VL-72B-Instruct", 8, ""),
        ("Qwen3-30B-A3B-Instruct-2507", 8, ""),  # 4 heads of keys and values, each on two ranks
        ("Qwen3-8B-Base", 3, "num_attention_heads of the text model, 32"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 48},
            6,
            "4 heads of keys and values",
        ),
    ],
)
def test_a_model_that_ranks_cannot_divide_is_refused(model: str | dict[str, int], ranks: int, reason: str) -> None:
    raw = read_model_config(f"models/{model}")[1] if isinstance(model, str) else {"model_type": "qwen3", **model}
    config = AutoConfig.for_model(**raw)
    with pytest.raises(UserError, match=reason) if reason else nullcontext():
        check_divides(config, RolloutConfig(sampler="vllm", tensor_parallel=ranks))
    if "vision" in reason:
        whole_tower = RolloutConfig(sampler="vllm", tensor_parallel=ranks, vllm={"mm_encoder_tp_mode": "data"})
        check_divides(config, whole_tower)


def test_engines_are_whole_on_each_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "12")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    tree = {"out": str(tmp_path / "run"), "model": {"path": "x"}, "data": {"train": ["x"]}}
    config = parse_config({**tree, "rollout": {"sampler": "vllm", "tensor_parallel": 4}})
    with pytest.raises(UserError, match="tensor_parallel is 4, and this machine has 6 ranks"):
        preflight(config, resume=False)
    with pytest.raises(UserError, match="the plan is for 6 ranks"):
        dry_run(load_config(CONFIGS / "virl39k_luspo_32b.yaml"), num_ranks=6)


def test_the_plan_divides_the_engine_among_its_ranks() -> None:
    """Bytes a rank by hand: an engine of four ranks gets the prompts of four, and each rank two of eight heads."""
    dry = dry_run(load_config(CONFIGS / "virl39k_luspo_32b.yaml"), num_ranks=8)
    assert dry.memory.engine_weights == 2 * dry.num_parameters // 4
    assert dry.kv_bytes_per_token == 2 * 2 * 128 * 64 * 2  # keys and values, heads, width, layers, bytes
    assert side_by_side(dry.config, 8) == 256  # of the 64 prompts x 8 responses of an engine
    assert dry.memory.kv_cache == 256 * 8192 * dry.kv_bytes_per_token
    assert dry.memory.optimizer == 0  # in host memory
    assert set(dry.by_ranks()) == {4, 8, 16, 32}


def test_a_server_gets_as_many_cards(tiny_model: Path, tmp_path: Path) -> None:
    tree: dict[str, Any] = {"out": str(tmp_path), "model": {"path": str(tiny_model)}, "data": {"train": ["x"]}}
    tree["data"]["max_prompt_tokens"] = 160
    tree["rollout"] = {"sampler": "server", "servers": ["http://127.0.0.1:1"], "tensor_parallel": 2, "max_tokens": 14}
    tree["train"], tree["reward"] = {"micro_batch_tokens": 300}, {"overlong_buffer": 8}
    _, flags, _ = server_options(parse_config(tree), host="127.0.0.1", port=1)
    assert "--tensor-parallel-size=2" in flags
