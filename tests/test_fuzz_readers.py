"""Whatever a file or a link holds, its reader returns a value or raises the project's own error, never another.

Each test damages a corpus of good inputs, or makes inputs of its own. `make soak` runs many more examples:
FUZZ_EXAMPLES=5000 python -m pytest tests/test_fuzz_readers.py
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.benchmark_rows import ROWS
from tests.helpers.damaged_sets import small_set, table
from tests.helpers.images import encoded, smooth_noise
from vlm_rl.config import load_config, parse_config
from vlm_rl.data.images import decode_image
from vlm_rl.data.sets import load_set, read_manifest
from vlm_rl.data_prep.readers.sources import SOURCES
from vlm_rl.data_prep.records import DroppedRow, UsableRow
from vlm_rl.demo.numbers.url_state import UrlState
from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.registry import BENCHMARKS
from vlm_rl.evaluation.benchmarks.score_command import read_annotations, read_responses
from vlm_rl.grading.command import grade_file
from vlm_rl.run import checkpoint, manifest
from vlm_rl.run.directory import RunDirectory

ROOT = Path(__file__).resolve().parents[1]
fuzz = settings(max_examples=int(os.environ.get("FUZZ_EXAMPLES", "25")), suppress_health_check=list(HealthCheck))

# -- what is hostile -------------------------------------------------------------------------------

SPECIAL = [
    *("", " ", "\0", "\ud800", "\u202e", "NaN", "-1", "1e999", "9" * 5000, "null", "../../etc/passwd", "<image>"),
    *("x" * 10_000, "<|image_pad|>", "\\boxed{", "\x1b[31m", "{", "!!python/object:os.system", "${oc.env:HOME}"),
    *(None, True, False, 0, -1, 2**31, 2**63, 10**400, 0.0, -0.0, 1e308, float("nan"), float("inf"), [], {}, [[]]),
    *([None], {"": None}, {"a": {"b": []}}, [1, "a"], {"bytes": "x", "path": None}),
]
TEXT = st.text(st.characters(), max_size=30)
VALUES = st.recursive(
    st.sampled_from(SPECIAL) | TEXT | st.integers() | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)
EDITS = st.lists(
    st.tuples(st.floats(0, 1), st.sampled_from(["flip", "cut", "insert", "zero", "repeat"]), st.binary(max_size=8)),
    min_size=1,
    max_size=4,
)


def damaged(data: bytes, edits: list[tuple[float, str, bytes]]) -> bytes:
    """Change bytes at places given as shares of the whole."""
    for place, kind, extra in edits:
        at = int(place * len(data))
        size = 1 + len(extra)
        if kind == "cut":
            data = data[:at]
        elif kind == "flip":
            data = data[:at] + bytes(byte ^ (1 << size % 8) for byte in data[at : at + 1]) + data[at + 1 :]
        elif kind == "zero":
            data = data[:at] + bytes(len(data[at : at + size])) + data[at + size :]
        else:
            data = data[:at] + (extra if kind == "insert" else data[at : at + 40 * size]) + data[at:]
    return data


def replaced(tree: Any, places: list[tuple[int, Any]]) -> Any:
    """Return a copy of a tree with some of its values replaced; ... takes a key out."""
    tree = copy.deepcopy(tree)
    for number, value in places:
        spots = list(_spots(tree))
        if spots:
            parent, key = spots[number % len(spots)]
            if value is ...:
                del parent[key]
            else:
                parent[key] = value
    return tree


def _spots(tree: Any) -> Any:
    """Yield (container, key) of every value in a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield tree, key
        yield from _spots(value)


PLACES = st.lists(st.tuples(st.integers(0, 10_000), VALUES | st.just(...)), min_size=1, max_size=3)


def only_user_errors(read: Callable[[], object]) -> None:
    with suppress(UserError):
        read()


