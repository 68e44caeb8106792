"""The start of a vLLM engine: what it says, what it keeps for the next one, and under which key."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

from tests.helpers.rollout_servers import RolloutServer
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.devices import has_gpu
from vlm_rl.errors import UserError
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.vllm.engine import VllmSampler, import_vllm
from vlm_rl.samplers.vllm.options import compile_cache, engine_environment, start_note
from vlm_rl.samplers.vllm.start import PHASES, bars_hidden, folders_left_out_of_the_key, phases_told
from vlm_rl.templates import TEMPLATES

ROOTS = [
    ({}, ".cache/vllm"),
    ({"XDG_CACHE_HOME": "/data/cache"}, "/data/cache/vllm"),
    ({"XDG_CACHE_HOME": "/data/cache", "VLLM_CACHE_ROOT": "~/kept"}, "kept"),
]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, and none of the variables that name a cache."""
    for name in ("VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "TORCH_COMPILE_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


# --- what it says --------------------------------------------------------------------------------


def test_a_gpu_names_the_folder_that_the_next_start_reads(home: Path) -> None:
    note = start_note(is_eager=False, on_cpu=False)
    assert note.startswith("engine: vLLM compiles this model, one to two minutes the first time")
    assert note.endswith("kept in ~/.cache/vllm for the next start")
    assert compile_cache() == home / ".cache/vllm" and compile_cache().is_dir()
    assert not list(compile_cache().iterdir()), "the file that was tried is gone"


def test_other_starts_compile_less(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        start_note(is_eager=True, on_cpu=False) == "engine: vLLM runs this model eagerly, and compiles only kernels"
    )
    assert "compiles one function at the first responses" in start_note(is_eager=True, on_cpu=True)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert start_note(is_eager=True, on_cpu=True) == ""
    assert not compile_cache().exists()


def test_a_cache_that_cannot_be_written_is_refused_before_the_engine_starts(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "file").touch()
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(home / "file" / "vllm"))
    with pytest.raises(UserError, match=r"/file/vllm, which cannot be written .*name a folder .* in VLLM_CACHE_ROOT"):
        start_note(is_eager=False, on_cpu=False)
    assert start_note(is_eager=True, on_cpu=False), "nothing is kept there"


def test_the_phases_are_those_that_vllm_logs() -> None:
    """A version of vLLM that words them differently would leave the start without phases."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("needs vLLM")
    root = Path(spec.origin).parent.parent
    for module, words, _ in PHASES:
        assert words in (root / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"), (module, words)


def test_phases_are_told_and_the_log_shows_no_more_than_before(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm")
    import_vllm()
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging, configure_logging_if_needed

    monitor, other = logging.getLogger("vllm.compilation.monitor"), logging.getLogger("vllm.elsewhere")
    told: list[str] = []
    configure_logging(LoggingConfig(log_level="INFO"))  # so that vLLM has something to configure
    with phases_told(told.append):
        configure_logging_if_needed(LoggingConfig())  # as its engine does, by VLLM_LOGGING_LEVEL
        monitor.info("%sStarting torch.compile", "[backbone] ")
        other.info("Starting torch.compile")
        monitor.info("something else")
        other.error("a fault")
    monitor.info("Starting torch.compile")
    assert told == ["vLLM compiles the model, up to a minute the first time"]
    shown = "".join(capfd.readouterr())
    assert "a fault" in shown and "torch.compile" not in shown and "something else" not in shown


@pytest.mark.parametrize("output", ["", "verbose"])
def test_bars_of_vllm_are_shown_where_its_log_is(monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    """Its second model runner draws one for the CUDA graphs, whatever it is told."""
    monkeypatch.setenv("VLM_RL_OUTPUT", output)
    shown = StringIO()
    with bars_hidden():
        assert list(tqdm(range(3), file=shown)) == [0, 1, 2]
    assert bool(shown.getvalue()) == (output == "verbose")
    list(tqdm(range(3), file=shown, desc="afterwards"))
    assert "afterwards" in shown.getvalue()


# --- what it keeps -------------------------------------------------------------------------------


@pytest.mark.parametrize(("variables", "folder"), ROOTS)
def test_the_cache_is_where_vllm_has_it(
    home: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: str
) -> None:
    envs = pytest.importorskip("vllm.envs")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(compile_cache()) == envs.environment_variables["VLLM_CACHE_ROOT"]() == str(home / folder)


@pytest.mark.parametrize(
    ("on_cpu", "names"),
    [
        (True, {"VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE"}),
        (False, {"TRITON_CACHE_DIR"}),
    ],
)
def test_what_the_environment_says_on_each_device(home: Path, on_cpu: bool, names: set[str]) -> None:
    variables = engine_environment(on_cpu=on_cpu)
    assert {*variables} == {"VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS"} | names
    assert on_cpu or variables["TRITON_CACHE_DIR"] == str(home / ".cache/vllm/triton_cache")


def key(folder: Path, **changes: Any) -> str:
    """Return vLLM's key of what it compiles for the model in a folder."""
    engine = import_vllm().EngineArgs
    options = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "seed": 0}
    return engine(model=str(folder), **options | changes).create_engine_config().compute_hash()


