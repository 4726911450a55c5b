"""baton/host/cpp_library.py, with a library of one function."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.host import cpp_library
from baton.host.cpp_library import NATIVE, CppLibrary

CXX = shutil.which("g++") or ""
WAIT_S = 60.0
needs_compiler = pytest.mark.skipif(not CXX, reason="no C++ compiler")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "answer.h").write_text("int base();\n#define ANSWER 42\n")
    (sources / "answer.cpp").write_text(
        '#include "answer.h"\nextern "C" int answer() { return base() + ANSWER; }\n'
    )
    (sources / "base.cpp").write_text("int base() { return 0; }\n")
    return sources


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line for each source that is compiled, by a compiler that waits as
    long as there is a file ``hold`` next to it.
    """
    calls, program = tmp_path / "calls", tmp_path / "slow-g++"
    wait = f"echo $* >> {calls}; sleep 0.3; while [ -e {tmp_path}/hold ]; do sleep 0.05; done"
    program.write_text(f'#!/bin/sh\ncase " $* " in *" -c "*) {wait};; esac\nexec {CXX} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(program))
    return calls


def held_build(folder: Path, counted: Path) -> tuple[Path, threading.Thread]:
    """A build in a thread, until the file that comes with it is removed."""
    hold = counted.with_name("hold")
    hold.touch()
    builder = threading.Thread(target=CppLibrary(folder, NATIVE).build)
    builder.start()
    wait_until_begun(counted)
    return hold, builder


def wait_until_begun(counted: Path) -> None:
    """Return once a compiler has started."""
    end = time.monotonic() + WAIT_S
    while not counted.exists():
        assert time.monotonic() < end, "no compiler has started"
        time.sleep(0.01)


def answer(library: ctypes.CDLL) -> int:
    return int(library.answer())


@needs_compiler
def test_it_is_built_and_called(folder: Path) -> None:
    library = CppLibrary(folder, NATIVE)
    assert not library.is_built
    assert answer(library.load()) == 42
    assert library.is_built


@needs_compiler
def test_it_is_built_once(folder: Path) -> None:
    first = CppLibrary(folder, NATIVE, CXX)
    first.build()
    written = first.path.stat().st_mtime_ns
    again = CppLibrary(folder, NATIVE, CXX)
    again.build()
    assert again.path == first.path
    assert first.path.stat().st_mtime_ns == written
    assert list(first.path.parent.iterdir()) == [first.path]


@needs_compiler
@pytest.mark.parametrize("name", ["answer.h", "answer.cpp"])
def test_a_changed_source_makes_another_library(folder: Path, name: str) -> None:
    before = CppLibrary(folder, NATIVE).load()
    changed = folder / name
    changed.write_text(changed.read_text().replace("42", "43").replace("ANSWER;", "ANSWER + 1;"))
    assert (answer(before), answer(CppLibrary(folder, NATIVE).load())) == (42, 43)


@needs_compiler
def test_another_target_makes_another_library(folder: Path) -> None:
    assert CppLibrary(folder, "-O1", CXX).path != CppLibrary(folder, "-O2", CXX).path


@needs_compiler
def test_it_says_how_far_it_is(folder: Path) -> None:
    told: list[str] = []
    CppLibrary(folder, NATIVE).build(told.append)
    assert told == ["2 files", "1 of 2 files are done", "2 of 2 files are done"]


@needs_compiler
def test_one_of_several_compiles_and_the_others_wait(folder: Path, counted: Path) -> None:
    told: list[list[str]] = [[] for _ in range(4)]
    libraries = [CppLibrary(folder, NATIVE) for _ in told]
    threads = [
        threading.Thread(target=library.build, args=(lines.append,))
        for library, lines in zip(libraries, told, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert all(library.is_built for library in libraries)
    assert len(counted.read_text().splitlines()) == 2
    waited = [lines for lines in told if lines and lines[0].startswith("another process compiles")]
    assert len(waited) >= 1
    assert list(libraries[0].path.parent.iterdir()) == [libraries[0].path]


@needs_compiler
def test_a_build_whose_files_vanish_while_they_are_counted_is_waited_for(
    folder: Path, counted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = CppLibrary(folder, NATIVE)
    hold, builder = held_build(folder, counted)
    scandir = os.scandir

    def vanished(place: str | Path) -> os._ScandirIterator[str]:
        if threading.current_thread() is waiter and str(place).endswith(unfinished.name):
            hold.unlink(missing_ok=True)
            raise FileNotFoundError(place)
        return scandir(place)

    (unfinished,) = (path for path in library.path.parent.glob("*.build/*") if path.is_dir())
    told: list[str] = []
    waiter = threading.Thread(target=library.build, args=(told.append,))
    monkeypatch.setattr(os, "scandir", vanished)
    waiter.start()
    waiter.join(WAIT_S)
    builder.join(WAIT_S)
    assert told == ["another process compiles, 0 of 2 files are done"]
    assert library.is_built


@needs_compiler
def test_a_folder_that_another_build_removes_while_it_is_made_is_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = CppLibrary(folder, NATIVE)
    place = library.path.with_suffix(".build")
    place.mkdir(parents=True)
    is_dir = Path.is_dir

    def removed(path: Path) -> bool:
        if path == place:
            shutil.rmtree(path, ignore_errors=True)
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", removed)
    assert answer(library.load()) == 42


@needs_compiler
def test_what_a_killed_process_has_left_is_no_obstacle(folder: Path, counted: Path) -> None:
    program = (
        "from pathlib import Path; from baton.host.cpp_library import *;"
        f"CppLibrary(Path({str(folder)!r}), NATIVE).build()"
    )
    counted.with_name("hold").touch()
    builder = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    wait_until_begun(counted)
    os.killpg(builder.pid, signal.SIGKILL)
    builder.wait()
    counted.with_name("hold").unlink()
    library = CppLibrary(folder, NATIVE)
    assert not library.is_built
    assert answer(library.load()) == 42
    assert list(library.path.parent.iterdir()) == [library.path]


@needs_compiler
def test_a_build_elsewhere_is_not_awaited_for_ever(
    folder: Path, counted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = CppLibrary(folder, NATIVE)
    hold, builder = held_build(folder, counted)
    monkeypatch.setattr(cpp_library, "_WAITS_S", 0.0)
    with pytest.raises(ConfigError, match=r"another process has locked .*\.build for 0 s"):
        library.build()
    hold.unlink()
    builder.join(WAIT_S)
    assert library.is_built


@needs_compiler
def test_a_compiler_that_does_not_end_is_ended(
    folder: Path, counted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = CppLibrary(folder, NATIVE)
    counted.with_name("hold").touch()
    monkeypatch.setattr(cpp_library, "_BUILD_S", 0.1)
    with pytest.raises(ConfigError, match=r"(?s)cannot be built.*timed out after 0\.1 seconds"):
        library.build()
    assert not list(library.path.parent.iterdir())


@needs_compiler
def test_a_source_that_is_wrong_is_named(folder: Path) -> None:
    (folder / "wrong.cpp").write_text("int wrong( { }\n")
    with pytest.raises(ConfigError, match=r"(?s)sources cannot be built.*wrong\.cpp"):
        CppLibrary(folder, NATIVE).build()
    assert not list(folder.parent.glob("cache/kernels/*"))


@pytest.mark.parametrize("compiler", ["false", "/nowhere/g++"])
def test_a_compiler_that_does_not_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(ConfigError, match="cannot be built"):
        CppLibrary(folder, NATIVE)


def test_no_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"install g\+\+"):
        CppLibrary(folder, NATIVE)
