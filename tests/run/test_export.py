"""`vlm-rl export --push`: what the hub receives, and what is said where it cannot be reached."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import huggingface_hub.constants as hub_constants
import pytest

from tests.helpers.example_run import build_run
from tests.helpers.model_hub import model_hub
from vlm_rl.errors import UserError
from vlm_rl.run.checkpoint import commit, saving
from vlm_rl.run.export import export, model_card, push
from vlm_rl.run.manifest import Manifest
from vlm_rl.toy.tiny_model import build_tiny_model


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


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint of the tiny model."""
    run = build_run(tmp_path_factory.mktemp("runs") / "run", steps=1, eval_steps=())
    root = run.path / "checkpoints"
    with saving(root, step=1) as work:
        build_tiny_model(work)
        commit(work, root, step=1, info={})
    return run.path


def test_an_export_goes_where_a_link_to_an_empty_folder_leads(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "disk" / "model").mkdir(parents=True)
    out = tmp_path / "model"
    out.symlink_to(tmp_path / "disk" / "model")
    export(Namespace(checkpoint=checkpoint, out=out, merge=False, push=None, public=False))
    assert out.is_symlink() and {"README.md", "config.json", "model.safetensors"} <= {p.name for p in out.iterdir()}
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["model"]


def test_a_link_to_nothing_is_refused_before_anything_is_written(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    out.symlink_to(tmp_path / "absent")
    with pytest.raises(UserError, match="exists and is not an empty folder: choose a different --out"):
        export(Namespace(checkpoint=checkpoint, out=out, merge=False, push=None, public=False))


SUMMARY = {
    "accuracy": 0.5,
    "interval": [0.25, 0.75],
    "num_problems": 8,
    "k": 4,
    "sampling": {"temperature": 1.0},
}


def card_of(folder: Path, summary: dict[str, Any]) -> str:
    run = build_run(folder, steps=1, eval_steps=(0,))
    run.evals()[0].path.with_suffix(".json").write_text(json.dumps(summary))
    return model_card(run, Manifest(1, {}, {}, "", {}), is_adapter=False)


def test_a_model_card_has_the_scores_of_its_step_and_of_the_first(tmp_path) -> None:
    assert "| toy-test | 0 | 8 | 0.500 | 0.250 to 0.750 | T 1.0, avg@4 |" in card_of(tmp_path / "run", SUMMARY)


@pytest.mark.parametrize(
    "changed", [*SUMMARY.items(), ("interval", None), ("sampling", {}), ("interval", ["a", "b"])]
)
def test_a_summary_that_lacks_a_score_is_named(tmp_path, changed: tuple[str, Any]) -> None:
    """As of an evaluation that somebody wrote, or an older version."""
    name, value = changed
    summary = {key: each for key, each in SUMMARY.items() if key != name}
    if value != SUMMARY[name]:
        summary[name] = value
    with pytest.raises(UserError, match=r"step-000000\.json.*delete it, or evaluate again"):
        card_of(tmp_path / "run", summary)
