"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
import re
import shutil
import sys
from collections.abc import Callable, Generator
from datetime import date
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.helpers.rotation import is_its_day

if TYPE_CHECKING:
    from tests.helpers.toy_runs import Runner, Toys

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault(
    "TEST_DAY", str(date.today().toordinal())
)  # before other processes are started: see rotation.py

# A busy machine is not a failure, and a change is judged by the same examples as the last; `make soak` draws new.
settings.register_profile(
    "tests",
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="FUZZ_EXAMPLES" not in os.environ,
    phases=[
        phase for phase in Phase if "ANY_FAILURE" not in os.environ or phase not in (Phase.shrink, Phase.explain)
    ],
)
settings.load_profile("tests")

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
_asked_for_shared_data: set[str] = set()


def shared_data() -> Path:
    """Return the folder of real sample data beside the checkout; skip the test where there is none."""
    _asked_for_shared_data.add(os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0])
    if not SHARED_DATA.is_dir():
        pytest.skip(f"needs the sample data at {SHARED_DATA}")
    return SHARED_DATA


def pytest_report_header() -> str:
    """Say which cases have their turn (tests/helpers/rotation.py)."""
    return f"TEST_DAY={os.environ['TEST_DAY']}"


def pytest_sessionstart() -> None:
    """Collect no garbage while modules are imported, which make hardly any."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Let no later collection look through what was imported, a million objects, and let there be fewer of them.

    With Python's own thresholds they are a twentieth of the time.
    """
    if "transformers.configuration_utils" in sys.modules:
        from tests.helpers.quick_configs import use_quick_configs

        use_quick_configs()
    gc.freeze()
    gc.set_threshold(10_000, 20, 10)
    gc.enable()


def pytest_sessionfinish() -> None:
    """Let the last collections, in which pytest looks for what could not be deleted, find nothing to look through."""
    gc.freeze()


# The files that take longest begin first, so that no worker waits at the end (see SIDE_BY_SIDE in the Makefile).
LONGEST = (
    "test_ahead_servers.py",
    "test_one_server.py",
    "test_two_machines.py",
    "test_quickstart.py",
    "test_servers.py",
    "test_learner.py",
    "test_train.py",
    "test_attacks.py",
    "test_resume.py",
    "test_sft.py",
    "test_episodes.py",
    "test_host.py",
    "test_gpu_runs.py",
    "test_distillation.py",
    "test_lora_runs.py",
    "test_smoke.py",
    "test_samplers.py",
    "test_family_run.py",
    "test_sharding.py",
    "test_late_memory.py",
    "test_study.py",
    "test_gpu_parts.py",
    "test_engine_start.py",
    "test_paper.py",
    "test_adapter_sync.py",
    "test_async_save.py",
    "test_checkpoint_size.py",
    "test_live.py",
    "test_page.py",
    "test_symbolic.py",
    "test_on_gpu.py",
    "test_preparation.py",
    "test_hostile.py",
    "test_report.py",
    "test_credit.py",
    "test_families.py",
)


ENGINES_HERE = {f"tests/samplers/test_{name}.py" for name in ("engine_start", "episodes", "lean_steps", "samplers")}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has its turn on another day, unless it is asked for by name. Order the files by LONGEST; the
    tests of a file keep their order."""
    if not any("::" in argument for argument in config.args):
        waiting = [item for item in items if not is_its_day(item)]
        config.hook.pytest_deselected(items=waiting)
        items[:] = [item for item in items if item not in waiting]
    rank = {name: position for position, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(LONGEST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """Give a file's tests to one worker, as `--dist loadfile` does; some files go to the same.

    Those are the files of servers and, of the fast tests, those that start runs or start engines here. The process
    that forks runs, and vLLM, take a dozen seconds to start in each worker.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    is_fast = "not slow" in config.option.markexpr

    @cache
    def starts_runs(file: str) -> bool:
        return re.search(r"\b(Toys|Runner|shared_runner)\b", (config.rootpath / file).read_text("utf-8")) is not None

    class ByFixtures(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope = super()._split_scope(nodeid)
            if is_fast and scope in ENGINES_HERE:
                return "engines"
            if is_fast and starts_runs(scope):
                return "runs"
            return re.sub(r"test_(ahead_servers|one_server)\.py", "test_servers.py", scope)

    return ByFixtures(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that skips for want of the sample data although the data is there."""
    report = yield
    reason = str(call.excinfo.value) if call.excinfo else ""
    about_shared = item.nodeid in _asked_for_shared_data or "sample data" in reason or "shared" in reason
    if report.skipped and not hasattr(report, "wasxfail") and about_shared and SHARED_DATA.is_dir():
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} skipped although {SHARED_DATA} is there: {reason}"
    return report


@pytest.fixture(scope="session", autouse=True)
def _remove_what_passed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """Remove the folders of this process at its end, gigabytes after a whole run, unless a test failed.

    Not after each test, as pytest would with tmp_path_retention_policy "failed": a later test would get the same
    folder, and caches know files by their place.
    """
    yield
    was_asked_for = request.config.option.basetemp and not hasattr(request.config, "workerinput")
    if request.session.testsfailed or was_asked_for:
        return
    for folder in tmp_path_factory.getbasetemp().iterdir():
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _warm_graders() -> None:
    """Fork the comparison servers of graders; tests/grading/test_symbolic.py starts them as a user's are."""
    from tests.helpers.warm_grader import use_warm_grader

    use_warm_grader()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random tiny Qwen2.5-VL, to read only."""
    from vlm_rl.toy.counting_squares import SQUARES
    from vlm_rl.toy.tiny_model import build_tiny_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    return build_tiny_model(folder, seed=0, tokenizer_texts=SQUARES.tokenizer_texts())


@pytest.fixture(scope="session")
def family_model(tiny_model: Path) -> Callable[[str], Path]:
    """Return a function that gives the folder of a random tiny model of a type, to read only."""
    from tests.helpers.families import build_family

    @cache
    def build(model_type: str) -> Path:
        return build_family(model_type, tiny_model.parent / "families" / model_type, tokenizer_of=tiny_model)

    return build


@pytest.fixture(scope="session")
def runner() -> Runner:
    """Return a runner of commands, each in its own process, which has imported everything once."""
    from tests.helpers.toy_runs import shared_runner

    return shared_runner()


@pytest.fixture(scope="session")
def toys(tiny_model: Path, runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Toys:
    """Return toy problems, a policy that answers in the right format by guessing, and a runner of commands."""
    from tests.helpers.toy_runs import make_toys

    return make_toys(tmp_path_factory.mktemp("toys"), tiny_model=tiny_model, runner=runner)


@pytest.fixture(scope="module", autouse=True)
def _as_outside_of_torchrun() -> Generator[None]:
    """Take back what a process group of this process sets: later tests' commands would take it for theirs."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    before = {name: os.environ[name] for name in names if name in os.environ}
    yield
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(before)


@pytest.fixture(scope="module")
def browser() -> Generator[object]:
    """Yield a browser for all visits of a file."""
    from tests.helpers.browser import open_browser

    with open_browser() as program:
        yield program
