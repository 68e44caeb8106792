"""Read prepared sets, and refuse what must not be trained or scored on.

A prepared set is a folder with data.parquet (columns of types.Problem; images as bytes, meta as
JSON text) and manifest.json, both written by `vlm-rl prepare`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa

from vlm_rl.config import DataConfig, check_benchmark_name
from vlm_rl.data.images import DEFAULT_LIMITS, TEST_LIMITS, decode_image
from vlm_rl.data.stored_images import ImageColumn, StoredImages
from vlm_rl.errors import UserError
from vlm_rl.model_files.hub_models import is_hub_name
from vlm_rl.types import AnswerType, Problem, marker_fault, times_fault
from vlm_rl.untrusted.json_object import read_object
from vlm_rl.untrusted.plain_files import check_plain


def load_set(path: str | Path) -> list[Problem]:
    """Return all problems of a prepared set, on every rank; the images stay in the file until they are used.

    Preparation has seen every image. If the file has changed since, each is decoded once here, so that a broken
    one stops the run now and not in the middle; one rank does that for all.
    Raises UserError if the folder is not a prepared set, or for a bad row.
    """
    from vlm_rl.distributed import from_main  # here, since it loads torch, which reading the problems does not need

    path = Path(path)
    file = check_is_set(path)
    try:
        images = ImageColumn(file)
        _check_columns(file, images.schema)
        rows = images.table().to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())  # Arrow's takes several lines
        raise UserError(f"{file} cannot be read as Parquet ({reason}); prepare the set again") from None
    problems: dict[str, Problem] = {}
    for index, row in enumerate(rows):
        fault = _fault_of(row)
        problem = None if fault else problem_of_row(row, _images_of(row, images, index))
        if problem is not None and problem.id in problems:
            fault = "has the id of an earlier row"
        if problem is None or fault:
            raise UserError(
                f"{file} row {index}: problem {row['id']!r} {fault}; fix or drop the row and prepare again"
            )
        problems[problem.id] = problem
    from_main(lambda: _check_images(path, list(problems.values())))
    return list(problems.values())


def is_prepared(path: Path) -> bool:
    """Tell whether a folder is a prepared set, by its two files; none of them is read."""
    return (path / "manifest.json").is_file() and (path / "data.parquet").is_file()


def check_is_set(path: str | Path) -> Path:
    """Return the file with the rows of a prepared set. Raises UserError for any other folder; no row is read."""
    file = Path(path) / "data.parquet"
    if not file.is_file():
        if Path(path).exists():
            raise UserError(
                f"{path} is not a prepared set: it has no data.parquet; `vlm-rl prepare {path} --out SET` makes one"
            )
        hub, name = "", Path(path).name
        if is_hub_name(path) and not Path(path).parent.exists():
            hub = f"; if it is a data set of the hub, `vlm-rl prepare {path} --out data/{name}`, and then data/{name}"
        raise UserError(
            f"{path} is not a prepared set: there is no such folder; `vlm-rl prepare DATA --out {path}` makes one "
            f"of a folder, a file or a hub id{hub}"
        )
    check_plain(file.with_name("manifest.json"))
    read_manifest(path)
    return file


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _is_images(kind: Any) -> bool:
    if not (_is_list(kind) and pa.types.is_struct(kind.value_type)) or kind.value_type.get_field_index("bytes") < 0:
        return False
    data = kind.value_type.field("bytes").type
    return pa.types.is_binary(data) or pa.types.is_large_binary(data)


_REQUIRED: dict[str, tuple[Callable[[Any], bool], str]] = {  # column -> its type, in code and in words
    **dict.fromkeys(("id", "question", "answer", "answer_type", "meta"), (_is_text, "text")),
    "images": (_is_images, "lists of {bytes, path}"),
}
_OPTIONAL: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("source", "category"), (_is_text, "text")),
    "choices": (lambda kind: _is_list(kind) and _is_text(kind.value_type), "lists of texts"),
    "difficulty": (pa.types.is_floating, "numbers"),
}


def _check_columns(file: Path, schema: pa.Schema) -> None:
    """Raise UserError for a column that is missing or holds values of a different type."""
    for name, (is_right, words) in (_REQUIRED | _OPTIONAL).items():
        if name not in schema.names:
            if name in _REQUIRED:
                raise UserError(f"{file}: column {name!r} is missing; prepare the set again")
        elif schema.names.count(name) > 1:
            raise UserError(f"{file}: column {name!r} is there twice; prepare the set again")
        elif not is_right(kind := schema.field(name).type):
            raise UserError(f"{file}: column {name!r} must hold {words}, not {kind}; prepare the set again")


def _is_distance(value: float | str) -> bool:
    try:
        return 0 <= float(value) < math.inf
    except (ValueError, OverflowError):
        return False


def _are_boxes(value: Any) -> bool:
    return _is_box(value) or (isinstance(value, list) and len(value) > 1 and all(map(_is_box, value)))


def _is_box(value: Any) -> bool:
    if not isinstance(value, list) or [type(corner) in (int, float) for corner in value] != [True] * 4:
        return False
    x1, y1, x2, y2 = value
    return 0 <= x1 < x2 <= 1 and 0 <= y1 < y2 <= 1


def _are_times(value: Any) -> bool:
    return isinstance(value, list) and all(not times_fault(times) for times in value)


_META: dict[str, tuple[Callable[[Any], bool], str]] = {  # known key -> what it must be, in code and in words
    "test_only": (lambda value: isinstance(value, bool), "true or false"),
    "precision": (lambda value: type(value) is int and 0 <= value <= 30, "a number of digits from 0 to 30"),
    "tolerance": (lambda value: isinstance(value, int | float | str) and _is_distance(value), "a number from 0 on"),
    "system": (lambda value: isinstance(value, str) and bool(value.strip()), "text"),
    "unit": (lambda value: isinstance(value, str), "text"),
    "box": (_are_boxes, "four fractions of the image's sides, x1 < x2 and y1 < y2, or a list of several such boxes"),
    "response": (lambda value: isinstance(value, str) and bool(value.strip()), "text"),
    "videos": (_are_times, "lists of at least two times in seconds, each above the last"),
    "tests": (lambda value: isinstance(value, str), "the text of CodeTests.packed"),
    "alternatives": (lambda value: isinstance(value, list) and all(isinstance(v, str) for v in value), "texts"),
}


def _fault_of(row: Mapping[str, Any]) -> str:
    """Describe a row's fault as the end of a sentence; "" if it has none."""
    for name in ("id", "question", "answer"):
        if not (row[name] or "").strip():
            more = ", so nothing could be graded" if name == "answer" else ""
            return f"has no {name}{more}"
    if row["answer_type"] not in (kinds := get_args(AnswerType)):
        return f"has the answer type {row['answer_type']!r}; known: {', '.join(kinds)}"
    if None in (row.get("choices") or ()):
        return "has an empty choice"
    try:
        meta = read_object(row["meta"] or "{}")
    except ValueError as error:
        return f"has meta that is not JSON ({error})"
    for key, (is_right, words) in _META.items():
        if key in meta and not is_right(meta[key]):
            return f"has the {key} {meta[key]!r:.60} in its meta, which must be {words}"
    if row["answer_type"] == "code" and "tests" not in meta:
        return "has the answer type code and no tests in its meta, so no program could be graded"
    return marker_fault(row["question"], len(row["images"] or ()), meta.get("videos", ()))


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


