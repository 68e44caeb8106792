"""What `vlm-rl serve` checks before it becomes a server."""

from __future__ import annotations

import asyncio
import os
import resource
import runpy
import shutil
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from vlm_rl.cli import main
from vlm_rl.config import Config, parse_config
from vlm_rl.errors import UserError
from vlm_rl.samplers.remote.serve import serve, server_options
from vlm_rl.samplers.remote.server_token import create_token, read_token


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path) -> Config:
    """Return the configuration of a run whose model has an infinite weight."""
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] = float("inf")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    tree = {"out": str(tmp_path / "run"), "model": {"path": str(model)}, "data": {"train": ["x"]}}
    return parse_config(
        tree
        | {
            "rollout": {
                "sampler": "server",
                "servers": ["http://127.0.0.1:1"],
                "server_token": str(tmp_path / "token"),
            }
        }
    )


def test_weights_that_are_not_finite_are_refused_before_anything_is_started(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    started: list[str] = []
    monkeypatch.setattr(runpy, "run_module", lambda name, **_: started.append(name))
    with pytest.raises(UserError, match=r"model\.safetensors: tensor 'model\.norm\.weight' holds NaN or infinity"):
        serve(config, host="127.0.0.1", port=1, only_print=False)
    assert started == [] and not (tmp_path / "token").exists()


def test_a_token_is_whole_or_not_there(tmp_path: Path) -> None:
    """An empty file would be the token of every later server; a limit of file sizes stands for a full disk."""
    token = tmp_path / "cache" / "token"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(UserError, match=r"server_token: .*token cannot be written: File too large"):
            create_token(token)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(token.parent.iterdir())
    create_token(token)
    written = read_token(token)
    create_token(token)  # that of a second server
    assert read_token(token) == written and token.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in token.parent.iterdir()] == ["token"]
    token.write_text("\n")
    with pytest.raises(UserError, match="holds no token: remove it"):
        create_token(token)


def test_a_port_that_is_taken_is_said_before_the_weights_are_read(config: Config) -> None:
    pytest.importorskip("vllm")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port} of 127.0.0.1 is taken by another process"):
            serve(config, host="127.0.0.1", port=port, only_print=False)
    with pytest.raises(UserError, match=r"--host 192\.0\.2\.1: this machine has no such address"):
        serve(config, host="192.0.2.1", port=port, only_print=False)
    with pytest.raises(UserError, match=r"--host a{300}: no such address"):
        serve(config, host="a" * 300, port=port, only_print=False)


def test_a_server_says_what_its_start_compiles(
    config: Config, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm")
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    monkeypatch.setattr(runpy, "run_module", lambda name, **_: print("started"))
    monkeypatch.setattr("os.environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", [])
    sound = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tiny_model)})})
    serve(sound, host="127.0.0.1", port=1, only_print=False)
    server, engine, started = capsys.readouterr().out.splitlines()
    assert server.startswith("rollout server: ") and started == "started"
    assert engine.startswith("engine: vLLM compiles one function")


def test_a_small_model_is_served_eagerly_on_a_gpu(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlm_rl.samplers.remote.serve.default_device", lambda: torch.device("cuda"))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/data/vllm")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    rollout = config.rollout.model_copy(update={"batch_invariant": True})
    config = config.model_copy(update={"rollout": rollout})
    _, flags, environment = server_options(config, host="127.0.0.1", port=1)
    assert environment["VLLM_BATCH_INVARIANT"] == "1"
    assert "--enforce-eager" in flags and any(flag.startswith("--kv-cache-memory-bytes=") for flag in flags)
    given = {"--dtype": "bfloat16", "--weight-transfer-config": '{"backend": "nccl"}', "--seed": str(config.seed)}
    assert {f"{name}={value}" for name, value in given.items()} <= {*flags}
    assert environment["TRITON_CACHE_DIR"] == "/data/vllm/triton_cache"
    assert not any("CPU" in name for name in environment)


@pytest.fixture
def parsed(tiny_model: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], Any]:
    """Return a function that gives vLLM's parser what `vlm-rl serve` starts it with, for this rollout.vllm."""
    pytest.importorskip("vllm")
    taken: list[Any] = []

    def parse(name: str, **_: Any) -> None:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        taken.append(make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:]))

    def start(options: dict[str, Any]) -> Any:
        model = config.model.model_copy(update={"path": str(tiny_model)})
        rollout = config.rollout.model_copy(update={"vllm": options})
        sound = config.model_copy(update={"model": model, "rollout": rollout})
        serve(sound, host="127.0.0.1", port=1, only_print=False)
        return taken.pop()

    monkeypatch.setattr(runpy, "run_module", parse)
    monkeypatch.setattr("os.environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", [])
    return start


