"""Downloads files of a Hugging Face model into the hub's cache, and reports bytes, speed and ETA.

Each file is one ``hf_hub_download``, which shares the cache with all other programs. It requests
the rest of a file when the connection fails. A later run cannot use a part of a file, so such parts
are removed. The threads are daemons, unlike those of ``snapshot_download``: Ctrl-C ends the process
immediately.
"""

from __future__ import annotations

import errno
import queue
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.errors import ConfigError

if TYPE_CHECKING:
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

ASK_S = 10.0
"""Deadline of a request to the hub, in seconds."""
_SILENCE_S = 600.0
"""Maximum time without progress, in seconds, after which a download fails. It is long: the library
itself retries five times after 10 s without a byte, and it reports only chunks of 10 MB, so a slow
connection is silent for minutes."""
_THREADS = 4
_POLL_S = 0.2
_GRACE_S = 2.0
_SPEED_S = 60.0
_PART = ".incomplete"
_STALE_S = 900.0
"""Time in seconds. A partial file that has not grown for this long belongs to no running
download."""
_TOKEN = "set HF_TOKEN to a token of an account with access, or run `hf auth login`"  # noqa: S105


class Cancelled(Exception):
    """The download was cancelled."""


@dataclass(frozen=True, slots=True)
class DownloadWatch:
    """Reporting and cancellation of a download."""

    every_s: float = 10.0
    """Seconds between two reports."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Event that cancels the download: after it is set, the download raises ``Cancelled`` at its
    next chunk."""