def test_checkpoints_of_a_model_have_one_key(tiny_model: Path, tmp_path: Path) -> None:
    """Whatever their folder and the run's seed; but not a model that is computed differently."""
    pytest.importorskip("vllm")
    checkpoint, wider = (Path(shutil.copytree(tiny_model, tmp_path / name)) for name in ("step-000060", "wider"))
    config = json.loads((wider / "config.json").read_text())
    config["text_config"]["rms_norm_eps"] = 1e-3
    (wider / "config.json").write_text(json.dumps(config))
    with folders_left_out_of_the_key():
        first = key(tiny_model)
        assert key(checkpoint, seed=7) == first
        assert key(wider) != first
        assert key(tiny_model, dtype="bfloat16") != first
        assert key(tiny_model, max_num_seqs=16) != first
        tower = {"compilation_config": {"compile_mm_encoder": True}}
        assert key(tiny_model, **tower) != key(checkpoint, **tower), "the processor's files may be compiled in"
    assert key(tiny_model) != key(checkpoint), "vLLM leaves the folder out by itself: so need we no longer"


START = """
import json
import sys
from pathlib import Path

import torch

from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.samplers.base import SampleRequest, SamplingParams
from vlm_rl.samplers.engine_settings import EngineSettings
from vlm_rl.samplers.factory import make_sampler
from vlm_rl.samplers.vllm.engine import import_vllm
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import Problem

import_vllm()
from vllm.compilation.counter import compilation_counter
from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
from vllm.config import CompilationMode
from vllm.platforms.cpu import CpuPlatform

update = CpuPlatform.check_and_update_config


def as_on_a_gpu(config):
    update(config)
    config.compilation_config.mode = CompilationMode.VLLM_COMPILE
    config.compilation_config.compile_sizes = []


CpuPlatform.check_and_update_config = staticmethod(as_on_a_gpu)
FixFunctionalizationPass.__call__ = lambda self, graph: None  # names operators that only the CUDA build has

model = Path(sys.argv[1])
builder = PromptBuilder(model, template=TEMPLATES["plain"])
phases = []
settings = EngineSettings(
    model_path=str(model), builder=builder, max_model_len=128, batch_size=4, dtype=torch.float32,
    vllm_options={"enforce_eager": False},
)
sampler = make_sampler("vllm", settings, phase=phases.append)
prompt = builder.build(Problem("p", "What is 2 + 2?", (), "4", "integer"))
params = SamplingParams(temperature=1.0, max_tokens=8, responses=4)
drawn = [rollout.ids.tolist() for rollout in sampler.generate(SampleRequest([prompt], params, seed=0, step=0))[0]]
print(json.dumps({"counts": vars(compilation_counter), "phases": phases, "drawn": drawn}))
sys.stdout.flush()
import os
os._exit(0)
"""


