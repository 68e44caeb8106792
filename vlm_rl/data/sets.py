"""Read prepared sets, and refuse what must not be trained or scored on.

A prepared set is a folder with data.parquet (columns of types.Problem; images as bytes, meta as
JSON text) and manifest.json, both written by `vlm-rl prepare`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from vlm_rl.config import DataConfig, check_benchmark_name
from vlm_rl.data.images import DEFAULT_LIMITS, TEST_LIMITS, decode_image
from vlm_rl.data.lazy_images import PictureFile, StoredPictures
from vlm_rl.distributed import from_main
from vlm_rl.errors import UserError
from vlm_rl.types import IMAGE_MARKER, Problem


def load_set(path: str | Path) -> list[Problem]:
    """All problems of one prepared set, on every rank; pictures stay in the file until they are looked at.

    Preparation has seen every picture. Where the file is not as it was left then, each is decoded once
    here, so that a broken one is found now and not in the middle of a run; one rank does that for all.
    Raises UserError if the folder is not a prepared set, or for a bad row.
    """
    path = Path(path)
    file = path / "data.parquet"
    if not file.is_file():
        raise UserError(f"{path} is not a prepared set: it has no data.parquet; `vlm-rl prepare` makes one")
    try:
        pictures = PictureFile(file)
        table = pictures.table()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file} cannot be read as Parquet ({error}); prepare the set again") from None
    missing = {"id", "question", "images", "answer", "answer_type", "meta"} - set(table.column_names)
    if missing:
        raise UserError(f"{file}: column {sorted(missing)[0]!r} is missing; prepare the set again")
    problems = [_problem(row, pictures, index) for index, row in enumerate(table.to_pylist())]
    for index, problem in enumerate(problems):
        _check_problem(problem, where=f"{file} row {index}: problem {problem.id!r}")
    from_main(lambda: _check_pictures(path, problems))
    return problems


def _check_problem(problem: Problem, *, where: str) -> None:
    if not problem.answer:
        raise UserError(f"{where} has no answer, so nothing could be graded; mend or drop the row and prepare again")
    markers, images = problem.question.count(IMAGE_MARKER), len(problem.images)
    if markers != images:
        raise UserError(
            f"{where} has {markers} {IMAGE_MARKER} markers in its question but {images} images; "
            "mend or drop the row and prepare again"
        )


def _check_pictures(path: Path, problems: Sequence[Problem]) -> None:
    """Decode them all, unless the file is the one whose pictures preparation has decoded."""
    if _is_as_prepared(path):
        return
    for index, problem in enumerate(problems):
        _check_images(problem, where=f"{path / 'data.parquet'} row {index}: problem {problem.id!r}")


def _check_images(problem: Problem, *, where: str) -> None:
    for index, data in enumerate(problem.images):
        limits = TEST_LIMITS if problem.test_only else DEFAULT_LIMITS
        try:
            decode_image(data, where=f"{where} image {index}", limits=limits)
        except UserError as error:
            raise UserError(f"{error}; mend or drop the row and prepare again") from None


def _is_as_prepared(path: Path) -> bool:
    """Whether data.parquet has the checksum that the manifest names."""
    if not (path / "manifest.json").is_file():
        return False
    recorded = json.loads((path / "manifest.json").read_text()).get("sha256", {}).get("data.parquet")
    with (path / "data.parquet").open("rb") as file:
        return recorded == hashlib.file_digest(file, "sha256").hexdigest()


def _problem(row: Mapping[str, Any], pictures: PictureFile, index: int) -> Problem:
    count = len(row["images"] or ())
    return Problem(
        id=row["id"],
        question=row["question"],
        images=StoredPictures(pictures, index, count) if count else (),
        answer=row["answer"],
        answer_type=row["answer_type"],
        choices=tuple(row.get("choices") or ()),
        source=row.get("source") or "",
        category=row.get("category") or "",
        difficulty=-1.0 if row.get("difficulty") is None else row["difficulty"],
        meta=json.loads(row["meta"]) if row["meta"] else {},
    )


def load_training_sets(config: DataConfig) -> list[Problem]:
    """The problems of data.train, in order.

    Raises UserError for a set prepared with other pixel limits, for ids that occur twice, and for
    rows of a benchmark unless data.allow_test_rows is true.
    """
    problems: list[Problem] = []
    origin: dict[str, str] = {}
    for path in config.train:
        check_pixel_limits(path, config)
        loaded = load_set(path)
        check_runnable(path, loaded)
        for problem in loaded:
            if problem.test_only and not config.allow_test_rows:
                raise UserError(
                    f"{path}: problem {problem.id!r} belongs to a benchmark ({problem.source}); training on it "
                    "spoils every score on that benchmark. For a smoke run set data.allow_test_rows=true"
                )
            if problem.id in origin:
                raise UserError(f"problem id {problem.id!r} is in {origin[problem.id]} and again in {path}; drop one")
            origin[problem.id] = path
            problems.append(problem)
    if not problems:
        raise UserError(f"no problems in {', '.join(config.train)}")
    return problems


def load_eval_sets(config: DataConfig) -> dict[str, list[Problem]]:
    """The problems of each set of data.eval under the name that its results get, its folder's.

    Raises UserError for a name that no folder of results can have, and for one that occurs twice.
    """
    sets: dict[str, list[Problem]] = {}
    for path in config.eval:
        name = check_benchmark_name(Path(path).resolve().name)
        if name in sets:
            raise UserError(f"data.eval: {path} is the second set named {name!r}, and results go by name; rename one")
        check_pixel_limits(path, config)
        sets[name] = load_set(path)
        check_runnable(path, sets[name])
        if not sets[name]:
            raise UserError(f"data.eval: {path} holds no problems; prepare it again or leave it out")
    return sets


def check_pixel_limits(path: str | Path, config: DataConfig) -> None:
    """Raise UserError if a set's images were prepared for other pixel limits than the run's."""
    manifest = Path(path) / "manifest.json"
    if not manifest.is_file():
        return
    recorded = json.loads(manifest.read_text())
    for key in ("min_pixels", "max_pixels"):
        wanted = getattr(config, key)
        if key in recorded and recorded[key] != wanted:
            raise UserError(
                f"{path} was prepared with {key} {recorded[key]}, but data.{key} is {wanted}: "
                f"set data.{key}={recorded[key]}, or prepare the set again"
            )


def check_patch_size(paths: Iterable[str | Path], patch_size: int) -> None:
    """Raise UserError if a set's images were put on the grid of a model with other patches (pixels)."""
    for path in paths:
        manifest = Path(path) / "manifest.json"
        recorded = (
            json.loads(manifest.read_text()).get("patch_size", patch_size) if manifest.is_file() else patch_size
        )
        if recorded != patch_size:
            raise UserError(
                f"{path} was prepared for patches of {recorded} pixels, but the model has {patch_size}: "
                f"prepare it again with --patch-size {patch_size}"
            )


def check_runnable(path: str | Path, problems: Iterable[Problem]) -> None:
    """Raise UserError for a benchmark whose pictures were not there when it was prepared."""
    for problem in problems:
        if problem.meta.get("annotations_only"):
            raise UserError(
                f"{path}: problem {problem.id!r} has no picture, only its annotation: answers can be scored, but "
                "no model can be run on it; download the images and prepare the set again"
            )


def contaminated_sources(problems: Sequence[Problem]) -> list[str]:
    """The benchmarks whose rows are among the problems."""
    return sorted({problem.source for problem in problems if problem.test_only})


def refuse_contaminated(path: str | Path, problems: Sequence[Problem], trained_on: Sequence[str]) -> None:
    """Raise UserError if a set to evaluate on holds rows of a benchmark that the policy was trained on."""
    spoiled = sorted({problem.source for problem in problems} & set(trained_on))
    if spoiled:
        raise UserError(
            f"{path}: the policy was trained on rows of {spoiled[0]} (CONTAMINATED), so a score on it means nothing; "
            "evaluate on another set, or train without data.allow_test_rows"
        )
