"""Rules for the sources, checked on their syntax trees; a failure names the file, the line and the name."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Modules above the rooms: they import rooms, and no room imports them. Every other module is below the rooms.
ABOVE = {"train", "api", "cli", "__main__"}
ABOVE_BUT_FOR = {"toy": {"train"}, "commands": {"train"}, "notebook": {"train"}}
# The rooms below all others, which every one of them may use, and every single file.
GROUND = {"untrusted", "config"}
# Room -> the only modules below the rooms that it may import; a room that is not named may import them all.
BELOW_ONLY = {"grading": {"errors", "templates", "types"}}
# library -> the one file (or folder) of the package that may import it
HOMES = {
    "deepspeed": "vlm_rl/learner/deepspeed.py",
    "peft": "vlm_rl/learner/lora.py",
    "bitsandbytes": "vlm_rl/learner/quantization.py",
    "triton": "vlm_rl/learner/head_kernels.py",
    "liger_kernel": "vlm_rl/learner/attention/liger_layers.py",
    "vllm": "vlm_rl/samplers/vllm/",
    "gradio": "vlm_rl/demo/",
    "math_verify": "vlm_rl/grading/symbolic_server.py",
    "sympy": "vlm_rl/grading/symbolic_server.py",
    "latex2sympy2_extended": "vlm_rl/grading/symbolic_server.py",
    "qwen_vl_utils": "vlm_rl/data/vision/qwen.py",
}

# Who may import the toys: a production module that did would train on them.
USES_TOYS = {
    "doctor/command.py",
    *(f"commands/{name}.py" for name in ("papers", "real_quickstart", "training")),
    *(f"data_prep/{name}_data.py" for name in ("quickstart", "smoke", "study", "tools")),
    *(f"data_prep/{name}_sets.py" for name in ("picture", "word")),
}
GPU_QUESTIONS = {
    *("is_available", "device_count", "mem_get_info", "get_device_properties", "get_device_name"),
    *("get_device_capability", "current_accelerator"),
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "sympify", "parse_expr", "S"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def sources() -> list[Path]:
    """Return every module of vlm_rl; two of its rooms, data_prep and demo, are links to the folders at the top."""
    folders = [ROOT / "vlm_rl", *(path for path in (ROOT / "vlm_rl").iterdir() if path.is_symlink())]
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


ALL = sources()


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield (dotted name, line) of every import, including those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield node.module or "", node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


@cache
def parsed(path: Path) -> tuple[ast.Module, set[str]]:
    """Parse a module; returns it without what only a type checker sees (`if TYPE_CHECKING:`), and all its imports."""

    class Drop(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
            is_typing = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            return node.orelse if is_typing else self.generic_visit(node)

    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    names = {name for name, _ in imports(tree)}
    return Drop().visit(tree), names


def runtime_tree(path: Path) -> ast.Module:
    """Return what runs of a module."""
    return parsed(path)[0]


def room_of(module: str) -> str | None:
    """Return the room that a dotted name is in: `vlm_rl.samplers.base` is in samplers, `vlm_rl.train` in none."""
    parts = module.split(".")
    return parts[1] if parts[0] == "vlm_rl" and len(parts) > 1 and parts[1] in folders() else None


def declared(room: str, name: str) -> Any:
    """Read a name of a room's `__init__.py`: `__all__`, its door, or `_USES`, the rooms that it may enter."""
    tree = ast.parse((ROOT / "vlm_rl" / room / "__init__.py").read_text(encoding="utf-8"))
    values = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}  # type: ignore
    return ast.literal_eval(values[name]) if name in values else None


@cache
def door_of(room: str) -> set[str]:
    """Return the names that others may import from a room, modules or others."""
    return set(declared(room, "__all__") or ())


@cache
def folders() -> set[str]:
    """Return every folder of the package that has an `__init__.py`, by its path below vlm_rl."""
    return {path.parent.relative_to(ROOT / "vlm_rl").as_posix() for path in ALL if path.name == "__init__.py"} - {"."}


@cache
def inner_rooms() -> set[str]:
    """Return the folders inside a room; each has a door of its own."""
    return {folder for folder in folders() if "/" in folder}


