"""docs/first_hour.md: its commands run in order, in an empty folder, and what they leave is what the page says."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path

import pytest

from tests.helpers.toy_runs import shared_runner

PAGE = Path(__file__).parents[1] / "docs/first_hour.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process's children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / 100  # cutime and cstime, in ticks


def test_every_command_is_in_the_stopwatch() -> None:
    text = PAGE.read_text(encoding="utf-8")
    commands = [line for language, block in BLOCK.findall(text) if language == "bash" for line in block.splitlines()]
    timed = re.findall(r"^\| `(vlm-rl .*?)` \| [\d.]+ \|$", text, re.MULTILINE)
    assert commands == timed


@pytest.mark.slow
def test_the_page_can_be_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runner = shared_runner()
    for language, block in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if language == "python":
            begun = time.process_time()
            exec(compile(block, str(PAGE), "exec"), {})
            print(f"| python | {time.process_time() - begun:.1f} |")
        for line in block.splitlines() if language == "bash" else ():
            begun = cpu_seconds(runner.server.pid)
            result = runner(*shlex.split(line)[1:], folder=str(tmp_path))
            assert result.code == 0, f"{line}\n{result.output[-3000:]}"
            print(f"| `{line}` | {cpu_seconds(runner.server.pid) - begun:.1f} |")
            if line.startswith("vlm-rl prepare") and "--dry-run" in line:
                assert not Path("data").exists()
            if "compare" in line:
                assert "+0.0 points" in result.output and "exact sign test" in result.output
    assert "<html" in Path("page.html").read_text(encoding="utf-8")
    assert "vlm-rl" in Path("data/train/README.md").read_text(encoding="utf-8")
    assert {"README.md", "model.safetensors", "tokenizer.json"} <= {file.name for file in Path("my-model").iterdir()}
    assert all(file.is_file() for file in Path("my-model").iterdir())  # DeepSpeed's state is in a folder