def with_file(name: str, data: bytes | str, read: Callable[[Path], object]) -> None:
    """Read a file of this content, which must end in a value or a UserError."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass"))
        only_user_errors(lambda: read(path))


def as_json(tree: Any) -> str:
    try:
        return json.dumps(tree)
    except ValueError:  # an int of too many digits
        return "[]"


# -- configurations ----------------------------------------------------------------------------------

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@fuzz
@given(st.sampled_from(CONFIGS), EDITS)
def test_damaged_configurations(file: Path, edits: list[Any]) -> None:
    with_file("config.yaml", damaged(file.read_bytes(), edits), load_config)


@fuzz
@given(st.sampled_from(CONFIGS), PLACES)
def test_configurations_of_other_values(file: Path, places: list[Any]) -> None:
    tree = replaced(yaml.safe_load(file.read_text()), places)
    only_user_errors(lambda: parse_config(tree))


@fuzz
@given(TEXT, st.lists(TEXT | st.sampled_from(["train.lr=", "train.lr=[", "a.b.c={", "=", "train=1", "${x}=1"])))
def test_overrides(text: str, overrides: list[str]) -> None:
    with_file("config.yaml", text, lambda path: load_config(path, overrides))
    only_user_errors(lambda: load_config(CONFIGS[0], overrides))


# -- prepared sets and manifests ---------------------------------------------------------------------


@functools.cache
def a_set() -> tuple[bytes, dict[str, Any]]:
    with TemporaryDirectory() as folder:
        path = small_set(Path(folder) / "set")
        table(lambda whole: whole.slice(14, 4))(path)  # two problems with an image and two without
        return (path / "data.parquet").read_bytes(), json.loads((path / "manifest.json").read_text())


@fuzz
@given(EDITS)
def test_damaged_prepared_sets(edits: list[Any]) -> None:
    with_file("data.parquet", damaged(a_set()[0], edits), lambda path: load_set(path.parent))


@fuzz
@given(EDITS, PLACES)
def test_damaged_manifests_of_sets(edits: list[Any], places: list[Any]) -> None:
    known = a_set()[1]
    with_file("manifest.json", damaged(json.dumps(known).encode(), edits), lambda path: read_manifest(path.parent))
    with_file("manifest.json", as_json(replaced(known, places)), lambda path: read_manifest(path.parent))


@functools.cache
def a_checkpoint_manifest() -> str:
    with TemporaryDirectory() as root, checkpoint.saving(Path(root), step=1) as work:
        (work / "config.json").write_bytes(b"{}")
        return (checkpoint.commit(work, Path(root), step=1, info={"cursor": 1}) / "MANIFEST.json").read_text()


@fuzz
@given(EDITS, PLACES, st.booleans())
def test_damaged_manifests_of_checkpoints(edits: list[Any], places: list[Any], seal: bool) -> None:
    """Also one whose own checksum is right: it is not a secret."""
    with TemporaryDirectory() as root:
        folder = Path(root)
        (folder / "config.json").write_bytes(b"{}")
        file, tree = folder / "MANIFEST.json", json.loads(a_checkpoint_manifest())
        file.write_text(a_checkpoint_manifest())
        if seal:
            tree.pop("sha256")
            with suppress(ValueError, TypeError):  # NaN, which is never written
                file.write_bytes(manifest._sealed(replaced(tree, places)))
        else:
            file.write_bytes(damaged(file.read_bytes(), edits))
        only_user_errors(lambda: checkpoint.verify(folder))
        only_user_errors(lambda: checkpoint.verify_model(folder))


# -- metrics -----------------------------------------------------------------------------------------


@fuzz
@given(st.lists(st.dictionaries(st.sampled_from(["step", "attempt", "loss"]) | TEXT, VALUES) | VALUES), EDITS)
def test_metrics(records: list[Any], edits: list[Any]) -> None:
    lines = ['{"step": 1, "attempt": 1, "loss": 0.5}', *map(as_json, records), "[" * 50_000, '{"step": 1e999}']
    text = "\n".join(lines)
    for data in (text.encode(), damaged(text.encode(), edits)):
        with_file("metrics.jsonl", data, lambda path: RunDirectory(path.parent).metrics())


# -- responses and annotations -----------------------------------------------------------------------


@fuzz
@given(
    st.sampled_from(sorted(BENCHMARKS)),
    st.sampled_from(["json", "jsonl", "csv", "tsv", "parquet"]),
    st.lists(st.dictionaries(st.sampled_from(["id", "pid", "response", "question_id", "Trial 1"]), VALUES)),
    EDITS,
)
def test_saved_responses(name: str, kind: str, rows: list[Any], edits: list[Any]) -> None:
    good = [{"id": str(number), "pid": str(number), "response": "\\boxed{1}"} for number in range(3)]
    text = as_json(rows) if kind == "json" else "\n".join(map(as_json, [*good, *rows]))
    for data in (text.encode(), damaged(json.dumps(good).encode(), edits)):
        with_file(f"r.{kind}", data, lambda path: read_responses(BENCHMARKS[name], [path]))


@fuzz
@given(st.sampled_from(sorted(ROWS)), PLACES, EDITS)
def test_annotations(name: str, places: list[Any], edits: list[Any]) -> None:
    """Scoring reads them, and preparation, which drops the row."""
    for file, rows in ROWS[name].items():
        tree = replaced(rows, places)
        texts = [as_json(tree).encode(), damaged(json.dumps(rows).encode(), edits)]
        for data in texts if file.endswith(".json") else texts[:0]:
            with_file(Path(file).name, data, lambda path: read_annotations(BENCHMARKS[name], [path]))
            with_file(Path(file).name, data, lambda path: prepare_rows(name, path))


def prepare_rows(source: str, path: Path) -> None:
    for row in SOURCES[source].read(path, ""):
        assert isinstance(row, UsableRow | DroppedRow)


@fuzz
@given(st.lists(st.dictionaries(st.sampled_from(["q", "a", "i", "c", "d", "id"]), VALUES), min_size=1), EDITS)
def test_tables_of_users(rows: list[Any], edits: list[Any]) -> None:
    columns = {"question": "q", "answer": "a", "images": "i", "choices": "c", "difficulty": "d", "id": "id"}
    first = dict.fromkeys(columns.values(), "1") | {"c": ["1"]}
    lines = "\n".join(map(as_json, [first, *rows])).encode()

    def read(path: Path) -> None:
        mapping = path.with_name("set.yaml")
        mapping.write_text(json.dumps({"path": path.name, "source": "mine", "columns": columns}))
        prepare_rows("generic", mapping)

    for data in (lines, damaged(lines, edits)):
        with_file("rows.jsonl", data, read)


@fuzz
@given(st.lists(st.dictionaries(st.sampled_from(["gold", "response", "choices", "answer_type", "id"]), VALUES)))
def test_lines_to_grade(rows: list[Any]) -> None:
    """Rows are read, and refused before anything is graded: the last one has no response."""
    text = "\n".join(map(as_json, [*rows, {"gold": "1"}]))
    with_file(
        "g.jsonl", text, lambda path: grade_file(path, path.with_suffix(".out"), template="plain", infer_type=str)
    )


# -- images ------------------------------------------------------------------------------------------


@functools.cache
def images() -> list[bytes]:
    noise = smooth_noise(56, 84)
    modes = {"1": "PNG", "L": "PNG", "P": "PNG", "RGBA": "PNG", "CMYK": "JPEG", "I;16": "PNG", "RGB": "WEBP"}
    return [encoded(noise, kind) for kind in ("PNG", "JPEG", "WEBP")] + [
        encoded(noise.convert("L" if mode == "I;16" else mode).convert(mode), kind) for mode, kind in modes.items()
    ]


@fuzz
@given(st.integers(0, 9), EDITS)
def test_damaged_images(number: int, edits: list[Any]) -> None:
    only_user_errors(lambda: decode_image(damaged(images()[number], edits), where="here"))


@fuzz
@given(st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF\0\0\0\0WEBP"]), st.binary(max_size=200))
def test_bytes_that_are_no_image(start: bytes, rest: bytes) -> None:
    with pytest.raises(UserError):
        decode_image(start + rest, where="here")


# -- links -------------------------------------------------------------------------------------------

KEYS = st.sampled_from(["benchmark", "at", "sample", "low", "step", "flags", "sort", "tab", "text", "others"]) | TEXT


@fuzz
@given(
    st.lists(st.tuples(KEYS, TEXT | st.sampled_from([str(v) for v in SPECIAL if v != 10**400]))), st.integers(1, 90)
)
def test_links(pairs: list[tuple[str, str]], times: int) -> None:
    query = "&".join(f"{_quoted(key)}={_quoted(value)}" for key, value in pairs)
    for text in (query, "&".join([query] * times), query.replace("%", "%%")):
        state = UrlState.parse(text)
        assert UrlState.parse(state.query()) == UrlState.parse(UrlState.parse(state.query()).query())


def _quoted(text: str) -> str:
    return quote(text.encode("utf-8", "surrogatepass"))


# -- bodies of the demo's requests -------------------------------------------------------------------


@functools.cache
def demo_guard() -> tuple[Any, list[tuple[str, dict[str, Any]]]]:
    """Return the guard of a page, and what it lets through: paths with a body, among them one for each event."""
    pytest.importorskip("gradio", reason="the demo extra is not installed")
    import httpx

    from tests.helpers.demo_events import JOIN, first_bodies
    from tests.helpers.example_run import build_run
    from vlm_rl.demo.server import make_server

    async def config(guard: Any) -> dict[str, Any]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://localhost") as client:
            return (await client.get("/config")).json()

    with TemporaryDirectory() as folder:
        guard = make_server([build_run(Path(folder) / "run", steps=1, num_problems=2).path])
        bodies = [(JOIN, body | {"session_hash": "s"}) for body in first_bodies(asyncio.run(config(guard)))]
    cancel = {"event_id": "e", "session_hash": "s", "fn_index": 0}
    return guard, [*bodies, ("/gradio_api/cancel", cancel), ("/gradio_api/reset", {"event_id": "e"})]


def posted(
    guard: Any, path: str, pieces: list[bytes], headers: list[tuple[bytes, bytes]]
) -> tuple[int, bytes | None]:
    """Post a body in pieces; return the status, and the body that the guard passed on or None."""
    passed: list[bytes] = []
    statuses: list[int] = []
    arriving = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    arriving[-1]["more_body"] = False

    async def gradio(scope: Any, receive: Any, send: Any) -> None:
        passed.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Any:
        return arriving.pop(0)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    guard._app = gradio
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b""}
    asyncio.run(guard(scope | {"headers": [(b"host", b"localhost"), *headers]}, receive, send))
    (status,) = statuses
    return status, passed[0] if passed else None


def names_a_file(tree: Any) -> bool:
    """Tell whether there is an object anywhere that gradio could take for file data."""
    return any(isinstance(parent, dict) and key == "path" for parent, key in _spots(tree))


PATHS = st.sampled_from(["/etc/passwd", "http://127.0.0.1/x", "../../x", "data:,x", ""]) | TEXT
FILES = st.builds(
    lambda path, others, order: dict(
        order.sample([("path", path), ("meta", {"_type": "gradio.FileData"}), *others], len(others) + 2)
    ),
    PATHS,
    st.lists(st.tuples(st.sampled_from(["url", "orig_name", "size", "mime_type", "is_stream"]) | TEXT, VALUES)),
    st.randoms(use_true_random=False),
)
HIDDEN = st.recursive(
    FILES,
    lambda inner: st.lists(inner | VALUES, max_size=3) | st.dictionaries(TEXT, inner | VALUES, max_size=3),
    max_leaves=4,
)
MORE_KEYS = st.sampled_from(["event_data", "trigger_id", "oauth_token", "simple_format", "batched", "request"]) | TEXT
# How a body is written: (where a second "data" is, how "path" is spelt, the encoding of the whole)
WRITINGS = st.tuples(
    st.sampled_from(["", "first", "last"]),
    st.sampled_from(["path", "\\u0070ath", "\\u0070\\u0061\\u0074\\u0068"]),
    st.sampled_from(["utf-8"] * 5 + ["utf-8-sig", "utf-16", "utf-16-be", "utf-32", "utf-7"]),
)


@fuzz
@given(
    data=st.data(),
    places=st.lists(st.tuples(st.integers(0, 10_000), HIDDEN | VALUES | st.just(...)), max_size=2),
    more=st.dictionaries(MORE_KEYS, HIDDEN | VALUES, max_size=2),
    second=HIDDEN | VALUES,
    writing=WRITINGS,
    edits=st.just([]) | EDITS,
    kind=st.sampled_from([b"application/json", b"text/plain", b"multipart/form-data", b"\xff", b""]),
    length=st.none() | st.sampled_from([b"", b"-1", b"1e3", b"0", b"9" * 30, "\u0661".encode()]),
)
def test_bodies_of_the_demo(data, places, more, second, writing, edits, kind, length) -> None:
    """Each is refused, or what reaches gradio is JSON that names no file."""
    guard, known = demo_guard()
    path, good = data.draw(st.sampled_from(known))
    assert posted(guard, path, [json.dumps(good).encode()], [(b"content-length", b"9")])[0] == 200
    place_of_data, spelling, encoding = writing
    text = as_json(replaced(good, places) | more).replace('"path"', f'"{spelling}"')
    if place_of_data == "first":
        text = f'{{"data": {as_json(second)}, {text[1:]}'
    elif place_of_data == "last":
        text = f'{text[:-1]}, "data": {as_json([second])}}}'
    body = damaged(text.encode(encoding, "surrogatepass" if encoding != "utf-7" else "replace"), edits)
    cut = data.draw(st.integers(0, len(body)))
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body) if length is None else length)]
    status, passed = posted(guard, path, [body[:cut], body[cut:]], headers)
    if passed is None:
        assert 400 <= status < 500
    else:
        assert not names_a_file(json.loads(passed))
        if "data" in good:  # what else it held was left out
            assert not names_a_file(json.loads(body)["data"])