@cache
def rooms() -> dict[str, set[str]]:
    """Return each room and the rooms whose doors it may enter, as its `__init__.py` declares."""
    named = {room: declared(room, "_USES") for room in folders() - inner_rooms()}
    return {room: set(named) if uses == "every room" else set(uses or ()) for room, uses in named.items()}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def wrong_ways(path: Path, tree: ast.Module) -> Iterator[str]:
    """Yield the imports that pass a wall: a room that is not below, or a module behind a door."""
    own = room_of(module_of(path))
    for name, line in imports(tree):
        parts = name.split(".")
        room = room_of(name)
        where = f"{name_of(path)}:{line} imports {name}"
        if own and parts[0] == "vlm_rl" and (room is None or room in GROUND) and room != own and len(parts) > 1:
            if parts[1] in ABOVE - ABOVE_BUT_FOR.get(own, set()):
                yield f"{where}, which is above the rooms"
            elif parts[1] not in BELOW_ONLY.get(own, {parts[1]}):
                yield f"{where}: below the rooms {own} may import {sorted(BELOW_ONLY[own])} only"
        if room and room != own:
            if room not in GROUND and own and room not in rooms()[own]:
                yield f"{where}: {own} may import {sorted(rooms()[own]) or 'no other room'}"
            if room not in GROUND and own is None and path.stem not in ABOVE:
                yield f"{where}: {path.stem} is below the rooms"
            if len(parts) > 2 and parts[2] not in door_of(room):
                yield f"{where}, which is not in the door of {room} (__all__ of its __init__.py)"
        inner = "/".join(parts[1:3])
        is_inside = ROOT / "vlm_rl" / inner == path.parent
        if inner in inner_rooms() and not is_inside and len(parts) > 3 and parts[3] not in door_of(inner):
            yield f"{where}, which is not in the door of {inner} (__all__ of its __init__.py)"


def circles(imported: dict[str, set[str]]) -> list[str]:
    """Return the modules that import each other in a circle; `imported` has the names that each of them imports."""
    left = {
        module: {
            target
            for name in names
            for target in (name, name.rpartition(".")[0])
            if target in imported and target != module
        }
        for module, names in imported.items()
    }
    while left:
        wanted = set().union(*left.values())
        free = {module for module, targets in left.items() if not targets & set(left) or module not in wanted}
        if not free:
            break
        left = {module: targets for module, targets in left.items() if module not in free}
    return sorted(left)


def types_in(tree: ast.Module) -> Iterator[str]:
    """Yield the names of a module's classes and type aliases; an alias is what is assigned to a name in CapWords."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            yield from (name for name in names if re.fullmatch(r"_?[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*", name))


def homeless_imports(path: Path, tree: ast.Module) -> Iterator[str]:
    for name, line in imports(tree):
        home = HOMES.get(name.split(".")[0])
        if home and not name_of(path).startswith(home):
            yield f"{name_of(path)}:{line} imports {name}, which is {home}'s alone"


def gpu_questions(tree: ast.Module, where: str) -> Iterator[str]:
    """Yield the questions about GPUs that vlm_rl/devices.py should be asked."""
    for node in ast.walk(tree) if not where.endswith("vlm_rl/devices.py") else ():
        if isinstance(node, ast.Attribute) and node.attr in GPU_QUESTIONS:
            asked = ast.unparse(node.value)
            if asked in ("torch.cuda", "torch.accelerator"):
                yield f"{where}:{node.lineno} asks {asked}.{node.attr}: ask vlm_rl.devices"


def dangerous(tree: ast.Module, where: str) -> Iterator[str]:
    """Yield the calls and imports that run text as code or open a pickle."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _called(node)
            if name in FORBIDDEN_CALLS and not _is_harmless_method(node):
                yield f"{where}:{node.lineno} calls {name}"
            yield from (f"{where}:{node.lineno} {fault}" for fault in _unsafe_keywords(node, name))
        if isinstance(node, ast.ImportFrom | ast.Import):
            for alias in node.names:
                if alias.name in FORBIDDEN_CALLS - {"compile", "S"}:
                    yield f"{where}:{node.lineno} imports {alias.name}"
    for name, line in imports(tree):
        if name.split(".")[0] in FORBIDDEN_MODULES:
            yield f"{where}:{line} imports {name}"


def _called(node: ast.Call) -> str:
    return getattr(node.func, "id", "") or getattr(node.func, "attr", "")


def _is_harmless_method(node: ast.Call) -> bool:
    """model.eval() and re.compile(...), but not frame.eval("...")."""
    if not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr == "compile" or (node.func.attr == "eval" and not node.args and not node.keywords)