@pytest.mark.turn(1, days=2)
@pytest.mark.slow
def test_the_second_checkpoint_starts_with_what_the_first_compiled(tiny_model: Path, tmp_path: Path) -> None:
    """In processes of their own, by the compiler and the cache that vLLM uses on GPUs."""
    pytest.importorskip("vllm")
    environment = {**os.environ, "VLLM_CACHE_ROOT": str(tmp_path / "cache"), "TORCH_COMPILE_DISABLE": "0"}

    def start(name: str) -> dict[str, Any]:
        folder = shutil.copytree(tiny_model, tmp_path / name)
        command = [sys.executable, "-c", START, str(folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "engine: vLLM compiles this model" in done.stdout
        return json.loads(done.stdout.splitlines()[-1])

    first, second = start("step-000020"), start("step-000040")
    compiled = [Counter(result["counts"])["num_backend_compilations"] for result in (first, second)]
    assert compiled[0] > 0 and compiled[1] == 0
    assert second["counts"]["num_aot_artifacts_loaded"] == 1
    assert any("compiles the model" in phase for phase in first["phases"]), first["phases"]
    assert "vLLM takes the compiled model from its cache" in second["phases"]
    assert second["drawn"] == first["drawn"]


def without_key(model: Path, folder: Path, key: str) -> Path:
    """Copy a model of glm4v_moe, whose config.json then lacks a key of its text model."""
    shutil.copytree(model, folder)
    config = json.loads((file := folder / "config.json").read_text())
    del config["text_config"][key]
    file.write_text(json.dumps(config))
    return folder


def test_a_key_that_vllm_alone_reads_is_named_where_the_folder_omits_it(
    family_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner and the transformers sampler do without it: transformers' classes have no such key.

    And at the first start of a class, of which vLLM's cache has nothing, no other process imports vLLM on a CPU.
    """
    pytest.importorskip("vllm")
    import_vllm()
    from vllm.model_executor.models import registry

    if not has_gpu():
        monkeypatch.setattr(registry._LazyRegisteredModel, "_load_modelinfo_from_cache", lambda *_: None)
        monkeypatch.setattr(registry, "_SUBPROCESS_COMMAND", ["false"])
    folder = without_key(family_model("glm4v_moe"), tmp_path / "glm", "head_dim")
    with pytest.raises(UserError) as caught:
        VllmSampler(
            EngineSettings(
                model_path=str(folder),
                builder=PromptBuilder(folder, template=TEMPLATES["plain"]),
                max_model_len=256,
                batch_size=1,
                dtype=torch.float32,
            ),
        )
    told = f"{folder / 'config.json'}: vLLM reads text_config.head_dim, which is not there, and transformers has"
    assert str(caught.value).startswith(told)
    assert "in models of type 'glm4v_moe_text': write the value there" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_batched_tokens": 0}, "vLLM refuses rollout.vllm.max_num_batched_tokens=0: "),
        ({"kv_cache_dtype": "fp9", "block_size": 32}, "vLLM refuses rollout.vllm.kv_cache_dtype='fp9': "),
        ({"compilation_config": {"mode": 17}}, "vLLM refuses rollout.vllm.compilation_config={'mode': 17}: "),
        ({"enforce_eager": "maybe"}, "vLLM refuses rollout.vllm.enforce_eager='maybe': "),
        ({"block_size": 7}, "with rollout.vllm.block_size=7: "),
    ],
)
def test_an_option_that_vllm_refuses_is_named_with_its_value(
    tiny_model: Path, options: dict[str, Any], words: str
) -> None:
    """By its own name, also where vLLM's configuration has the value under a different one."""
    pytest.importorskip("vllm")
    with pytest.raises(UserError) as caught:
        VllmSampler(
            EngineSettings(
                model_path=str(tiny_model),
                builder=PromptBuilder(tiny_model, template=TEMPLATES["plain"]),
                max_model_len=256,
                batch_size=1,
                dtype=torch.float32,
                vllm_options=options,
            ),
        )
    said = str(caught.value)
    assert words in said and "pydantic" not in said and "leave" in said
    assert ("sampler" in said) == ("block_size" in words), "which those words do not name: the model may be the cause"


def message_of_a_server(model: Path, folder: Path, **vllm: Any) -> str:
    """Return the message with which a server ends that cannot start."""
    tree = {
        "out": str(folder / "run"),
        "model": {"path": str(model)},
        "data": {"train": ["x"], "max_prompt_tokens": 64},
        "reward": {"overlong_buffer": 0},
        "rollout": {
            "sampler": "server",
            "servers": ["http://127.0.0.1:1"],
            "server_token": str(folder / "token"),
            "max_tokens": 8,
            "vllm": vllm,
        },
    }
    (folder / "c.yaml").write_text(json.dumps(tree))
    with RolloutServer(folder / "c.yaml", folder / "log") as server:
        assert server.ended() == 2
    lines = (folder / "log").read_text().splitlines()
    # Python's own process for shared memory may warn after it.
    (said,) = (line for line in lines if line.startswith("vlm-rl: "))
    return said.removeprefix("vlm-rl: ")


@pytest.mark.turn(0, days=2)
@pytest.mark.slow
def test_a_server_names_it_too(family_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Its worker is another process, of which vLLM tells the server only that it failed."""
    pytest.importorskip("vllm")
    folder = without_key(family_model("glm4v_moe"), tmp_path / "glm", "use_qk_norm")
    said = message_of_a_server(folder, tmp_path)
    assert said.startswith(f"{folder / 'config.json'}: vLLM reads text_config.use_qk_norm, which is not there")


@pytest.mark.turn(1, days=2)
@pytest.mark.slow
def test_a_server_whose_engine_does_not_start_ends_with_one_message(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    assert message_of_a_server(tiny_model, tmp_path, block_size=7) == (
        "vLLM's engine did not start with rollout.vllm.block_size=7: its own words above say why; "
        "leave that out, or use a different model, or the transformers sampler"
    )
    assert "No common block size for 7" in (tmp_path / "log").read_text()
