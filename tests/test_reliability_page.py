"""docs/reliability.md shows the tests of each promise; what it, docs/gpu.md and SECURITY.md name is there."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import promises
from tests.attack import ATTACKS
from vlm_rl.cli import _parser as command_line
from vlm_rl.config import parse_config
from vlm_rl.config.key_reference import find_keys
from vlm_rl.errors import UserError
from vlm_rl.run.configurations import check_unchanged

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
PAGES = {
    name: (ROOT / name).read_text(encoding="utf-8") for name in ("docs/reliability.md", "docs/gpu.md", "SECURITY.md")
}
# `run/test_lock.py::test_x`, its parts alone, `python -m tests.soak`, and the names in italics behind "attack(s)".
NAMED = re.compile(
    r"`(?:tests/)?(?P<file>(?:\w+/)*\w+\.py)?(?:::(?P<test>\w+))?`"
    r"|`python -m (?P<module>tests[.\w]*)"
    r"|\battacks? (?P<attacks>\*[^*]+\*(?:,? (?:and )?\*[^*]+\*)*)"
)


@cache
def names_in(file: Path) -> frozenset[str]:
    """Return the names of a file's test functions."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return frozenset(n.name for n in nodes if isinstance(n, ast.FunctionDef) and n.name.startswith("test_"))


def named(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each name of a test, a file of tests, a program or an attack, and whether there is one of that name.

    `::test_x` is in the file named last before it.
    """
    last = ""
    for match in NAMED.finditer(" ".join(text.split())):
        file, test = match["file"], match["test"]
        if module := match["module"]:
            path = ROOT / module.replace(".", "/")
            yield module, path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
        elif attacks := match["attacks"]:
            known = {attack.name for attack in ATTACKS}
            yield from ((name, name in known) for name in re.findall(r"\*([^*]+)\*", attacks))
        elif test or (file and Path(file).name.startswith("test_")):
            last = file or last
            path = ROOT / "tests" / last
            is_there = path.is_file() and path.suffix == ".py"
            yield f"{last}::{test}" if test else last, is_there and (not test or test in names_in(path))


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page: str) -> None:
    found = [*named(PAGES[page])]
    assert found and [name for name, is_there in found if not is_there] == []


def test_every_promise_has_tests_and_the_page_shows_them() -> None:
    assert all(tests for claims in promises.PROMISES.values() for tests in claims.values())
    assert promises.page() == PAGE, "python -m tests.promises writes the table"  # it raises for a name of nothing
    headings = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    assert [section for section in promises.PROMISES if section not in headings] == []


def test_what_is_not_there_is_seen() -> None:
    here = "`test_reliability_page.py`"
    wrong = ("`test_nowhere.py`", f"{here} `::test_nothing`", "`tests/run/test_nowhere.py::test_x`", "attack *none*")
    for text in (*wrong, "`::test_of_no_file`", "`python -m tests.nowhere`", "attacks *slow requests*, *none*"):
        assert not all(is_there for _, is_there in named(text)), text
    right = f"{here}, `::test_what_is_not_there_is_seen`; attacks *slow requests*, *10,000 connections*"
    assert [is_there for _, is_there in named(right)] == [True] * 4
    nothing = ("test_nowhere.py", "test_reliability_page.py::test_nothing", "attack: none", "python -m tests.nowhere")
    for name in nothing:
        with pytest.raises(LookupError):
            promises.command_of(name)
    assert promises.command_of("test_reliability_page.py::test_what_is_not_there_is_seen") == "make test"
    assert promises.command_of("whole_runs/test_two_machines.py") == "make test-slow"


def test_what_no_gpu_has_run_is_called_experimental_everywhere() -> None:
    """The keys and commands of the table in docs/gpu.md are those whose own help says the word."""
    table = PAGES["docs/gpu.md"].partition("## Experimental")[2].partition("\n## ")[0]
    names = re.findall(r"`([^`]+)`", table[table.index("|---") :])
    sections = r"(model|algorithm|environment|rollout|train|checkpoint)\."
    keys = {name.partition(":")[0] for name in names if re.match(sections, name)}
    assert keys == {key.path for key in find_keys() if "experimental" in key.text.lower()}
    parser = command_line()
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    said = {name for name, command in commands.choices.items() if "experimental" in command.format_help().lower()}
    listed = {name.split()[1] for name in names if name.startswith("vlm-rl ")}
    assert listed <= said <= listed | {"train", "study", "paper", "compare"}  # those start several ranks


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield the section, the name and the path of each key of a configuration that is no section."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield tree, name, prefix + name


def test_a_resume_may_change_what_the_page_lists_and_nothing_else() -> None:
    sentence = PAGE.partition("A resume may change ")[2].partition("Any other change")[0]
    listed = [name for name in re.findall(r"`([^`]+)`", sentence) if name != "train.deepspeed"]
    vllm_options = [name.rpartition(".")[2] for name in listed if name.startswith("rollout.vllm.")]
    device = {"device": "cpu"}
    zero = {
        "offload_optimizer": device,
        "offload_param": device,
        "stage3_max_live_parameters": 7,
        "overlap_comm": True,
    }
    sections = {
        "reward": {
            "judge": {"url": "http://judge/v1", "model": "m", "prompt": "p"},
            "reward_model": {"url": "http://model", "model": "m"},
        },
        "model": {"path": "m", "lora": {"rank": 4}},
        "rollout": {"vllm": {**dict.fromkeys(vllm_options, 1), "speculative_config": None, "kv_cache_dtype": "fp8"}},
        "train": {"zero_stage": 3, "deepspeed": {"zero_optimization": zero}},
    }
    own: Any = parse_config({"out": "run", "data": {"train": ["set"]}, **sections})
    changed, allowed = own.model_dump(), []
    for section, name, path in leaves(changed):
        section[name], value = ["another value"], section[name]
        try:
            check_unchanged(Path("run"), own, SimpleNamespace(model_dump=lambda: changed))  # type: ignore[arg-type]
            allowed.append(path)
        except UserError:
            pass
        section[name] = value
    known = [path for _, _, path in leaves(changed)]
    assert allowed == [path for path in known if any(fnmatchcase(path, pattern) for pattern in listed)]
    assert all(any(fnmatchcase(path, pattern) for path in known) for pattern in listed) and len(listed) > 10
