"""The fingerprint of a model folder: every byte of its weights counts.

Separate threads hash the files while the weights load. Hashes are stored in
``<folder>/fingerprints.json``, keyed by the file's device, inode, size, modification time and
change time. If a file is written in place or replaced, at least one of these changes: no program
can set the change time. The hash of a file that has just changed is not stored, since the file
could change again within one tick of the file system's clock. The hash of a file that changes while
it is read is not stored either.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

from baton.errors import ConfigError

_SEGMENT = 64 << 20
"""Bytes that one thread hashes at a time. A file's hash is computed from the hashes of its
segments."""
_CHUNK = 1 << 20
_MAX_THREADS = 4
"""Maximum number of hashing threads; each hashes about 1 GB/s."""
_MAX_KEPT = 1000
"""Maximum number of files whose hashes are stored; the latest ones are kept."""
_SETTLED_NS = 2_000_000_000
"""Minimum nanoseconds from a file's last write until its hash may be stored. Some file systems
count whole seconds, so a second write within this time might leave the file's times unchanged."""

Hashes: TypeAlias = dict[str, str]


class Fingerprint:
    """Computes the fingerprint of a model's files in background threads. The end of the ``with``
    block stops these threads."""

    def __init__(
        self,
        files: list[Path],
        dtype: str,
        quantization: str,
        cache: Path,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        """``files`` are the model's weight files, all in one folder; ``cache`` is the folder in
        which hashes are stored.

        ``clock`` returns nanoseconds since the epoch, as file times do.
        """
        self._files = files
        self._begin = f"{dtype}:{quantization}:"
        self._kept = cache / "fingerprints.json"
        self._clock = clock
        self._stopped = threading.Event()
        self._found: Future[str] = Future()

    def __enter__(self) -> Fingerprint:
        # A daemon thread, so that a failed start does not wait for a hash.
        threading.Thread(target=self._run, name="fingerprint", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def result(self) -> str:
        """Return the fingerprint, 32 hex digits; blocks until it is computed.

        Raises ConfigError if a file cannot be read, or the ``with`` block has already ended.
        """
        return self._found.result()

    def _run(self) -> None:
        try:
            self._found.set_result(self._find())
        except Exception as error:
            self._found.set_exception(error)

    def _find(self) -> str:
        digest = hashlib.blake2b(self._begin.encode(), digest_size=16)
        kept, new = _load(self._kept), Hashes()
        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
            for path in self._files:
                with _reading(path):
                    size, found = self._hash_of(path, kept, new, threads)
                digest.update(f"{path.name}:{size}:{found}".encode())
        if new:
            _keep(self._kept, new)
        folder = self._files[0].parent
        for path in (folder / "config.json", folder / "tokenizer.json"):
            with _reading(path):
                if path.is_file():
                    contents = path.read_bytes()
                    digest.update(f"{path.name}:{len(contents)}".encode() + contents)
        return digest.hexdigest()

    def _hash_of(
        self, path: Path, kept: Hashes, new: Hashes, threads: ThreadPoolExecutor
    ) -> tuple[int, str]:
        began = self._clock()
        with path.open("rb") as file:
            known = _identity(file.fileno())
            size = os.fstat(file.fileno()).st_size
            if (found := kept.get(known)) is not None:
                return size, found
            starts = range(0, size, _SEGMENT)
            segments = threads.map(lambda start: self._segment(file.fileno(), start), starts)
            found = hashlib.blake2b(b"".join(segments), digest_size=16).hexdigest()
            status = os.fstat(file.fileno())
            is_settled = began - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS
            if is_settled and _identity(file.fileno()) == known:
                new[known] = found
            return size, found

    def _segment(self, file: int, start: int) -> bytes:
        """Hash up to ``_SEGMENT`` bytes of a file from ``start`` on. Most of the work does not hold
        the interpreter's lock."""
        digest = hashlib.blake2b(digest_size=32)
        for place in range(start, start + _SEGMENT, _CHUNK):
            if self._stopped.is_set():
                raise ConfigError("the start ended before the model's fingerprint was known")
            data = os.pread(file, _CHUNK, place)
            if not data:
                break
            digest.update(data)
        return digest.digest()


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Context in which an error in reading the file ``path`` becomes a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _identity(file: int) -> str:
    found = os.fstat(file)
    return ":".join(
        str(number)
        for number in (
            found.st_dev,
            found.st_ino,
            found.st_size,
            found.st_mtime_ns,
            found.st_ctime_ns,
        )
    )


def _load(path: Path) -> Hashes:
    """Load the stored hashes of a folder. Returns an empty result if the hashes cannot be read, so
    that the files are hashed again."""
    try:
        found = json.loads(path.read_text())
        return {str(name): str(value) for name, value in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _keep(path: Path, new: Hashes) -> None:
    """Add new hashes to the stored ones. If another process writes at the same time, an entry may
    be lost."""
    every: Iterable[tuple[str, str]] = (_load(path) | new).items()
    draft = path.with_suffix(f".{os.getpid()}.draft")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(dict(list(every)[-_MAX_KEPT:])))
        draft.replace(path)