def _unsafe_keywords(node: ast.Call, name: str) -> Iterator[str]:
    values = {keyword.arg: getattr(keyword.value, "value", ...) for keyword in node.keywords}
    if values.get("trust_remote_code", False) is not False:
        yield "passes trust_remote_code"
    is_torch_load = (
        isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "torch" and name == "load"
    )
    if is_torch_load and values.get("weights_only") is not True:
        yield "calls torch.load without weights_only=True"
    if values.get("allow_pickle", False) is not False or values.get("shell", False) is not False:
        yield "passes allow_pickle or shell"


# -- the rules -------------------------------------------------------------------------------------


def test_rooms_are_entered_by_their_doors_and_from_above() -> None:
    assert [fault for path in ALL for fault in wrong_ways(path, runtime_tree(path))] == []


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports inside functions count, and for a type checker: types that need each other belong in one module."""
    assert circles({module_of(path): parsed(path)[1] for path in ALL}) == []


def test_toys_are_for_quickstarts_the_doctor_and_makers_of_toy_data() -> None:
    users = {
        str(path.relative_to(ROOT / "vlm_rl"))
        for path in ALL
        if any(name.startswith("vlm_rl.toy") for name, _ in imports(runtime_tree(path)))
    }
    assert {user for user in users if not user.startswith("toy/")} == USES_TOYS


def test_every_room_has_a_door_and_says_what_it_uses() -> None:
    for room in folders():
        folder = ROOT / "vlm_rl" / room
        present = {path.stem for path in folder.iterdir()}
        present |= {name.rpartition(".")[2] for name, _ in imports(runtime_tree(folder / "__init__.py"))}
        assert door_of(room) and door_of(room) <= present, room
        assert ("/" in room) == (declared(room, "_USES") is None), room
    for room, uses in rooms().items():
        assert uses <= rooms().keys(), (room, uses - rooms().keys())


def unnamed(folder: Path) -> set[str]:
    """Return the modules and inner rooms of a folder that its door's docstring does not name.

    Those that the folder's registry names, such as the benchmarks, need not be there too.
    """
    registry = folder / "registry.py"
    told = (ast.get_docstring(runtime_tree(folder / "__init__.py")) or "") + (
        registry.read_text(encoding="utf-8") if registry.is_file() else ""
    )
    modules = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("__")}
    modules |= {path.parent.name for path in folder.glob("*/__init__.py")}
    return modules - set(re.findall(r"\w+", told))


def test_a_door_names_every_module_of_its_room() -> None:
    left = {room: sorted(unnamed(ROOT / "vlm_rl" / room)) for room in folders()}
    assert not {room: names for room, names in left.items() if names}


def test_rooms_lie_one_above_another() -> None:
    left = {room: uses - {room} for room, uses in rooms().items()}
    while lowest := {room for room, uses in left.items() if not uses & left.keys()}:
        left = {room: uses for room, uses in left.items() if room not in lowest}
    assert not left, f"these rooms use each other in a circle: {sorted(left)}"


def test_vlm_rl_itself_holds_the_method_and_little_else() -> None:
    assert len([path for path in (ROOT / "vlm_rl").glob("*.py") if not path.stem.startswith("__")]) <= 17


def test_no_two_types_have_one_name() -> None:
    names = Counter(name for path in ALL for name in types_in(runtime_tree(path)))
    assert [name for name, count in names.items() if count > 1] == []


def test_each_heavy_library_is_imported_in_one_place() -> None:
    assert [fault for path in ALL for fault in homeless_imports(path, runtime_tree(path))] == []


def test_one_file_asks_for_gpus() -> None:
    """A test can then answer for all of them (tests/helpers/pretended_cuda.py)."""
    assert [fault for path in ALL for fault in gpu_questions(runtime_tree(path), name_of(path))] == []


def test_no_text_is_run_as_code_and_no_pickle_opened() -> None:
    assert [fault for path in ALL for fault in dangerous(runtime_tree(path), name_of(path))] == []


# -- the rules can fail ------------------------------------------------------------------------------


def test_a_question_about_gpus_is_seen() -> None:
    for name in ("torch.cuda.is_available", "torch.accelerator.is_available"):
        tree = ast.parse(f"import torch\nx = {name}()\ntorch.cuda.empty_cache()")
        assert list(gpu_questions(tree, "x.py")) == [f"x.py:2 asks {name}: ask vlm_rl.devices"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("eval('1')", "calls eval"),
        ("frame.eval('a + b')", "calls eval"),
        ("import builtins\nbuiltins.exec('x')", "calls exec"),
        ("from sympy import parse_expr as p", "imports parse_expr"),
        ("import sympy\nsympy.sympify(x)", "calls sympify"),
        ("def f():\n    import pickle", "imports pickle"),
        ("from pickle import loads", "imports pickle"),
        ("AutoModel.from_pretrained(p, trust_remote_code=True)", "trust_remote_code"),
        ("AutoModel.from_pretrained(p, trust_remote_code=flag)", "trust_remote_code"),
        ("import torch\ntorch.load(p)", "torch.load"),
        ("numpy.load(p, allow_pickle=True)", "allow_pickle"),
        ("subprocess.run(c, shell=True)", "shell"),
    ],
)
def test_dangerous_code_is_seen(text: str, fault: str) -> None:
    assert any(fault in found for found in dangerous(ast.parse(text), "x.py"))


def test_harmless_code_is_not() -> None:
    text = "import re\nmodel.eval()\nre.compile('x')\ntorch.load(p, weights_only=True)\nf(trust_remote_code=False)"
    assert list(dangerous(ast.parse(text), "x.py")) == []


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("grading/grader.py", "from vlm_rl.data.prompts import PromptBuilder", "grading may import ['sandbox']"),
        ("learner/learner.py", "def f():\n    from vlm_rl.train import train", "is above the rooms"),
        ("train.py", "from vlm_rl.grading.closed_form import Closed", "not in the door of grading"),
        ("hadw.py", "from vlm_rl.config.rewards import RewardConfig", "not in the door of config"),
        ("grading/grader.py", "from vlm_rl.config import Config", "below the rooms grading may import"),
        ("study/run.py", "from vlm_rl.report import sections_of_ours", "not in the door of report"),
        ("grading/grader.py", "from vlm_rl import errors, stats", "below the rooms grading may import"),
        ("evaluation/evaluate.py", "def f():\n    from vlm_rl.train import train", "is above the rooms"),
        ("losses.py", "from vlm_rl.grading.grader import Grader", "losses is below the rooms"),
        ("demo/app.py", "from vlm_rl.demo.live.html import columns", "not in the door of demo/live"),
        ("api.py", "from vlm_rl.evaluation.benchmarks import wemath", "not in the door of evaluation/benchmarks"),
        ("evaluation/evaluate.py", "from vlm_rl.evaluation.benchmarks.wemath import BENCHMARK", "not in the door of"),
    ],
)
def test_an_import_through_a_wall_is_seen(file: str, text: str, fault: str) -> None:
    assert any(fault in found for found in wrong_ways(ROOT / "vlm_rl" / file, ast.parse(text)))


def test_an_import_through_a_door_is_not() -> None:
    text = """
