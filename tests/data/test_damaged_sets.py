"""Sets that were damaged by hand: training and evaluation refuse them with a message that names the file, or run."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.damaged_sets import DAMAGES, small_set
from vlm_rl.config import DataConfig
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.sets import check_patch_size, contaminated_sources, load_eval_sets, load_training_sets
from vlm_rl.errors import UserError
from vlm_rl.evaluation.sets import Origin, open_set
from vlm_rl.grading.grader import Grader, task_of
from vlm_rl.templates import TEMPLATES

SILENT = dict.fromkeys(("mode", "temperature", "samples", "top_p", "max_tokens", "template"))
OPTIONS, ORIGIN = Namespace(images="real", **SILENT), Origin(step=0, contaminated=(), run=None)
TEMPLATE = TEMPLATES["think_answer"]
# Damage that leaves a set of problems which can be trained on, though perhaps not the same ones.
HARMLESS = {
    *("manifest gone", "sha256 of a number", "sha256 gone", "kept wrong"),
    *("one row group", "row groups of one", "rows in a different order", "column added"),
    *("column choices gone", "column source gone", "column difficulty gone"),
    *("choices null", "source null", "category null", "difficulty null", "difficulty NaN", "meta null"),
    *("id very long", "id with control characters", "question very long"),
    *("answer of 400 digits", "answer very long", "question with control tokens", "manifest a folder"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_set(tmp_path_factory.mktemp("sets") / "whole")


@pytest.fixture(scope="module")
def builder(tiny_model: Path) -> PromptBuilder:
    return PromptBuilder(tiny_model, template=TEMPLATE)


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(workers=1) as grader:
        yield grader


def used_by_training(path: Path, builder: PromptBuilder, grader: Grader) -> None:
    """Do everything that training does with a set, and grade a response to each problem."""
    config = DataConfig(train=[str(path)], allow_test_rows=True)
    problems = load_training_sets(config)
    check_patch_size(config.train, builder.patch_size)
    contaminated_sources(problems)
    for problem in problems:
        builder.build(problem)
    responses = [TEMPLATE.wrap("a", "2.5 cm"), TEMPLATE.wrap("a", "B"), ""]
    grader.grade_many([task_of(problem, text, TEMPLATE) for problem in problems for text in responses])


def test_the_whole_set_passes(whole: Path, builder: PromptBuilder, grader: Grader) -> None:
    used_by_training(whole, builder, grader)
    assert len(load_eval_sets(DataConfig(train=["x"], eval=[str(whole)]))["whole"]) == 18
    assert len(open_set(whole, OPTIONS, ORIGIN).problems) == 18


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_set_is_refused_by_name_or_used(
    whole: Path, builder: PromptBuilder, grader: Grader, tmp_path: Path, name: str
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "damaged"))
    DAMAGES[name](folder)
    refusals = []
    for use in (
        lambda: used_by_training(folder, builder, grader),
        lambda: load_eval_sets(DataConfig(train=["x"], eval=[str(folder)])),
        lambda: open_set(folder, OPTIONS, ORIGIN),
    ):
        try:
            use()
        except UserError as error:
            refusals.append(str(error))
            assert "\n" not in str(error)
    if not name.startswith("a bit flipped"):  # which may lie where nothing is
        assert bool(refusals) is (name not in HARMLESS), refusals
    assert all("damaged" in text or "Toy-" in text for text in refusals), refusals