def set_digests(paths: Sequence[str]) -> dict[str, str | None]:
    """Return path -> the checksum of its rows that preparation has recorded, None if it has not."""
    return {path: _recorded_digest(path) for path in paths}


def check_same_sets(run: Path, begun_with: Mapping[str, str | None], paths: Sequence[str]) -> None:
    """Raise UserError if a set of a resume was prepared again: its order and its ids would be other ones."""
    for path, now in set_digests(paths).items():
        if begun_with.get(path) not in (None, now):
            raise UserError(
                f"{path} was prepared again since {run} began with it: prepare it as it was (its rows had the sha256 "
                f"{begun_with[path]}), or start a new run with a different out"
            )


def _is_as_prepared(path: Path) -> bool:
    """Tell whether data.parquet has the checksum that the manifest records."""
    recorded = _recorded_digest(path)
    if recorded is None:
        return False
    with (path / "data.parquet").open("rb") as file:
        return recorded == hashlib.file_digest(file, "sha256").hexdigest()


def _recorded_digest(path: str | Path) -> str | None:
    return read_manifest(path).get("sha256", {}).get("data.parquet")


_MANIFEST: dict[str, type] = {
    **dict.fromkeys(("min_pixels", "max_pixels", "patch_size"), int),
    **dict.fromkeys(("sha256", "options", "dropped", "notes"), dict),
}