def test_a_server_gets_lists_and_options_without_a_value(parsed: Callable[[dict[str, Any]], Any]) -> None:
    sizes, compilation = [1, 2, 4], {"mode": 0}
    taken = parsed(
        {
            "cudagraph_capture_sizes": sizes,
            "max_num_batched_tokens": None,
            "compilation_config": compilation,
            "enable_prefix_caching": False,
        }
    )
    assert taken.cudagraph_capture_sizes == sizes and taken.max_num_batched_tokens is None
    assert taken.compilation_config.mode == compilation["mode"] and taken.enable_prefix_caching is False


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_num_batched_tokens": "many"}, "rollout.vllm.max_num_batched_tokens='many': argument"),
        ({"block_size": 32, "enforce_eager": "maybe"}, "rollout.vllm.enforce_eager='maybe': argument"),
    ],
)
def test_an_option_that_the_server_does_not_take_is_named(
    parsed: Callable[[dict[str, Any]], Any], options: dict[str, Any], said: str
) -> None:
    """vLLM's parser would print all of its usage; a word behind a flag it took for the model's name."""
    with pytest.raises(UserError, match=f"^vLLM refuses {said}.*; give a different value, or leave it out$"):
        parsed(options)


@pytest.mark.parametrize(
    ("key", "meant"), {"max_num_batched_toks": "max_num_batched_tokens", "max_model": "max_model_len"}.items()
)
def test_an_option_that_vllm_does_not_have_is_refused(
    parsed: Callable[[dict[str, Any]], Any], key: str, meant: str
) -> None:
    """The second is a part of a name, which vLLM's command would take for the whole."""
    with pytest.raises(UserError, match=rf"^rollout\.vllm\.{key}: vLLM has no such option; .*{meant}"):
        parsed({key: 3})


def test_the_command_is_printed_without_reading_the_weights(
    config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(config, host="127.0.0.1", port=1, only_print=True)
    assert f" {config.model.path} --" in capsys.readouterr().out


def test_a_model_may_be_named_as_on_the_hub(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one whose configuration is shipped, which a plan takes for what it reads."""
    named = "Qwen/Qwen2.5-VL-7B-Instruct"
    monkeypatch.setattr("vlm_rl.run.checkpoint_names.locate_model", lambda path, **_: Path(config.model.path))
    tree = config.model_dump(mode="json")
    tree["model"]["path"] = named
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    assert main(["serve", str(tmp_path / "c.yaml"), "--print"]) == 0
    assert f" {config.model.path} --" in capsys.readouterr().out


@pytest.mark.parametrize("length", [70, 71])
def test_sockets_of_a_long_temporary_folder_are_elsewhere(
    config: Config, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # pytest's own folder is too long for this
        folder = Path(short) / ("x" * (length - len(short) - 1))
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        _, _, environment = server_options(config, host="127.0.0.1", port=1)
        sockets = environment.get("VLLM_RPC_BASE_PATH", str(folder))
        with socket.socket(socket.AF_UNIX) as bound:  # the kernel knows how long a path may be
            bound.bind(f"{sockets}/{uuid.uuid4()}")
            Path(bound.getsockname()).unlink()
    assert (sockets == str(folder)) is (length == 70)


@pytest.mark.parametrize("lost", ["preparing", "drawing"])
@pytest.mark.parametrize("times", [2, 3])
def test_a_response_whose_prepared_image_is_lost_is_asked_for_again(lost: str, times: int) -> None:
    """As vLLM loses them: an AssertionError while it prepares, or a request that ends as an error. Three times are
    too many. Only vLLM's own classes are real here: nothing outside makes an engine forget one image."""
    pytest.importorskip("vllm")
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.output_processor import RequestOutputCollector

    from vlm_rl.samplers.vllm.endpoint import response_of

    class Forgetful:
        asked = 0

        async def add_request(self, request_id: str, *_: Any) -> RequestOutputCollector:
            self.asked += 1
            is_lost = self.asked <= times
            if is_lost and lost == "preparing":
                raise AssertionError("Expected a cached item")
            queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, request_id)
            ids = [] if is_lost else [5, 6]
            output = CompletionOutput(0, "", ids, None, None, finish_reason="error" if is_lost else "length")
            queue.put(RequestOutput(request_id, None, [1], None, [output], finished=True))
            return queue

    if (times, lost) == (3, "preparing"):
        with pytest.raises(AssertionError, match="cached item"):
            asyncio.run(response_of(Forgetful(), None, None))
        return
    answer = asyncio.run(response_of(Forgetful(), None, None))
    assert (answer["ids"], answer["finish"]) == (([5, 6], "length") if times == 2 else ([], "error"))
