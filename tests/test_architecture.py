"""The rules of the house, read from the source: who may import whom, what no file may contain, how long things are."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "mnemic"
FILES = sorted(SOURCE.rglob("*.py"))

# Data flows from left to right: a package may import what stands in its own stage or to the left of it.
STAGES = (
    ("config", "registry", "errors", "files", "pages"),
    ("data",),
    ("models", "memories", "hf", "augment", "saving"),
    ("train",),
    ("stores",),
    ("evaluate",),
    ("analysis",),
    ("serve", "cli"),
)
STAGE = {name: number for number, names in enumerate(STAGES) for name in names}
ROOT_FILES = {"__init__", "__main__"}  # the public names, and `python -m mnemic`: they lead to everything

FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "os.replace", "os.rename", "os.renames", "shutil.move"}
ALLOWED_CALLS = {"files.py": {"os.replace"}}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}


def name(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """The full name of each module or attribute that a file imports, anywhere in it, with its line."""
    package = ["mnemic", *path.relative_to(SOURCE).parent.parts]
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def part(path: Path) -> str:
    """The package of mnemic a file belongs to; for a file at the root, its own name."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def dotted(node: ast.expr) -> str:
    """`os.path.join` from its tree; "" for anything that is not a plain name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (start := dotted(node.value)):
        return f"{start}.{node.attr}"
    return ""


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 30


def test_every_package_has_its_stage() -> None:
    assert {part(path) for path in FILES} - ROOT_FILES <= set(STAGE)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_flow_one_way(path: Path) -> None:
    if part(path) in ROOT_FILES:
        return
    for imported, line in imports(path):
        if not imported.startswith("mnemic."):
            continue
        target = imported.split(".")[1]
        if target not in STAGE:  # a public name such as mnemic.train_tokenizer or mnemic.__version__
            assert target == "__version__", f"{name(path)}:{line} imports the public name {imported}; import its module"
            continue
        assert STAGE[target] <= STAGE[part(path)], f"{name(path)}:{line} imports {imported}, which is to its right"


@pytest.mark.parametrize("path", sorted(SOURCE.glob("memories/*/layer.py")), ids=name)
def test_the_mathematics_of_a_memory_imports_only_torch(path: Path) -> None:
    allowed = {"__future__", "torch", "math", "typing", "dataclasses", "collections"}
    assert {imported.split(".")[0] for imported, _ in imports(path)} <= allowed


@pytest.mark.parametrize(
    "folder", sorted(p for p in SOURCE.glob("memories/*") if (p / "__init__.py").exists()), ids=name
)
def test_each_memory_has_the_same_files(folder: Path) -> None:
    assert {"__init__.py", "config.py", "layer.py", "attach.py", "README.md"} <= {
        item.name for item in folder.iterdir()
    }


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_and_functions_are_short(path: Path) -> None:
    assert path.name not in ("utils.py", "helpers.py", "misc.py", "common.py"), "name a file after what it does"
    assert len(path.read_text(encoding="utf-8").splitlines()) < 400
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 70, f"{name(path)}:{node.lineno} {node.name} is too long"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_nothing_reads_code_from_data_and_only_files_py_renames(path: Path) -> None:
    for imported, line in imports(path):
        assert imported.split(".")[0] not in FORBIDDEN_MODULES, f"{name(path)}:{line} imports {imported}"
        assert imported not in FORBIDDEN_CALLS, f"{name(path)}:{line} imports {imported}"
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call):
            called = dotted(node.func)
            bad = called in FORBIDDEN_CALLS - ALLOWED_CALLS.get(name(path), set())
            assert not bad, f"{name(path)}:{node.lineno} calls {called}"
            # Path.rename(target) and Path.replace(target) take one argument; str.replace takes two.
            method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            moves = method == "rename" or (method == "replace" and len(node.args) == 1 and not node.keywords)
            assert not moves or called in ALLOWED_CALLS.get(name(path), set()), f"{name(path)}:{node.lineno} renames"
            unsafe = [k.arg for k in node.keywords if k.arg in ("trust_remote_code", "allow_pickle")]
            assert not unsafe, f"{name(path)}:{node.lineno} passes {unsafe[0]}"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_user_facing_code_never_asserts_and_every_file_says_what_it_is(path: Path) -> None:
    tree = parsed(path)
    asserts = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert not asserts, f"{name(path)}:{asserts[0]} asserts; raise one of mnemic.errors"
    assert ast.get_docstring(tree), f"{name(path)} has no docstring"


def test_every_dependency_has_a_lower_bound_and_a_pin() -> None:
    """constraints.txt pins what is tested; pyproject.toml only says from where on."""
    root = SOURCE.parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    lines = [line for line in (root / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.lower().replace("_", "-").split("==") for line in lines)
    assert pins["torch"] == "2.13.0"
    extras = project["optional-dependencies"]
    tested = project["dependencies"] + [need for extra in ("dev", "serve", "tasks") for need in extras[extra]]
    for need in tested + extras["milvus"] + extras["track"]:
        assert re.fullmatch(r"[\w-]+>=[\d.]+", need), f"{need}: expected a lower bound and nothing else"
    assert {need.split(">=")[0].lower() for need in tested} <= set(pins)