def read_manifest(path: str | Path) -> dict[str, Any]:
    """Return the manifest of a prepared set, or {} if it has none. Raises UserError for a damaged one."""
    file = Path(path) / "manifest.json"
    if not file.is_file():
        return {}
    try:
        facts = read_object(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is not readable JSON ({error}); prepare the set again") from None
    for key, kind in _MANIFEST.items():
        if key in facts and type(facts[key]) is not kind:
            wanted = "a whole number" if kind is int else "an object"
            raise UserError(f"{file}: {key} is {facts[key]!r:.60}, not {wanted}; prepare the set again")
    return facts


def _images_of(row: Mapping[str, Any], images: ImageColumn, index: int) -> Sequence[bytes]:
    count = len(row["images"] or ())
    return StoredImages(images, index, count) if count else ()


def problem_of_row(row: Mapping[str, Any], images: Sequence[bytes]) -> Problem:
    """Return a row of data.parquet as a problem with these images; optional columns may be missing."""
    return Problem(
        id=row["id"],
        question=row["question"],
        images=images,
        answer=row["answer"],
        answer_type=row["answer_type"],
        choices=tuple(row.get("choices") or ()),
        source=row.get("source") or "",
        category=row.get("category") or "",
        difficulty=-1.0 if row.get("difficulty") is None else row["difficulty"],
        meta=json.loads(row["meta"]) if row["meta"] else {},
    )


def load_training_sets(config: DataConfig, *, may_be_larger: bool = False) -> list[Problem]:
    """Return the problems of data.train, in order. For `may_be_larger` see `check_pixel_limits`.

    Raises UserError for a set prepared with other pixel limits, for ids that occur twice, and for
    rows of a benchmark unless data.allow_test_rows is true.
    """
    problems: list[Problem] = []
    origin: dict[str, str] = {}
    for path in config.train:
        check_pixel_limits(path, config, may_be_larger=may_be_larger)
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


def load_eval_sets(config: DataConfig, *, may_be_larger: bool = False) -> dict[str, list[Problem]]:
    """Return the problems of each set of data.eval under the name of its folder, which its results get too.

    For `may_be_larger` see `check_pixel_limits`.

    Raises UserError for a name that a folder of results cannot have, and for a name that occurs twice.
    """
    sets: dict[str, list[Problem]] = {}
    for path in config.eval:
        name = check_benchmark_name(Path(path).resolve().name)
        if name in sets:
            raise UserError(f"data.eval: {path} is the second set named {name!r}, and results go by name; rename one")
        check_pixel_limits(path, config, may_be_larger=may_be_larger)
        sets[name] = load_set(path)
        check_runnable(path, sets[name])
        if not sets[name]:
            raise UserError(f"data.eval: {path} holds no problems; prepare it again or leave it out")
    return sets


def check_pixel_limits(path: str | Path, config: DataConfig, *, may_be_larger: bool = False) -> None:
    """Raise UserError if a set's images were prepared for other pixel limits than the run's.

    With an environment they `may_be_larger`: a prompt shows them smaller, and a tool looks closer.
    """
    recorded = read_manifest(path)
    for key in ("min_pixels", "max_pixels"):
        wanted = getattr(config, key)
        if may_be_larger and key == "max_pixels" and recorded.get(key, wanted) > wanted:
            continue
        if key in recorded and recorded[key] != wanted:
            raise UserError(
                f"{path} was prepared with {key} {recorded[key]}, but data.{key} is {wanted}: "
                f"set data.{key}={recorded[key]}, or prepare the set again"
            )


def check_patch_size(paths: Iterable[str | Path], patch_size: int | None) -> None:
    """Raise UserError if a set's images were put on the grid of a model with a different patch size (pixels).

    None is for a model that takes images of any size.
    """
    if patch_size is None:
        return
    for path in paths:
        recorded = read_manifest(path).get("patch_size", patch_size)
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
