"""A wheel that is built from the source distribution and installed elsewhere works, and holds what it should."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[1]
UV = Path(sys.executable).with_name("uv")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel made from the source distribution; built in a copy, since a build leaves files beside the sources."""
    folder = tmp_path_factory.mktemp("build")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("vlm_rl", "data_prep", "demo", "tests"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    run([UV, "build", "--no-build-isolation", "--offline", "--python", sys.executable, "--out-dir", "dist"], folder)
    assert len(list((folder / "dist").glob("*.tar.gz"))) == 1
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in a folder of its own; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("site")
    run([UV, "pip", "install", "-q", "--no-deps", "--target", folder, wheel], folder)
    return folder


def run(command: Sequence[str | Path], folder: Path, **environment: str) -> str:
    words, variables = list(map(str, command)), {**os.environ, **environment}
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_one_package_with_its_data_and_no_tests(wheel: Path) -> None:
    names = ZipFile(wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"vlm_rl"}
    folders = {name: ROOT / "vlm_rl" / name for name in (".", "data_prep", "demo")}
    files = [path for folder in folders.values() for path in folder.rglob("*") if path.is_file()]
    wanted = {
        f"vlm_rl/{path.relative_to(ROOT / 'vlm_rl').as_posix()}" for path in files if "__pycache__" not in path.parts
    }
    assert {"vlm_rl/py.typed", "vlm_rl/demo/server.py", "vlm_rl/demo/assets/recorded/grpo/config.yaml"} <= wanted
    assert wanted <= set(names)


def test_it_runs_from_another_folder(installed: Path, tmp_path: Path) -> None:
    def vlm_rl(*arguments: str) -> str:
        return run([sys.executable, "-m", "vlm_rl", *arguments], tmp_path, PYTHONPATH=str(installed))

    where = run([sys.executable, "-c", "import vlm_rl; print(vlm_rl.__file__)"], tmp_path, PYTHONPATH=str(installed))
    assert Path(where.strip()).is_relative_to(installed)
    commands = re.findall(r"^    (\w+)\b", vlm_rl("--help"), re.MULTILINE)
    assert {"prepare", "train", "eval", "demo"} <= set(commands)
    for command in commands:
        assert f"usage: vlm-rl {command}" in vlm_rl(command, "--help")
    assert "verdict: correct" in vlm_rl("grade", "--gold", "1/2", "--response", r"\boxed{0.5}")
    recorded = installed / "vlm_rl" / "demo" / "assets" / "recorded" / "grpo"
    vlm_rl("report", str(recorded), "--out", "report.html", "--figure", "figure.png")
    assert "grpo" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    vlm_rl("train", str(recorded / "config.yaml"), "--dry-run", "model.path=Qwen2.5-VL-7B-Instruct")
