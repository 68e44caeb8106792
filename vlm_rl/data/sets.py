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
from vlm_rl.data.stored_images import ImageColumn, StoredImages
from vlm_rl.errors import UserError
from vlm_rl.types import IMAGE_MARKER, Problem


def load_set(path: str | Path) -> list[Problem]:
    """Return all problems of a prepared set, on every rank; the images stay in the file until they are used.

    Preparation has seen every image. If the file has changed since, each is decoded once here, so that a broken
    one stops the run now and not in the middle; one rank does that for all.
    Raises UserError if the folder is not a prepared set, or for a bad row.
    """
    from vlm_rl.distributed import from_main  # here, since it loads torch, which reading the problems does not need

    path = Path(path)
    file = path / "data.parquet"
    if not file.is_file():
        raise UserError(f"{path} is not a prepared set: it has no data.parquet; `vlm-rl prepare` makes one")
    try:
        images = ImageColumn(file)
        table = images.table()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file} cannot be read as Parquet ({error}); prepare the set again") from None
    missing = {"id", "question", "images", "answer", "answer_type", "meta"} - set(table.column_names)
    if missing:
        raise UserError(f"{file}: column {sorted(missing)[0]!r} is missing; prepare the set again")
    problems = [_problem(row, images, index) for index, row in enumerate(table.to_pylist())]
    for index, problem in enumerate(problems):
        _check_problem(problem, where=f"{file} row {index}: problem {problem.id!r}")
    from_main(lambda: _check_images(path, problems))
    return problems


def _check_problem(problem: Problem, *, where: str) -> None:
    if not problem.answer:
        raise UserError(f"{where} has no answer, so nothing could be graded; fix or drop the row and prepare again")
    markers, images = problem.question.count(IMAGE_MARKER), len(problem.images)
    if markers != images:
        raise UserError(
            f"{where} has {markers} {IMAGE_MARKER} markers in its question but {images} images; "
            "fix or drop the row and prepare again"
        )


def _check_images(path: Path, problems: Sequence[Problem]) -> None:
    """Decode every image, unless the file is the one whose images preparation has decoded."""
    if _is_as_prepared(path):
        return
    for row, problem in enumerate(problems):
        limits = TEST_LIMITS if problem.test_only else DEFAULT_LIMITS
        for index, data in enumerate(problem.images):
            where = f"{path / 'data.parquet'} row {row}: problem {problem.id!r} image {index}"
            try:
                decode_image(data, where=where, limits=limits)
            except UserError as error:
                raise UserError(f"{error}; fix or drop the row and prepare again") from None


def _is_as_prepared(path: Path) -> bool:
    """Tell whether data.parquet has the checksum that the manifest records."""
    recorded = _manifest(path).get("sha256", {}).get("data.parquet")
    if recorded is None:
        return False
    with (path / "data.parquet").open("rb") as file:
        return recorded == hashlib.file_digest(file, "sha256").hexdigest()


def _manifest(path: str | Path) -> dict[str, Any]:
    """Return the manifest of a prepared set, or {} if it has none."""
    file = Path(path) / "manifest.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _problem(row: Mapping[str, Any], images: ImageColumn, index: int) -> Problem:
    count = len(row["images"] or ())
    return Problem(
        id=row["id"],
        question=row["question"],
        images=StoredImages(images, index, count) if count else (),
        answer=row["answer"],
        answer_type=row["answer_type"],
        choices=tuple(row.get("choices") or ()),
        source=row.get("source") or "",
        category=row.get("category") or "",
        difficulty=-1.0 if row.get("difficulty") is None else row["difficulty"],
        meta=json.loads(row["meta"]) if row["meta"] else {},
    )


def load_training_sets(config: DataConfig) -> list[Problem]:
    """Return the problems of data.train, in order.

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
                    f"{path}: problem {problem.id!r} belongs to a benchmark ({problem.source}), and training on it "
                    "makes every score on that benchmark worthless; leave the set out, or set "
                    "data.allow_test_rows=true for a smoke run"
                )
            if problem.id in origin:
                raise UserError(f"problem id {problem.id!r} is in {origin[problem.id]} and again in {path}; drop one")
            origin[problem.id] = path
            problems.append(problem)
    if not problems:
        raise UserError(f"no problems in {', '.join(config.train)}; prepare a set that has some")
    return problems


def load_eval_sets(config: DataConfig) -> dict[str, list[Problem]]:
    """Return the problems of each set of data.eval under the name of its folder, which its results get too.

    Raises UserError for a name that a folder of results cannot have, and for a name that occurs twice.
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
    recorded = _manifest(path)
    for key in ("min_pixels", "max_pixels"):
        wanted = getattr(config, key)
        if key in recorded and recorded[key] != wanted:
            raise UserError(
                f"{path} was prepared with {key} {recorded[key]}, but data.{key} is {wanted}: "
                f"set data.{key}={recorded[key]}, or prepare the set again"
            )


def check_patch_size(paths: Iterable[str | Path], patch_size: int) -> None:
    """Raise UserError if a set's images were put on the grid of a model with a different patch size (pixels)."""
    for path in paths:
        recorded = _manifest(path).get("patch_size", patch_size)
        if recorded != patch_size:
            raise UserError(
                f"{path} was prepared for patches of {recorded} pixels, but the model has {patch_size}: "
                f"prepare it again with --patch-size {patch_size}"
            )


def check_runnable(path: str | Path, problems: Iterable[Problem]) -> None:
    """Raise UserError for a benchmark whose images were missing when it was prepared."""
    for problem in problems:
        if problem.meta.get("annotations_only"):
            raise UserError(
                f"{path}: problem {problem.id!r} has no image, only its annotation: answers can be scored, but "
                "no model can be run on it; download the images and prepare the set again"
            )


def contaminated_sources(problems: Sequence[Problem]) -> list[str]:
    """Return the benchmarks that have rows among the problems."""
    return sorted({problem.source for problem in problems if problem.test_only})


def refuse_contaminated(path: str | Path, problems: Sequence[Problem], trained_on: Sequence[str]) -> None:
    """Raise UserError if a set to evaluate on holds rows of a benchmark that the policy was trained on."""
    contaminated = sorted({problem.source for problem in problems} & set(trained_on))
    if contaminated:
        raise UserError(
            f"{path}: the policy was trained on rows of {contaminated[0]} (CONTAMINATED), so a score on it means "
            "nothing; evaluate on a different set, or train without data.allow_test_rows"
        )
