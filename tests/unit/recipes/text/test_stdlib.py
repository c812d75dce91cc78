import ast
import collections
import email.message
import inspect
import os
import shlex
import sys
import sysconfig
import textwrap
import warnings

import pytest

from gradaccum.errors import DataError
from gradaccum.recipes.text import stdlib


@pytest.fixture(scope="module")
def functions():
    return stdlib.functions()


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Return how to put a module into a standard library of one's own."""
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})

    def add(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else textwrap.dedent(text).encode())

    return add


def test_the_real_library_has_many_and_uneven_functions(functions):
    lengths = sorted(map(len, functions))
    assert len(functions) > 8_000
    assert lengths[len(lengths) // 10] * 5 < lengths[-len(lengths) // 10]


def test_no_function_comes_twice(functions):
    assert len(set(functions)) == len(functions)


def test_every_source_is_one_function_by_itself(functions):
    for source in functions[::7]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old modules
            (node,) = ast.parse(source).body
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def test_the_order_does_not_hang_on_the_disk(monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": os.path.dirname(email.__file__)})
    expected = stdlib.functions()
    walk = os.walk

    def backwards(root):
        for folder, subfolders, names in reversed(list(walk(root))):
            yield folder, subfolders, names[::-1]

    monkeypatch.setattr(os, "walk", backwards)
    assert stdlib.functions() == expected


def test_known_functions_are_there_whole(functions):
    # Indented methods, decorators, and the last line; read with inspect, which is other code.
    assert inspect.getsource(shlex.split).rstrip("\n") in functions
    method = textwrap.dedent(inspect.getsource(collections.Counter.most_common)).rstrip("\n")
    assert method in functions
    assert any(source.startswith("@") for source in functions)


def test_whole_modules(monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": os.path.dirname(email.__file__)})
    modules = stdlib.modules()
    assert inspect.getsource(email.message) in modules
    assert len(modules) == len(set(modules)) > 15


def test_real_docstrings(monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": os.path.dirname(email.__file__)})
    docstrings = stdlib.docstrings()
    assert len(docstrings) > 150
    assert len(set(docstrings)) == len(docstrings)
    assert min(len(docstring.split()) for docstring in docstrings) == 5
    assert inspect.getdoc(email) in docstrings
    assert inspect.getdoc(email.message.Message.get_payload) in docstrings


def test_outermost_functions_and_methods_only(library):
    library(
        "m.py",
        """
        def outer():
            def inner():
                class Deep:
                    def method(self): ...
            return inner

        class A:
            class B:
                async def method(self):
                    return 1
        """,
    )
    outer, method = stdlib.functions()
    assert "def inner" in outer
    assert method == "async def method(self):\n    return 1"


def test_functions_in_blocks_count_as_outermost_in_line_order(library):
    library(
        "m.py",
        """
        try:
            def a(): ...
        except OSError:
            def b(): ...
        else:
            def c(): ...
        finally:
            def d(): ...
        if 1:
            def e(): ...
        elif 2:
            def f(): ...
        match 1:
            case 1:
                def g(): ...
        with x:
            for _ in x:
                def h(): ...
        """,
    )
    assert stdlib.functions() == [f"def {name}(): ..." for name in "abcdefgh"]


def test_decorators_and_text_at_column_zero_survive_the_dedent(library):
    text = (
        "class A:\n    @one\n    @two(\n        3)\n    def f(self):\n        return '''\nx\n'''\n"
    )
    library("m.py", text.encode())
    expected = "@one\n@two(\n    3)\ndef f(self):\n    return '''\nx\n'''"
    assert stdlib.functions() == [expected]


def test_lines_are_counted_as_the_parser_does(library):
    # str.splitlines() would count a form feed, which stands between parts of old modules.
    library("m.py", b"x = 1\n\x0c\ndef f():\r\n    return 1\r\n")
    assert stdlib.functions() == ["def f():\n    return 1"]


def test_order_is_path_then_line_and_duplicates_go(library):
    library("b.py", "def f(): return 1\ndef f(): return 2\n")
    library("a/z.py", "def f(): return 3\ndef f(): return 1\n")
    assert stdlib.functions() == [f"def f(): return {n}" for n in (3, 1, 2)]


@pytest.mark.parametrize(
    "folder", ["site-packages", "dist-packages", "test", "json/tests", "idlelib/idle_test"]
)
def test_installed_packages_and_tests_are_left_out(library, folder):
    library("m.py", 'def f(): "What is kept in the library."\n')
    library(f"{folder}/m.py", 'def g(): "What is kept out of it."\n')
    assert stdlib.functions() == ['def f(): "What is kept in the library."']
    assert stdlib.docstrings() == ["What is kept in the library."]


@pytest.mark.parametrize(
    "broken", [b"def f(:\n", b"# coding: ascii\n# \xff\n", b"# coding: no-such\n", b"x = 1\0\n"]
)
def test_a_module_that_cannot_be_read_is_skipped(library, broken):
    library("broken.py", broken)
    library("m.py", "def f(): ...\n")
    assert stdlib.functions() == ["def f(): ..."]


def test_declared_encoding_is_heeded(library):
    library("m.py", "# coding: latin-1\ndef f(): 'é'\n".encode("latin-1"))
    assert stdlib.functions() == ["def f(): 'é'"]


def test_an_invalid_escape_hides_no_module(library):
    library("m.py", rb"def f(): '\d'" + b"\n")
    assert stdlib.functions() == [r"def f(): '\d'"]  # warnings are errors while this runs


def test_docstrings_are_cleaned_and_chosen(library):
    library(
        "m.py",
        '''
        """The module says this here."""
        class A:
            """
            The class says this here.

                Indented.
            """
            def method(self):
                "The method says this here."
                def nested():
                    "The nested one is not read."
        def short(): "Four words, no more."
        def again(): "The method says this here."
        ''',
    )
    assert stdlib.docstrings() == [
        "The module says this here.",
        "The class says this here.\n\n    Indented.",
        "The method says this here.",
    ]


@pytest.mark.parametrize("read", [stdlib.functions, stdlib.docstrings])
def test_a_python_without_its_source_is_an_error(library, tmp_path, read):
    with pytest.raises(DataError) as caught:
        read()
    assert str(caught.value) == (
        f"{read.__name__}(): expected the source of Python's standard library, "
        f"got no readable .py file in {tmp_path}. Pass files of your own instead."
    )


def test_it_parses_without_importing(library):
    library("gradaccum_probe.py", "raise SystemExit\ndef f(): ...\n")
    assert stdlib.functions() == ["def f(): ..."]
    assert "gradaccum_probe" not in sys.modules
