"""Models by their name on the hub, downloaded from a hub on this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants as hub_constants
import pytest

from tests.helpers.model_hub import ModelHub, model_hub
from vlm_rl.errors import UserError
from vlm_rl.model_files.hub_models import hub_name, is_hub_name, locate_model, pinned, short_name

FILES = {
    "config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": bytes(range(256)),
    "consolidated.safetensors": b"the same in a different format",
    "original/model.safetensors": b"and once more",
    "pytorch_model.bin": b"a pickle",
}
OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with model_hub() as server:
        monkeypatch.setattr(hub_constants, "ENDPOINT", server.url)
        files = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(hub_constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        server.published["Org/Tiny-VL"] = {OLD: FILES, NEW: FILES | {"config.json": b'{"newer": 1}'}}
        yield server


def test_the_newest_revision_is_downloaded_once_and_only_what_a_run_needs(hub: ModelHub) -> None:
    folder = locate_model("Org/Tiny-VL")
    assert hub_name(folder) == f"Org/Tiny-VL@{NEW}" and short_name(folder) == "Tiny-VL"
    assert {file.name for file in folder.iterdir()} == {"config.json", "chat_template.jinja", "model.safetensors"}
    assert (folder / "config.json").read_bytes() == b'{"newer": 1}'
    sent = len(hub.sent)
    assert locate_model("Org/Tiny-VL") == folder and len(hub.sent) == sent


def test_a_given_revision_and_no_weights(hub: ModelHub) -> None:
    folder = locate_model(f"Org/Tiny-VL@{OLD}", weights=False)
    assert folder.name == OLD and {file.name for file in folder.iterdir()} == {"config.json", "chat_template.jinja"}
    assert (folder / "config.json").read_bytes() == b"{}"


def test_offline_the_cache_serves_what_it_has(hub: ModelHub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = locate_model("Org/Tiny-VL")
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    assert locate_model("Org/Tiny-VL") == locate_model(f"Org/Tiny-VL@{NEW}") == folder
    command = f"hf download Org/Tiny-VL --revision {OLD} --local-dir models/Tiny-VL"
    with pytest.raises(UserError, match=re.escape(command)):
        locate_model(f"Org/Tiny-VL@{OLD}")


@pytest.mark.parametrize("named", ["Org/Absent", f"Org/Tiny-VL@{'c' * 40}"])
def test_what_the_hub_does_not_have(hub: ModelHub, named: str) -> None:
    with pytest.raises(UserError, match=r"cannot be downloaded from the hub: .*hf download Org/"):
        locate_model(named)


def test_a_folder_of_the_cache_that_has_gone_is_downloaded_again(hub: ModelHub, tmp_path: Path) -> None:
    gone = tmp_path / "elsewhere" / "models--Org--Tiny-VL" / "snapshots" / OLD
    assert locate_model(gone).name == OLD and not gone.exists()


@pytest.mark.parametrize("named", ["models/Qwen", "runs/a", "./a", "../a", "/a/b", "a", "a/b/c", "data/b@c"])
def test_paths_are_no_names_of_the_hub(named: str) -> None:
    assert not is_hub_name(named) and locate_model(named) == Path(named)


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("Org/Tiny") and is_hub_name("Org/Tiny@main")
    (tmp_path / "Org").mkdir()  # whose model may only be missing
    assert not is_hub_name("Org/Tiny") and locate_model("Org/Tiny") == Path("Org/Tiny")


def test_a_resume_keeps_the_revision_of_its_run() -> None:
    stored = f"/cache/models--Org--Tiny/snapshots/{OLD}"
    assert pinned("Org/Tiny", stored) == f"Org/Tiny@{OLD}"
    for other in (f"Org/Tiny@{NEW}", "Org/Small", "models/Tiny"):
        assert pinned(other, stored) == other
    assert pinned("Org/Tiny", "models/Tiny") == "Org/Tiny"
