"""`vlm-rl export --push`: what the hub receives, and what is said where it cannot be reached."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import huggingface_hub.constants as hub_constants
import pytest

from tests.helpers.model_hub import model_hub
from vlm_rl.errors import UserError
from vlm_rl.run.export import export, push


def exported(folder: Path) -> Path:
    """Write a folder as `export` leaves it."""
    folder.mkdir()
    (folder / "README.md").write_text("---\ntags: [vlm-rl]\n---\n\n# toy, step 4\n")
    (folder / "model.safetensors").write_bytes(bytes(range(256)))
    return folder


@pytest.mark.parametrize("private", [True, False])
def test_the_hub_gets_every_file_and_the_users_token(tmp_path, monkeypatch, private) -> None:
    folder = exported(tmp_path / "toy")
    with model_hub() as hub:
        monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub_constants, "ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", "hf_of_the_user")
        assert push(folder, "me/toy", private=private) == f"{hub.url}/me/toy"
    assert hub.files == {file.name: file.read_bytes() for file in folder.iterdir()}
    assert [(repo["name"], repo["organization"]) for repo in hub.created] == [("toy", "me")]
    assert [repo.get("private", repo.get("visibility") == "private") for repo in hub.created] == [private]
    assert hub.tokens == {"Bearer hf_of_the_user"}


def test_without_a_network_the_command_for_later_is_given(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    folder = exported(tmp_path / "my toy")
    with pytest.raises(UserError, match="is written, but was not uploaded") as refused:
        push(folder, "me/toy", private=True)
    assert str(refused.value).endswith(f"hf upload me/toy '{folder}' . --private")


def test_a_name_that_the_hub_refuses_is_refused_before_anything_is_written(tmp_path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError, match=r"--push a/b/c: .*give USER/NAME"):
        export(Namespace(checkpoint=tmp_path, out=out, merge=False, push="a/b/c", public=False))
    assert not out.exists()
