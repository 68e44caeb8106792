"""Whatever a text holds, its reader gives an object or a ValueError; so do the readers of files that use it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_rl.data.sets import read_manifest
from vlm_rl.data_prep.readers.find_data import find_data
from vlm_rl.data_prep.shards import ShardRecord
from vlm_rl.demo.numbers.library import find_runs
from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.benchmark import UnreadableReplyError
from vlm_rl.evaluation.benchmarks.logicvista import _choices_in
from vlm_rl.evaluation.compare import read_results
from vlm_rl.model_files.adapters import base_of
from vlm_rl.model_files.finite_weights import non_finite_tensor
from vlm_rl.model_files.model_folder import read_model_config
from vlm_rl.run.mirror import Progress
from vlm_rl.untrusted.json_object import read_object

DEEP = "[" * 100_000
NOT_OBJECTS = {
    "nothing": "",
    "cut": '{"a": ',
    "a list": "[]",
    "a number": "3",
    "null": "null",
    "a text": '"x"',
    "deep": '{"a": ' + DEEP,
    "digits": '{"a": ' + "9" * 5000 + "}",
}


@given(st.dictionaries(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists)))
def test_an_object_is_read_from_text_and_bytes(tree: dict[str, Any]) -> None:
    assert read_object(json.dumps(tree)) == read_object(json.dumps(tree).encode()) == tree


@pytest.mark.parametrize("data", [*NOT_OBJECTS.values(), b"\xff\xfe\x00", b'{"a": "\xff"}', DEEP], ids=repr)
def test_everything_else_is_a_value_error_with_a_short_reason(data: str | bytes) -> None:
    with pytest.raises(ValueError) as caught:
        read_object(data)
    assert 0 < len(str(caught.value)) < 200


@given(st.binary(max_size=50))
def test_any_bytes_are_an_object_or_a_value_error(data: bytes) -> None:
    with suppress(ValueError):
        assert isinstance(read_object(data), dict)


# -- readers of files that a user may damage -----------------------------------------------------------


def _compared(folder: Path, text: str) -> object:
    (folder / "result.json").write_text(text)
    return read_results(folder / "result.json")


def _configured(folder: Path, text: str) -> object:
    (folder / "config.json").write_text(text)
    return read_model_config(str(folder))


def _prepared(folder: Path, text: str) -> object:
    (folder / "manifest.json").write_text(text)
    return read_manifest(folder)


def _adapted(folder: Path, text: str) -> object:
    (folder / "adapter_config.json").write_text("{}")
    (folder / "base_model.json").write_text(text)
    return base_of(folder)


def _saved(folder: Path, text: str) -> object:
    (folder / "state.json").write_text(text)
    return find_data(folder)


def _mirrored(folder: Path, text: str) -> object:
    (folder / "trackers").mkdir()
    (folder / "trackers" / "wandb.json").write_text(text)
    return Progress.read(folder, "wandb")


@pytest.mark.parametrize("text", NOT_OBJECTS.values(), ids=NOT_OBJECTS)
@pytest.mark.parametrize("read", [_compared, _configured, _prepared, _adapted, _saved, _mirrored])
def test_a_damaged_file_is_the_users_error(tmp_path: Path, read: Callable[[Path, str], object], text: str) -> None:
    with pytest.raises(UserError):
        read(tmp_path, text)


@pytest.mark.parametrize("text", NOT_OBJECTS.values(), ids=NOT_OBJECTS)
def test_a_damaged_file_that_is_not_needed_is_as_none(tmp_path: Path, text: str) -> None:
    """A study's rules give the order of its runs, a shard's record what need not be made again."""
    (tmp_path / "comparison.json").write_text(text)
    with pytest.raises(UserError, match="holds none"):
        find_runs(tmp_path)
    (tmp_path / "shard.json").write_text(text)
    (tmp_path / "shard.parquet").write_bytes(b"")
    assert ShardRecord.load(tmp_path / "shard") is None


@pytest.mark.parametrize("text", NOT_OBJECTS.values(), ids=NOT_OBJECTS)
def test_a_damaged_header_and_a_damaged_reply(tmp_path: Path, text: str) -> None:
    header = text.encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="is not a safetensors file"):
        non_finite_tensor(tmp_path / "x.safetensors")
    with pytest.raises(UnreadableReplyError):
        _choices_in(f"Sure: {text} }}")
