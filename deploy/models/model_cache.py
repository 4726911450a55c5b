"""Baton's cache of models: folders that are either complete or absent, and GGUF files in them.

A folder is filled under another name and then renamed. Its receipt lists its files, so that a
damaged folder is detected. Concurrent processes fill a folder once. Their locks are in ``locks`` in
the cache folder.

``converted/<sha256>-v<version>`` is the conversion of the GGUF file with that hash: in bfloat16, or
with the suffix ``-codes`` in the file's own codes. With the suffix ``-tokenizer`` it has no
weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import filelock
from pydantic import BaseModel, ConfigDict, ValidationError

from baton.errors import ConfigError
from baton.host.cache import cache_dir

CONVERTER_VERSION = 1
"""Part of a converted folder's name: raised whenever ``deploy.models.gguf_convert`` makes another
folder of the same file."""
_LOCK_S = 3600.0
_RECEIPT = "baton_model.json"
_PLAIN, _CODES = "", "-codes"
FORMS = (_PLAIN, _CODES)
"""Folder suffixes of the two forms to which a GGUF file is converted: in bfloat16, or with the
file's own quantized values."""
TOKENIZER = "-tokenizer"
"""Folder suffix of a GGUF file's tokenizer and configuration: what a router reads of a model."""


class Receipt(BaseModel):
    """The list of the files in a cached folder; written last, when the folder is complete."""

    model_config = ConfigDict(frozen=True)

    name: str
    source: str
    files: dict[str, int]
    """Sizes of the files in bytes."""

    @property
    def size(self) -> int:
        """Return the total size of the folder's files, in bytes."""
        return sum(self.files.values())


def read_receipt(folder: Path) -> Receipt | None:
    """Return the receipt of a complete cached folder; None if it is absent or lacks a file."""
    try:
        receipt = Receipt.model_validate_json((folder / _RECEIPT).read_bytes())
        complete = all(
            (folder / name).stat().st_size == size for name, size in receipt.files.items()
        )
    except (OSError, ValidationError):
        return None
    return receipt if complete else None


def install(
    target: Path,
    name: str,
    source: str,
    fill: Callable[[Path], None],
    progress: Callable[[str], None],
) -> Path:
    """Return the cached folder ``target``. If it does not exist, ``fill`` is called with an empty
    folder, which then becomes ``target``.

    Raises ConfigError if another process holds the folder's lock for an hour, and what ``fill``
    raises.
    """
    if read_receipt(target) is not None:
        return target
    with locked(target.name, progress):
        if read_receipt(target) is None:
            target.parent.mkdir(parents=True, exist_ok=True)
            for leftover in target.parent.glob(f".{target.name}.*"):
                shutil.rmtree(leftover, ignore_errors=True)
            draft = target.with_name(f".{target.name}.{uuid4().hex}")
            draft.mkdir()
            try:
                fill(draft)
                _seal(draft, name, source)
                shutil.rmtree(target, ignore_errors=True)
                draft.rename(target)
                _sync(target.parent)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    return target


