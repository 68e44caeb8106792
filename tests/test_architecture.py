"""Rules that the sources keep, read from their syntax trees; a failure names the file, line and name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("vlm_rl", "data_prep", "demo")

# Imports point down this list; modules of one row may import each other. A module that is not listed
# fails the test: say where it belongs.
LAYERS: tuple[frozenset[str], ...] = tuple(
    map(
        frozenset,
        (
            {"errors", "verdicts", "rational", "polynomial", "unicode_text", "statistics", "pairs"},
            {"types", "config"},
            {
                "templates",
                "mathtext",
                "images",
                "tiny",
                "ranks",
                "journal",
                "overlap",
                "checkpoint",
                "model_folder",
                "picture_file",
            },
            {
                "units",
                "margins",
                "number_words",
                "relations",
                "collection",
                "equations",
                "families",
                "outcomes",
                "overlooked",
                "prefilter",
                "symbolic",
                "symbolic_worker",
            },
            {"prompts", "answers", "equality", "choices", "published_prompts"},
            {"advantages", "difficulty", "losses"},
            {
                "algorithms",
                "rewards",
                "packing",
                "attention",
                "vision_tower",
                "pointwise",
                "policy",
                "data",
                "runs",
                "diagnostics",
            },
            {"samplers", "learner", "trackers"},
            {"evaluate", "scoring", "resumable"},
            {"study"},
            {
                "curves",
                "charts",
                "cards",
                "figures",
                "sections",
                "page",
                "hero",
                "report",
                "comparison",
                "comparison_words",
                "comparison_tables",
                "comparison_report",
                "terminal",
                "recorder",
                "warm_start",
            },
            {"session", "train"},
            {
                "quickstart",
                "dry_run",
                "evaluate_command",
                "grade_command",
                "score_command",
                "eval_compare",
                "eval_export",
                "compare",
            },
            {"cli"},
        ),
    )
)

# library -> the one file (or folder) of the package that may import it
HOMES = {
    "deepspeed": "vlm_rl/learner.py",
    "vllm": "vlm_rl/samplers/vllm.py",
    "gradio": "demo/",
    "math_verify": "vlm_rl/symbolic_worker.py",
    "sympy": "vlm_rl/symbolic_worker.py",
    "latex2sympy2_extended": "vlm_rl/symbolic_worker.py",
    "qwen_vl_utils": "vlm_rl/prompts.py",
}

FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "sympify", "parse_expr", "S"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


ALL = [path for package in PACKAGES for path in sources(package)]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of every import, those inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield node.module or "", node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def runtime_tree(path: Path) -> ast.Module:
    """The module without what only a type checker sees (`if TYPE_CHECKING:`)."""

    class Drop(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
            is_typing = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            return node.orelse if is_typing else self.generic_visit(node)

    return Drop().visit(ast.parse(path.read_text(encoding="utf-8"), str(path)))


def layer_of(module: str) -> int | None:
    return next((index for index, names in enumerate(LAYERS) if module in names), None)


def module_of(path: Path) -> str:
    """The name in LAYERS of a file of vlm_rl: samplers/vllm.py is samplers."""
    return path.relative_to(ROOT / "vlm_rl").parts[0].removesuffix(".py")


def upward_imports(path: Path, tree: ast.Module) -> Iterator[str]:
    own = layer_of(module_of(path))
    assert own is not None, f"{name_of(path)}: put {module_of(path)!r} into LAYERS"
    for name, line in imports(tree):
        package, _, rest = name.partition(".")
        if package != "vlm_rl" or not rest:
            continue
        other = layer_of(rest.partition(".")[0])
        if other is not None and other > own:
            yield f"{name_of(path)}:{line} imports {name}, which stands above it"


def package_imports(path: Path, tree: ast.Module) -> Iterator[str]:
    """vlm_rl knows nothing of data_prep and demo; cli.py may, inside a function."""
    inside = {
        node for function in ast.walk(tree) if isinstance(function, ast.FunctionDef) for node in ast.walk(function)
    }
    deep = {line for node in inside if isinstance(node, ast.Import | ast.ImportFrom) for line in [node.lineno]}
    for name, line in imports(tree):
        if name.split(".")[0] in ("data_prep", "demo") and not (path.name == "cli.py" and line in deep):
            yield f"{name_of(path)}:{line} imports {name}"


def homeless_imports(path: Path, tree: ast.Module) -> Iterator[str]:
    for name, line in imports(tree):
        home = HOMES.get(name.split(".")[0])
        if home and not name_of(path).startswith(home):
            yield f"{name_of(path)}:{line} imports {name}, which is {home}'s alone"


def dangerous(tree: ast.Module, where: str) -> Iterator[str]:
    """Ways to run text as code or to open a pickle."""
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


@pytest.mark.parametrize("path", sources("vlm_rl"), ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    if path.name != "__init__.py":
        assert list(upward_imports(path, runtime_tree(path))) == []


@pytest.mark.parametrize("path", sources("vlm_rl"), ids=name_of)
def test_the_package_knows_nothing_of_data_prep_and_demo(path: Path) -> None:
    assert list(package_imports(path, runtime_tree(path))) == []


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_each_heavy_library_is_imported_in_one_place(path: Path) -> None:
    assert list(homeless_imports(path, runtime_tree(path))) == []


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_no_text_is_run_as_code_and_no_pickle_opened(path: Path) -> None:
    assert list(dangerous(runtime_tree(path), name_of(path))) == []


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_init_files_are_empty(path: Path) -> None:
    if path.name == "__init__.py":
        assert path.read_text() == "", f"{name_of(path)} must stay empty"


def test_layers_name_each_module_once_and_none_that_is_gone() -> None:
    named = [module for names in LAYERS for module in names]
    assert len(named) == len(set(named))
    present = {module_of(path) for path in sources("vlm_rl")}
    assert set(named) - present == set(), "gone from vlm_rl: take them out of LAYERS"


# -- the rules can fail ------------------------------------------------------------------------------


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


def test_an_upward_import_is_seen() -> None:
    tree = ast.parse("def f():\n    from vlm_rl.train import loop")
    found = list(upward_imports(ROOT / "vlm_rl" / "losses.py", tree))
    assert found and "vlm_rl/losses.py:2 imports vlm_rl.train" in found[0]
    assert list(upward_imports(ROOT / "vlm_rl" / "cli.py", tree)) == []


def test_a_heavy_import_outside_its_home_is_seen() -> None:
    tree = ast.parse("def f():\n    import deepspeed.zero")
    assert list(homeless_imports(ROOT / "vlm_rl" / "train.py", tree))
    assert list(homeless_imports(ROOT / "vlm_rl" / "learner.py", tree)) == []


def test_only_the_command_line_reaches_data_prep_and_only_inside_a_function() -> None:
    inside, outside = (ast.parse(text) for text in ("def f():\n    import data_prep.toy", "import demo.app"))
    assert list(package_imports(ROOT / "vlm_rl" / "train.py", inside))
    assert list(package_imports(ROOT / "vlm_rl" / "cli.py", outside))
    assert list(package_imports(ROOT / "vlm_rl" / "cli.py", inside)) == []
