"""C++ that is built for this machine at first use, kept in the cache and called through ctypes.

It needs only Python's own library, so that a build can begin before packages are installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from baton.errors import ConfigError
from baton.host.cache import cache_dir

NATIVE = "-march=native"
"""The compiler's target for this machine's CPU."""
Tell = Callable[[str], None]
"""Function that receives a build's progress, in a few words."""

_FLAGS = ("-O3", "-std=c++20", "-ffp-contract=fast", "-Wno-psabi", "-fPIC", "-pthread")
# GCC copies vectors of 64 bytes in pieces of 16 where the CPU's registers have 32. A 32-byte read
# of such data waits for the memory. Without this flag, a decode step of the CPU engine takes more
# than twice as long on AVX2.
_WIDE_COPIES = "-mmove-max=256"
_BUILD_S = 300.0
"""Time limit for building the library, in seconds."""
_WAITS_S = 330.0
"""Maximum time that a process waits for another process to build the same library, in seconds."""
_LOOK_S = 0.02
_WAIT_S = 0.1
_SHOWN_BYTES = 2000


class CppLibrary:
    """The library of all ``*.cpp`` files of a folder, for one compiler and one CPU.

    Several processes may build it at once: one of them compiles, and the others wait.
    """

    def __init__(self, folder: Path, target: str, compiler: str = "") -> None:
        """Describe a library of the sources in ``folder``. ``target`` is an ``-march`` flag.
        ``compiler`` is a command; empty takes $CXX, or g++.

        Raises ConfigError with the reason if no compiler works.
        """
        self._folder = folder
        self._sources = sorted(folder.glob("*.cpp"), key=lambda path: -path.stat().st_size)
        self._command = [*shlex.split(compiler or _compiler()), *_FLAGS, target]
        with _explained(folder):
            if _takes(self._command, _WIDE_COPIES):
                self._command.append(_WIDE_COPIES)
            version = _run([*self._command, "--version"])
        self.path = cache_dir() / "kernels" / f"{self._digest(version)}.so"
        """Path of the library once it is built. The name depends on sources, compiler, flags and
        CPU."""

    @property
    def is_built(self) -> bool:
        """Whether the library is in the cache."""
        return self.path.is_file()

    def load(self) -> ctypes.CDLL:
        """Return the library, built if it is not in the cache. Calls into it release the GIL.

        Raises ConfigError with the reason if it cannot be built.
        """
        self.build()
        with _explained(self._folder):
            return ctypes.CDLL(str(self.path))

    def build(self, tell: Tell = lambda _: None) -> None:
        """Compile the library, one source per core at a time, unless the cache has it.

        Raises ConfigError with the compiler's output.
        """
        if self.is_built:
            return
        place = self.path.with_suffix(".build")
        with _explained(self._folder), self._alone(place, tell):
            if not self.is_built:
                with tempfile.TemporaryDirectory(dir=place) as unfinished:
                    self._compile(Path(unfinished), tell)

    def _digest(self, version: bytes) -> str:
        digest = hashlib.sha256(version + " ".join(self._command).encode())
        digest.update(_cpu_flags())
        for path in (*sorted(self._sources), *sorted(self._folder.glob("*.h"))):
            digest.update(path.read_bytes())
        return digest.hexdigest()[:32]

    @contextlib.contextmanager
    def _alone(self, place: Path, tell: Tell) -> Iterator[None]:
        """Lock the build folder ``place`` for one process within the context, and remove the folder
        at the end.

        Raises TimeoutError if another process builds for too long.
        """
        deadline, told = time.monotonic() + _WAITS_S, -1
        while (lock := _locked(place)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process has locked {place} for {_WAITS_S:.0f} s")
            # The other process removes what it made; os.walk skips folders that are gone.
            found = (name for _, _, names in os.walk(place) for name in names)
            done = sum(name.endswith(".o") for name in found)
            if done > told:
                tell(f"another process compiles, {done} of {len(self._sources)} files are done")
                told = done
            time.sleep(_WAIT_S)
        try:
            yield
        finally:
            shutil.rmtree(place, ignore_errors=True)
            os.close(lock)

    def _compile(self, place: Path, tell: Tell) -> None:
        objects = [place / f"{path.stem}.o" for path in self._sources]
        tell(f"{len(objects)} files")
        commands = [
            [*self._command, "-c", "-o", str(made), str(path)]
            for path, made in zip(self._sources, objects, strict=True)
        ]
        for done, _ in enumerate(_together(commands, place), 1):
            tell(f"{done} of {len(objects)} files are done")
        fresh = place / "library.so"
        _run([*self._command, "-shared", "-o", str(fresh), *map(str, objects)])
        fresh.replace(self.path)


def _compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if found is None:
        raise ConfigError("no C++ compiler was found; install g++")
    return found


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Convert the errors of a build to a ConfigError with the compiler's output."""
    try:
        yield
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace")[-_SHOWN_BYTES:]
        raise ConfigError(f"the C++ in {folder} cannot be built: {error} {said}".strip()) from error


def _locked(place: Path) -> int | None:
    """Make and lock a folder. Return the descriptor of its lock; None while another process holds
    the lock."""
    path = place / "lock"
    try:
        place.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (FileNotFoundError, FileExistsError):
        # Another process has just removed the folder. mkdir reports that it exists if it is removed
        # before mkdir has checked its type.
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _together(commands: Sequence[list[str]], place: Path) -> Iterator[None]:
    """Run commands, one per core at a time, and yield whenever one has ended.

    Stops all of them if one fails. Raises ``subprocess.CalledProcessError`` or TimeoutExpired.
    """
    deadline = time.monotonic() + _BUILD_S
    waiting = list(commands)
    running: dict[int, subprocess.Popen[bytes]] = {}
    cores = len(os.sched_getaffinity(0))
    try:
        while waiting or running:
            while waiting and len(running) < cores:
                number = len(commands) - len(waiting)
                # Output goes to a file, since a full pipe would stop its writer.
                with (place / f"{number}.said").open("wb") as said:
                    # The operator's own environment names the compiler.
                    running[number] = subprocess.Popen(  # noqa: S603
                        waiting.pop(0), stdin=subprocess.DEVNULL, stdout=said, stderr=said
                    )
            for number, process in list(running.items()):
                code = process.poll()
                if code is None:
                    continue
                del running[number]
                if code:
                    said_bytes = (place / f"{number}.said").read_bytes()
                    raise subprocess.CalledProcessError(code, commands[number], stderr=said_bytes)
                yield
            if running and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(commands[min(running)], _BUILD_S)
            time.sleep(_LOOK_S)
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def _takes(command: list[str], flag: str) -> bool:
    """Whether the compiler supports a flag. Older and other compilers may not."""
    try:
        _run([*command, flag, "-fsyntax-only", "-x", "c++", os.devnull])
    except subprocess.CalledProcessError:
        return False
    return True


def _cpu_flags() -> bytes:
    """Return the flags of this CPU, for the library's name: machines with different CPUs may share
    a cache."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return b""
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")


def _run(command: list[str]) -> bytes:
    # The operator's own environment names the compiler.
    return subprocess.run(  # noqa: S603
        command, capture_output=True, check=True, timeout=_BUILD_S
    ).stdout
