"""baton/cpp_library.py, with a library of one function."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from baton.cpp_library import NATIVE, build_library, load_library
from baton.errors import ConfigError

CXX = shutil.which("g++") or ""
needs_compiler = pytest.mark.skipif(not CXX, reason="no C++ compiler")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "answer.h").write_text("#define ANSWER 42\n")
    (sources / "answer.cpp").write_text(
        '#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n'
    )
    return sources


def answer(library: ctypes.CDLL) -> int:
    return int(library.answer())


@needs_compiler
def test_it_is_built_and_called(folder: Path) -> None:
    assert answer(load_library(folder, NATIVE)) == 42


@needs_compiler
def test_it_is_built_once(folder: Path) -> None:
    first = build_library(folder, CXX, NATIVE)
    written = first.stat().st_mtime_ns
    assert build_library(folder, CXX, NATIVE) == first
    assert first.stat().st_mtime_ns == written
    assert list(first.parent.iterdir()) == [first]


@needs_compiler
@pytest.mark.parametrize("name", ["answer.h", "answer.cpp"])
def test_a_changed_source_makes_another_library(folder: Path, name: str) -> None:
    before = load_library(folder, NATIVE)
    changed = folder / name
    changed.write_text(changed.read_text().replace("42", "43").replace("ANSWER;", "ANSWER + 1;"))
    assert (answer(before), answer(load_library(folder, NATIVE))) == (42, 43)


@needs_compiler
def test_another_target_makes_another_library(folder: Path) -> None:
    assert build_library(folder, CXX, "-O1") != build_library(folder, CXX, "-O2")


@needs_compiler
def test_a_source_that_is_wrong_is_named(folder: Path) -> None:
    (folder / "wrong.cpp").write_text("int wrong( { }\n")
    with pytest.raises(ConfigError, match=r"(?s)sources cannot be built.*wrong\.cpp"):
        load_library(folder, NATIVE)
    assert not list(folder.parent.glob("cache/kernels/*"))


@pytest.mark.parametrize("compiler", ["false", "/nowhere/g++"])
def test_a_compiler_that_does_not_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(ConfigError, match="cannot be built"):
        load_library(folder, NATIVE)


def test_no_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"install g\+\+"):
        load_library(folder, NATIVE)
