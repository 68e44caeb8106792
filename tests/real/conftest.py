"""Real weights and real pictures for the tests of this folder; all are skipped where `make real` has not been run."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.toy_runs import Runner
from vlm_rl.data_prep.word_sets import StyledSets, make_word_sets
from vlm_rl.run.directory import RunDirectory
from vlm_rl.toy.smollm import READER, WHEEL, make_smollm

FOLDER = Path(__file__).parent
PACKAGES = (WHEEL, READER, "easy_vqa")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and skip them where a package is missing."""
    missing = ", ".join(name for name in PACKAGES if find_spec(name) is None)
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.real)
            if missing:
                item.add_marker(pytest.mark.skip(reason=f"{missing} not installed: make real"))


@pytest.fixture(scope="session")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of SmolLM2-135M-Instruct in float32, to read only."""
    return make_smollm(tmp_path_factory.mktemp("smollm") / "SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> StyledSets:
    """Return prepared sets of word problems."""
    return make_word_sets(tmp_path_factory.mktemp("words"), traces=64, train=16, heldout=4)


@pytest.fixture(scope="session")
def started(
    smollm: Path, words: StyledSets, runner: Runner, tmp_path_factory: pytest.TempPathFactory
) -> RunDirectory:
    """Return a run of `vlm-rl sft` whose model has learned the form of a response."""
    out = tmp_path_factory.mktemp("sft") / "run"
    config = tmp_path_factory.mktemp("configs") / "sft.yaml"
    config.write_text(
        f"""
out: {out}
model: {{path: {smollm}}}
data: {{train: [{words.traces}], max_prompt_tokens: 256, max_response_tokens: 256}}
train: {{steps: 6, mini_batch_prompts: 2, lr: 3e-4, warmup_steps: 1}}
checkpoint: {{every: 6, keep_last: 1}}
"""
    )
    result = runner("sft", config, deadline=600)
    assert result.code == 0, result.output[-3000:]
    return RunDirectory(out)
