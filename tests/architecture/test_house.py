"""The rules of the house that a linter does not know."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "gradaccum").rglob("*.py"))
MOST_LINES, ASK_ABOVE = 500, 300


def test_import_contracts():
    """import-linter's contracts, as in pyproject.toml."""
    code = (
        "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_files_are_small(record_property):
    sizes = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in SOURCES}
    for name, lines in sizes.items():
        record_property(name, lines)
        if lines > ASK_ABOVE:
            print(f"{name}: {lines} lines; which idea is hiding in it?")
    assert not {name: lines for name, lines in sizes.items() if lines > MOST_LINES}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_asserts_globals_or_mutable_module_state(path):
    tree = ast.parse(path.read_text())
    assert not [n for n in ast.walk(tree) if isinstance(n, (ast.Assert, ast.Global))]
    mutable = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, mutable):
            names = [t.id for t in getattr(node, "targets", [getattr(node, "target", None)])]
            assert names == ["__all__"], f"{path.name}: {names} can be changed by anyone"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_floors_import_through_their_own_door(path):
    """Floors 0 to 5 never import `from gradaccum import Name`."""
    faces = {"cli", "recipes", "__init__.py"}
    if faces & set(path.relative_to(ROOT / "src" / "gradaccum").parts):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "gradaccum":
            pytest.fail(f"{path.name} imports {[a.name for a in node.names]} from the front door")


def test_one_file_scales_gradients():
    """Nothing but update.py multiplies or divides a gradient."""
    scaling = ("_foreach_mul_", "_foreach_div_", ".grad.mul_", ".grad.div_", "grad_scale")
    found = {
        path.name
        for path in SOURCES
        for word in scaling
        if word in path.read_text(encoding="utf-8")
    }
    assert found == {"update.py"}
