"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.helpers.toy_runs import Toys

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")  # a busy machine is no failure

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
_asked_for_shared_data: set[str] = set()


def shared_data() -> Path:
    """Return the folder of real sample data beside the checkout; skip the test where there is none."""
    _asked_for_shared_data.add(os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0])
    if not SHARED_DATA.is_dir():
        pytest.skip(f"needs the sample data at {SHARED_DATA}")
    return SHARED_DATA


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


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random tiny Qwen2.5-VL, to read only."""
    from vlm_rl.data_prep.counting_squares import SQUARES
    from vlm_rl.toy.tiny_model import build_tiny_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    return build_tiny_model(folder, seed=0, tokenizer_texts=SQUARES.tokenizer_texts())


@pytest.fixture(scope="session")
def toys(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Toys]:
    """Yield toy problems, a policy that answers in the right format by guessing, and a runner of commands."""
    from tests.helpers.toy_runs import Runner, make_toys

    folder = tmp_path_factory.mktemp("toys")
    with Runner(folder, crash=True) as runner:
        yield make_toys(folder, tiny_model=tiny_model, runner=runner)
