"""GGUF files, converted once to folders that can be served.

``converted/<sha256>-v<version>`` under the cache folder holds what was made of the file with that
hash: in bfloat16, or with ``-codes`` at its end in the file's own codes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

from baton.host.cache import cache_dir
from deploy.models.gguf_convert import CONVERTER_VERSION, convert
from deploy.models.sealed_folder import Receipt, install, read_receipt

_PLAIN, _CODES = "", "-codes"
FORMS = (_PLAIN, _CODES)
"""What a GGUF file is converted to, as the end of the folder's name: bfloat16, or its own codes."""


def form_of(quantization: str) -> str:
    """Which of ``FORMS`` a GGUF file is converted to for weights of this quantization."""
    return _CODES if quantization == "auto" else _PLAIN


def converted_folder(sha256: str, form: str) -> Path:
    """Where the file with that hash is, or will be, converted to."""
    return cache_dir() / "converted" / f"{sha256}-v{CONVERTER_VERSION}{form}"


def converted_folders() -> Iterator[tuple[Path, Receipt]]:
    """Every complete one."""
    for form in FORMS:
        for folder in cache_dir().glob(f"converted/*-v{CONVERTER_VERSION}{form}"):
            if (receipt := read_receipt(folder)) is not None:
                yield folder, receipt


def converted(gguf: Path, form: str, progress: Callable[[str], None]) -> Path:
    """The folder that was made of the file, which is hashed and converted first where needed.

    Raises ConfigError for a file that cannot be converted.
    """
    sha256 = _remembered_sha256(gguf, progress)
    return convert_once(gguf, sha256, form, gguf.stem, str(gguf), progress)


def convert_once(
    gguf: Path,
    sha256: str,
    form: str,
    name: str,
    source: str,
    progress: Callable[[str], None],
) -> Path:
    """The same of a file whose hash is known; ``name`` and ``source`` go into the receipt."""

    def fill(folder: Path) -> None:
        progress(f"converting {gguf.name}" + (" to bfloat16" if form == _PLAIN else ""))
        convert(gguf, folder, keep_codes=form == _CODES)
        _keep_beside(gguf, folder)

    if form == _CODES:
        source = f"{source}, in its own codes"
    return install(converted_folder(sha256, form), name, source, fill, progress)


def sha256_of(path: Path) -> str:
    """The file's hash, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _keep_beside(gguf: Path, folder: Path) -> None:
    try:
        (folder / gguf.name).hardlink_to(gguf.resolve())
    except OSError:
        shutil.copyfile(gguf, folder / gguf.name)


def _remembered_sha256(gguf: Path, progress: Callable[[str], None]) -> str:
    """Hashing takes seconds per gigabyte, so a file that did not change is hashed once."""
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