class Meter:
    """Counts the received bytes by file, and computes their recent speed."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = dict(sizes)
        self._got = dict.fromkeys(sizes, 0)
        self._history: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])
        self._lock = threading.Lock()
        self.total = sum(sizes.values())
        self.changed_at = time.monotonic()

    @property
    def got(self) -> int:
        """Return the number of bytes received so far, of all files."""
        return sum(self._got.values())

    def has(self, name: str, count: int) -> None:
        """Record that ``count`` bytes of a file exist.

        Several progress bars may report different counts for one file. The largest one is used.
        """
        with self._lock:
            if (count := min(count, self._sizes[name])) > self._got[name]:
                self._got[name] = count
                self.changed_at = time.monotonic()

    def report(self) -> str:
        """Return a text on the progress, such as ``1.2 of 15.2 GB (8%), 95.1 MB/s, 2 min 27 s
        left``."""
        now, got = time.monotonic(), self.got
        self._history.append((now, got))
        while len(self._history) > 2 and self._history[1][0] < now - _SPEED_S:
            self._history.popleft()
        then, before = self._history[0]
        speed = (got - before) / max(now - then, 1e-3)
        share = f"{size_text(got)} of {size_text(self.total)} ({100 * got // (self.total or 1)}%)"
        if speed <= 0:
            return f"{share}, no progress for {now - self.changed_at:.0f} s"
        left = divmod(round((self.total - got) / speed), 60)
        return f"{share}, {size_text(speed)}/s, {left[0]} min {left[1]} s left"


class HubDownload:
    """Downloads one commit of a model. ``model_id`` is ``org/name``; ``cache`` is the folder of the
    Hugging Face cache.

    The caller holds a lock, so that no other Baton process downloads that model.
    """

    def __init__(
        self,
        model_id: str,
        commit: str,
        cache: Path,
        progress: Callable[[str], None],
        watch: DownloadWatch,
    ) -> None:
        self._model_id = model_id
        self._commit = commit
        self._cache = cache
        self._progress = progress
        self._watch = watch

    def fetch(self, sizes: Mapping[str, int]) -> None:
        """Download the files that the cache lacks; ``sizes`` maps file names to sizes in bytes.

        Raises ConfigError when the disk is too small or the hub fails, ``Cancelled`` when stopped.
        """
        missing = {name: size for name, size in sizes.items() if not self._is_cached(name)}
        if not missing:
            return
        self._remove_stale_parts()
        self._check_disk(missing)
        meter, ended = Meter(missing), threading.Event()
        self._progress(
            f"downloading {size_text(meter.total)} in {len(missing)} file{'s'[: len(missing) > 1]} "
            f"of {self._model_id} to "
            f"{self._cache}"
        )
        todo: queue.SimpleQueue[str] = queue.SimpleQueue()
        outcomes: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        for name in missing:
            todo.put(name)

        def work() -> None:
            try:
                while not ended.is_set():
                    name = todo.get_nowait()
                    self._download(name, tqdm_class=_bar_class(name, meter, ended))
                    meter.has(name, missing[name])
            except queue.Empty:
                outcomes.put(None)
            except Exception as error:
                outcomes.put(error)

        threads = [
            threading.Thread(target=work, name="hub download", daemon=True)
            for _ in range(min(_THREADS, len(missing)))
        ]
        for thread in threads:
            thread.start()
        try:
            self._wait(outcomes, len(threads), meter)
        except Cancelled:
            raise
        except Exception as error:
            self._end(threads, ended)
            kept = [name for name in missing if self._is_cached(name)]
            # The cause may contain the address of a file, which carries a signature.
            raise explained(
                error, self._model_id, self._commit, self._kept(missing, kept)
            ) from None
        finally:
            # This runs on Ctrl-C too.
            self._end(threads, ended)

    def _end(self, threads: list[threading.Thread], ended: threading.Event) -> None:
        """Stop the download threads. Remove the partial files of threads that are still waiting for
        data."""
        ended.set()
        # Once now, since the process may end, and once later, since a thread may just have started
        # a file.
        for wait_s in (0.0, _GRACE_S):
            end = time.monotonic() + wait_s
            for thread in threads:
                thread.join(max(0.0, end - time.monotonic()))
            for part in self._own_parts():
                part.unlink(missing_ok=True)

    @property
    def _blobs(self) -> Path:
        from huggingface_hub.file_download import repo_folder_name  # noqa: PLC0415

        folder = repo_folder_name(repo_id=self._model_id, repo_type="model")
        return self._cache.resolve() / folder / "blobs"

    def _own_parts(self) -> Iterator[Path]:
        """Yield the partial files that this process writes.

        The folder may also have partial files of other processes.
        """
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # another thread has closed it
                file = descriptor.readlink()
                if file.parent == self._blobs and file.suffix == _PART:
                    yield file

    def _remove_stale_parts(self) -> None:
        """Remove partial files that a killed process of any program has left: no program uses them
        again."""
        for part in self._blobs.glob(f"*{_PART}"):
            with suppress(OSError):  # its process has finished the file
                if time.time() - part.stat().st_mtime > _STALE_S:
                    part.unlink()

    def _wait(
        self, outcomes: queue.SimpleQueue[Exception | None], threads: int, meter: Meter
    ) -> None:
        """Wait until all download threads have succeeded; raises the first error."""
        told_at = time.monotonic()
        while threads:
            try:
                error = outcomes.get(timeout=_POLL_S)
            except queue.Empty:
                pass
            else:
                if error is not None:
                    raise error
                threads -= 1
            now = time.monotonic()
            if self._watch.cancelled.is_set():
                raise Cancelled
            if now - meter.changed_at > _SILENCE_S:
                raise TimeoutError(f"no bytes for {_SILENCE_S:.0f} s")
            if threads and now - told_at >= self._watch.every_s:
                told_at = now
                self._progress(f"downloading {self._model_id}: {meter.report()}")

    def _download(self, name: str, **options: Any) -> Any:
        # The import is slow, and not needed where all files are cached.
        from huggingface_hub import hf_hub_download  # noqa: PLC0415

        return hf_hub_download(
            self._model_id,
            name,
            revision=self._commit,
            cache_dir=self._cache,
            etag_timeout=ASK_S,
            **options,
        )

    def _is_cached(self, name: str) -> bool:
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415

        found = try_to_load_from_cache(self._model_id, name, self._cache, self._commit)
        return isinstance(found, str)

    def _check_disk(self, sizes: Mapping[str, int]) -> None:
        folder = next(one for one in (self._cache, *self._cache.parents) if one.exists())
        free = shutil.disk_usage(folder).free
        if sum(sizes.values()) <= free:
            return
        # Another commit may have brought the same files, but a check takes a request for each.
        try:
            plans = [self._download(name, dry_run=True) for name in sizes]
        except Exception as error:
            raise explained(error, self._model_id, self._commit) from None
        needed = sum(plan.file_size for plan in plans if plan.will_download)
        if needed > free:
            raise ConfigError(
                f"{self._model_id} needs {size_text(needed)} more, but the disk of {self._cache} "
                f"has {size_text(free)} free: {size_text(needed - free)} are missing. Free some "
                "space, or set HF_HOME to a folder on another disk"
            )

    def _kept(self, sizes: Mapping[str, int], names: list[str]) -> str:
        total = sum(sizes[name] for name in names)
        return (
            f"{len(names)} of {len(sizes)} files ({size_text(total)}) are kept in {self._cache}; "
            "the same command continues with the others"
        )


def size_text(count: float) -> str:
    """Format bytes as in ``15.2 GB``, in powers of 1000 like disks and the hub."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"


