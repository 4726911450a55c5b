"""Models of the Hugging Face hub, served from the hub's own cache.

``huggingface_hub`` downloads and caches. Its environment variables apply: HF_HOME, HF_HUB_CACHE,
HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from baton.errors import ConfigError
from deploy.hub_download import ASK_S, DownloadWatch, HubDownload
from deploy.hub_errors import explained, reason
from deploy.model_folder import INDEX, WEIGHTS, check_config, check_folder, shards, weight_files
from deploy.sealed_folder import disk_errors, locked

_CACHED_ASK_S = 4.0
"""Deadline of the one question where the model is cached, in seconds."""
_ID = re.compile(r"(?!\.)[\w.-]{1,96}/(?!\.)[\w.-]{1,96}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAIN = "main"


@dataclass(frozen=True, slots=True)
class HubModel:
    """A complete snapshot in the hub's cache."""

    model_id: str
    commit: str
    path: Path
    size: int = 0
    """Bytes on disk, where it was listed."""


def is_id(text: str) -> bool:
    """Whether it reads as ``org/name``."""
    return _ID.fullmatch(text) is not None and not text.endswith(".gguf")


def cache_folder() -> Path:
    """The hub's cache, which HF_HUB_CACHE or HF_HOME names."""
    from huggingface_hub import constants  # noqa: PLC0415

    return Path(constants.HF_HUB_CACHE).expanduser().absolute()


def cached(model_id: str, revision: str = "") -> HubModel | None:
    """The complete snapshot of a branch, tag or commit in the cache; the hub is not asked."""
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415

    config = try_to_load_from_cache(model_id, "config.json", cache_folder(), revision or _MAIN)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    try:
        check_folder(folder)
    except ConfigError:
        return None
    return HubModel(model_id, folder.name, folder)


def list_cached() -> Iterator[HubModel]:
    """The complete snapshots in the cache that Baton can serve."""
    from huggingface_hub import scan_cache_dir  # noqa: PLC0415

    folder = cache_folder()
    repos = scan_cache_dir(folder).repos if folder.is_dir() else ()
    for repo in sorted(repos, key=lambda one: one.repo_id):
        for one in sorted(repo.revisions, key=lambda one: one.commit_hash):
            found = cached(repo.repo_id, one.commit_hash) if repo.repo_type == "model" else None
            if found is not None:
                yield HubModel(repo.repo_id, found.commit, found.path, one.size_on_disk)


def fetch(
    model_id: str, revision: str, progress: Callable[[str], None], watch: DownloadWatch
) -> HubModel:
    """The model's snapshot, downloaded first where the cache lacks a part of it.

    The hub is asked once for the revision's commit. Without an answer a cached snapshot is taken.
    Raises ConfigError when the model cannot be had or served: before weights are downloaded, where
    ``config.json`` and the list of files tell; ``Cancelled`` when ``watch`` says so.
    """
    from huggingface_hub import constants  # noqa: PLC0415

    revision = revision or _MAIN
    here = cached(model_id, revision)
    if here is not None and (constants.HF_HUB_OFFLINE or _COMMIT.fullmatch(revision)):
        return here
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"{model_id} at {revision} is not complete in {cache_folder()}, and HF_HUB_OFFLINE is "
            f"set: unset it, or run `hf download {model_id}` on a machine with a network, copy the "
            "folder that it prints, and pass its path"
        )
    _quiet_library()
    try:
        commit = _within(
            ASK_S if here is None else _CACHED_ASK_S, lambda: _commit(model_id, revision)
        )
    except Exception as error:
        if here is None:
            raise explained(error, model_id, revision) from error
        progress(f"the hub was not reached ({reason(error)}): the cached {here.commit} is taken")
        return here
    if here is not None and here.commit == commit:
        return here
    with disk_errors(), locked(f"hub-{model_id.replace('/', '--')}", progress):
        here = cached(model_id, revision)
        if here is not None and here.commit == commit:
            return here  # another process has downloaded it meanwhile
        return _download(model_id, revision, progress, watch)


def _commit(model_id: str, revision: str) -> str:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url  # noqa: PLC0415

    url = hf_hub_url(model_id, "config.json", revision=revision)
    commit = get_hf_file_metadata(url, timeout=_CACHED_ASK_S).commit_hash
    if commit is None:
        raise ConfigError(
            "what answers is not the Hugging Face hub (no X-Repo-Commit): look at HF_ENDPOINT and "
            "at proxies"
        )
    return commit


def _download(
    model_id: str, revision: str, progress: Callable[[str], None], watch: DownloadWatch
) -> HubModel:
    """Small files first, so that a snapshot with all its weights is complete."""
    from huggingface_hub import HfApi, hf_hub_download  # noqa: PLC0415

    def config_file() -> str:
        # By its branch or tag: the library notes the commit of that for later starts offline.
        return hf_hub_download(
            model_id, "config.json", revision=revision, cache_dir=cache_folder(), etag_timeout=ASK_S
        )

    try:
        folder = Path(_within(2 * ASK_S, config_file)).parent
        check_config(folder)
        commit = folder.name
        about = _within(
            ASK_S,
            lambda: HfApi().model_info(
                model_id, revision=commit, files_metadata=True, timeout=ASK_S
            ),
        )
    except Exception as error:
        raise explained(error, model_id, revision) from error
    sizes = {one.rfilename: one.size or 0 for one in about.siblings or ()}
    _check_files(model_id, sizes)
    download = HubDownload(model_id, commit, cache_folder(), progress, watch)
    download.fetch({name: sizes[name] for name in _small_files(sizes)})
    by_index = WEIGHTS not in sizes and INDEX in sizes
    weights = shards(folder / INDEX) if by_index else weight_files(_top(sizes))
    if lost := [name for name in weights if name not in sizes]:
        raise ConfigError(f"{model_id} lacks shards that its index names: {', '.join(lost)}")
    download.fetch({name: sizes[name] for name in weights})
    check_folder(folder)
    return HubModel(model_id, commit, folder)


def _top(names: Iterable[str]) -> list[str]:
    """Folders hold other formats of the same model."""
    return [name for name in names if "/" not in name]


def _small_files(names: Iterable[str]) -> list[str]:
    endings = (".json", ".jinja")
    return [name for name in _top(names) if name.endswith(endings) or name.startswith("tokenizer")]


def _check_files(model_id: str, names: Iterable[str]) -> None:
    top = _top(names)
    if not any(name.endswith(".safetensors") for name in top):
        others = sorted(name for name in top if name.endswith((".bin", ".gguf", ".pth")))
        raise ConfigError(
            f"{model_id} has no *.safetensors file"
            + (f" (only {', '.join(others[:3])})" if others else "")
            + ": take a repository that has, convert it (https://huggingface.co/spaces/safetensors/"
            "convert), or pass the path of a GGUF file of Llama architecture"
        )
    if "tokenizer.json" not in top:
        raise ConfigError(
            f"{model_id} has no tokenizer.json, which Baton needs: make it with transformers "
            "(AutoTokenizer.from_pretrained(…).save_pretrained(FOLDER)) in a copy of the model"
        )


def _quiet_library() -> None:
    """Its warnings are retries, with addresses that may carry a signature."""
    if "HF_HUB_VERBOSITY" not in os.environ:
        from huggingface_hub.utils import logging  # noqa: PLC0415

        logging.set_verbosity_error()  # type: ignore[no-untyped-call]


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