@contextmanager
def locked(name: str, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock ``name`` of the cache folder. Raises ConfigError after an hour's wait."""
    path = cache_dir() / "locks" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        progress("waiting for another process that prepares the same model")
        try:
            lock.acquire(timeout=_LOCK_S)
        except filelock.Timeout as error:
            raise ConfigError(
                f"another process has held {path} for {_LOCK_S:.0f} s; end it and try again"
            ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def disk_errors(folder: Path | None = None, variable: str = "BATON_CACHE_DIR") -> Iterator[None]:
    """Convert errors of the file system in ``folder``, or in Baton's cache, to ConfigError.

    ``variable`` is the environment variable that sets the folder.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write the model to {folder or cache_dir()}: {error}; check permissions and "
            f"free space there, or set {variable} to another folder"
        ) from error


def _seal(folder: Path, name: str, source: str) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.is_file()}
    receipt = Receipt(name=name, source=source, files=sizes)
    (folder / _RECEIPT).write_text(receipt.model_dump_json(indent=2) + "\n")
    for file in folder.iterdir():
        _sync(file)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def form_of(quantization: str, *, weights: bool = True) -> str:
    """Return the form to which a GGUF file is converted for this ``quantization`` setting: an
    element of ``FORMS``, or ``TOKENIZER`` if ``weights`` is false."""
    if not weights:
        return TOKENIZER
    return _CODES if quantization == "auto" else _PLAIN


def converted_folder(sha256: str, form: str) -> Path:
    """Return the folder for the conversion of the GGUF file with that hash, whether or not the
    folder exists."""
    return cache_dir() / "converted" / f"{sha256}-v{CONVERTER_VERSION}{form}"


def find_converted(sha256: str, form: str) -> Path | None:
    """Return the complete folder for a conversion of the GGUF file with that hash; None if there is
    none. Every form has the tokenizer."""
    forms = (form, *FORMS) if form == TOKENIZER else (form,)
    folders = (converted_folder(sha256, one) for one in forms)
    return next((folder for folder in folders if read_receipt(folder) is not None), None)


def converted_folders() -> Iterator[tuple[Path, Receipt]]:
    """Yield all complete folders of converted GGUF files, with their receipts."""
    for form in FORMS:
        for folder in cache_dir().glob(f"converted/*-v{CONVERTER_VERSION}{form}"):
            if (receipt := read_receipt(folder)) is not None:
                yield folder, receipt


def converted(gguf: Path, form: str, progress: Callable[[str], None]) -> Path:
    """Return the folder of a converted GGUF file. The file is hashed and converted first if needed.

    Raises ConfigError for a file that cannot be converted.
    """
    sha256 = _remembered_sha256(gguf, progress)
    return convert_once(gguf, sha256, form, gguf.stem, str(gguf), progress)


def load_converter() -> Callable[..., None]:
    """Return ``deploy.models.gguf_convert.convert``. Raises ConfigError without the extra
    ``gguf``."""
    from deploy.models.gguf_convert import convert  # noqa: PLC0415

    return convert


def convert_once(
    gguf: Path,
    sha256: str,
    form: str,
    name: str,
    source: str,
    progress: Callable[[str], None],
) -> Path:
    """Convert a GGUF file whose hash is known, unless its converted folder exists. Returns that
    folder. ``name`` and ``source`` go into its receipt."""

    weights = form != TOKENIZER

    def fill(folder: Path) -> None:
        convert = load_converter()
        what = f"converting {gguf.name}" if weights else f"reading the tokenizer of {gguf.name}"
        progress(what + (" to bfloat16" if form == _PLAIN else ""))
        convert(gguf, folder, keep_codes=form == _CODES, weights=weights)
        if weights:
            _keep_beside(gguf, folder)

    if (found := find_converted(sha256, form)) is not None:
        return found
    if form == _CODES:
        source = f"{source}, in its own codes"
    return install(converted_folder(sha256, form), name, source, fill, progress)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _keep_beside(gguf: Path, folder: Path) -> None:
    try:
        (folder / gguf.name).hardlink_to(gguf.resolve())
    except OSError:
        shutil.copyfile(gguf, folder / gguf.name)


def _remembered_sha256(gguf: Path, progress: Callable[[str], None]) -> str:
    """Return the SHA-256 of a GGUF file, from a cache if the file is unchanged.

    Hashing takes seconds per gigabyte.
    """
    memory = cache_dir() / "sha256.json"
    stat = gguf.stat()
    key, state = str(gguf.resolve()), [stat.st_size, stat.st_mtime_ns]
    known = _read_memory(memory)
    if (entry := known.get(key)) is not None and entry[:2] == state:
        return str(entry[2])
    progress(f"hashing {gguf.name}")
    sha256 = sha256_of(gguf)
    kept = {path: entry for path, entry in _read_memory(memory).items() if Path(path).exists()}
    memory.parent.mkdir(parents=True, exist_ok=True)
    draft = memory.with_name(f".{memory.name}-{uuid4().hex}")
    draft.write_text(json.dumps(kept | {key: [*state, sha256]}, indent=1))
    draft.replace(memory)
    return sha256


def _read_memory(memory: Path) -> dict[str, list[int | str]]:
    try:
        known = json.loads(memory.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {
        path: entry for path, entry in known.items() if isinstance(entry, list) and len(entry) == 3
    }