def _bar_class(name: str, meter: Meter, ended: threading.Event) -> type[tqdm]:
    """Return a class of progress bars for one file. It draws nothing: it counts received bytes, and
    raises an error if the download is cancelled."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # noqa: PLC0415

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | {"disable": True}))  # type: ignore[no-untyped-call]
            self._count = 0
            self.update(options.get("initial") or 0)

        def update(self, n: float | None = 1) -> bool | None:
            if ended.is_set():
                raise Cancelled
            self._count += int(n or 0)
            meter.has(name, self._count)
            return None

    return Bar


def explained(error: Exception, model_id: str, revision: str, kept: str = "") -> ConfigError:
    """Return a ConfigError for ``error`` that also says what to do. Raise it ``from None``: the
    original error may show signed addresses.

    ``kept`` describes what a download has left for the next one.
    """
    if isinstance(error, ConfigError):
        return error
    advice = _advice(error, model_id, revision)
    return ConfigError(f"{advice}. {kept}" if kept else advice)


def reason(error: Exception) -> str:
    """Return a short text for ``error``, without addresses: download addresses may carry a
    signature."""
    from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415

    if isinstance(error, ConfigError):
        return error.message
    if isinstance(error, HfHubHTTPError):
        return f"it answers {error.response.status_code}"
    if isinstance(error, TimeoutError):
        return str(error) or "no answer in time"
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and isinstance(cause, Exception):
        return reason(cause)  # the library reports "not in the cache either"
    line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {line}" if line and "://" not in line else type(error).__name__


def _advice(error: Exception, model_id: str, revision: str) -> str:
    from huggingface_hub import constants, errors, get_token  # noqa: PLC0415

    page = f"https://huggingface.co/{model_id}"
    account = "the account of your token" if get_token() else "your account"
    by_class: dict[type[Exception], str] = {
        # This precedes the class that it is derived from.
        errors.GatedRepoError: (
            f"{model_id} is gated: accept its terms on {page} with {account}, and {_TOKEN}"
        ),
        errors.RepositoryNotFoundError: (
            f"the hub has no model {model_id}, or it is private, and there is no folder of that "
            f"name here: check the spelling, or {_TOKEN}"
        ),
        errors.RevisionNotFoundError: (
            f"{model_id} has no revision {revision!r}: {page}/tree/main lists its branches and "
            "tags; without --revision, main is used"
        ),
        errors.RemoteEntryNotFoundError: (
            f"{model_id} has no config.json, so it is not in the Transformers format. Of a GGUF "
            f"model, download one file (`hf download {model_id} FILE.gguf`) and pass its path. An "
            "adapter (LoRA) must be merged into its base model first"
        ),
    }
    by_status = {
        401: (
            "the hub refuses the token: it is wrong or has expired. Unset HF_TOKEN for public "
            f"models, or {_TOKEN}"
        ),
        403: f"the token may not read {model_id}: give it that permission, or {_TOKEN}",
        429: "the hub limits the rate of requests: try again in a few minutes, or with a token",
    }
    for kind, advice in by_class.items():
        if isinstance(error, kind):
            return advice
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in by_status:
        return by_status[error.response.status_code]
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full: free some space, or set HF_HOME to a folder on another disk"
    cache = Path(constants.HF_HUB_CACHE).expanduser().resolve()
    if isinstance(error, OSError) and Path(error.filename or "").is_relative_to(cache):
        return (
            f"the cache {cache} cannot be written ({reason(error)}): check "
            "permissions there, or set HF_HOME to another folder"
        )
    return (
        f"cannot download {model_id} from the hub: {reason(error)}. Try again when the network is "
        f"back; or run `hf download {model_id}` on another machine, copy the folder that it "
        "prints, and pass its path"
    )