from vlm_rl.config import Config
from vlm_rl.errors import UserError
from vlm_rl.evaluation.benchmarks.registry import BENCHMARKS
from vlm_rl.grading.grader import Grader
"""
    assert list(wrong_ways(ROOT / "vlm_rl" / "evaluation" / "evaluate.py", ast.parse(text))) == []


def test_a_circle_is_seen() -> None:
    trees = {"a": "from b import x", "b": "def f():\n    from c import y", "c": "import a", "d": "import a", "e": ""}
    imported = {module: {name for name, _ in imports(ast.parse(text))} for module, text in trees.items()}
    assert circles(imported) == ["a", "b", "c"]


def test_a_type_is_seen_in_each_of_its_forms() -> None:
    text = """
class Row: ...
Span = tuple[int, int]
_Layout: TypeAlias = "dict[str, int]"
Item = TypeVar("Item")
T = TypeVar("T")
LIMIT = 3
_EMPTY: Span = (0, 0)
"""
    assert [*types_in(ast.parse(text))] == ["Row", "Span", "_Layout", "Item"]


def test_a_heavy_import_outside_its_home_is_seen() -> None:
    tree = ast.parse("def f():\n    import deepspeed.zero")
    assert list(homeless_imports(ROOT / "vlm_rl" / "train.py", tree))
    assert list(homeless_imports(ROOT / "vlm_rl" / "learner" / "deepspeed.py", tree)) == []


def test_no_message_names_a_package_that_is_not_published() -> None:
    """This project is not on PyPI, so an extra of it (`vlm-rl[vllm]`) is nothing that pip finds."""
    named = re.compile(r"pip install (?:-\S+ \S+ )*'?(vlm[-_]rl\b\S*)")
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    texts = {path: path.read_text(encoding="utf-8") for path in [*ALL, *pages]}
    assert not {name_of(path): match[1] for path, text in texts.items() if (match := named.search(text))}
