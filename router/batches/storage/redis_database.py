"""The state of files and batches in Redis, for routers on several hosts.

Each change is one script (``redis_scripts``), so it is atomic. Redis has no results: those of a
running batch are in parts, which are contents of their own. A part is written first, and counts
once Redis knows it. A former owner may still write a part, but Redis does not accept it.

One object may be used by several threads. Its methods raise ``redis.RedisError``.
"""

from __future__ import annotations

import json
import logging
import secrets
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, cast

import redis
from redis.backoff import NoBackoff
from redis.commands.core import Script
from redis.retry import Retry

from baton.errors import InvalidRequest, NotFound, Overloaded
from baton.store.redis_client import parse_password_file
from router.batches.schedule.plan import BatchWork
from router.batches.schedule.throughput import Progress
from router.batches.storage import database as bounds
from router.batches.storage import quota as quotas
from router.batches.storage import redis_scripts as scripts
from router.batches.storage.batch import Batch, BatchStatus, Fault, LineResult, StoredFile
from router.batches.storage.contents import Contents
from router.batches.storage.database import Free, LeaseLost, NoSpace, StatusChanged
from router.batches.storage.quota import Quota, no_room, too_many_files

log = logging.getLogger(__name__)

LAYOUT = 1
"""Version of the keys. Routers with another version do not see these batches."""
ANSWER_S = 2.0
"""Maximum time that a call waits for Redis, in seconds."""
_READ_TOGETHER = 256
"""Number of records that one call reads."""
_PIECE_BYTES = 1 << 20
_NUMBERS = frozenset(one.name for one in fields(Batch) if one.type in ("int", "int | None"))


@dataclass(frozen=True, slots=True)
class _Entry:
    """What each router reads of an unfinished batch every second."""

    id: str
    status: BatchStatus
    tenant: str
    owner: str
    place: int
    model: str
    expires_at: int
    beat: int
    total: int
    ended_lines: int
    tokens: int

    @classmethod
    def of(cls, batch_id: bytes, raw: bytes) -> _Entry:
        found = dict(zip(scripts.ENTRY_FIELDS, json.loads(raw), strict=True))
        return cls(
            batch_id.decode(),
            BatchStatus(found["status"]),
            found["tenant"],
            found["owner"],
            int(found["place"]),
            found["model"],
            int(found["expires_at"]),
            int(found["beat"]),
            int(found["total"]),
            int(found["completed"]) + int(found["failed"]),
            int(found["prompt_tokens"]) + int(found["completion_tokens"]),
        )

    def is_free(self, free: Free) -> bool:
        return self.owner in free.owners and self.id not in free.but


class RedisDatabase:
    """The state of files and batches of a cluster in Redis. See ``Database`` for its methods."""

    def __init__(self, url: str, cluster_id: str, contents: Contents) -> None:
        """Connect to the server at ``url`` on first use. ``contents`` keeps results of running
        batches."""
        plain, credentials = parse_password_file(url)
        self._client = redis.Redis.from_url(
            plain,
            socket_timeout=ANSWER_S,
            socket_connect_timeout=ANSWER_S,
            health_check_interval=15,
            retry=Retry(NoBackoff(), 0),
        )
        if credentials is not None:
            self._client.connection_pool.connection_kwargs["credential_provider"] = credentials
        self._prefix = f"baton:{{{cluster_id}}}:batches:{LAYOUT}"
        self._contents = contents
        self._scripts: dict[str, Script] = {}

    def close(self) -> None:
        self._client.close()

    def identity(self) -> str:
        """Return the random id of this state. It changes if Redis has lost the state."""
        name = self._key("counters")
        self._client.hsetnx(name, "identity", secrets.token_hex(16))
        return cast(bytes, self._client.hget(name, "identity")).decode()

    # Files

    def reserve(self, upload_id: str, tenant: str, size: int, ahead: int, quota: Quota) -> int:
        how, amount = self._run(
            scripts.RESERVE,
            id=upload_id,
            tenant=tenant,
            size=size,
            ahead=ahead,
            max_files=quotas.MAX_FILES_OF_TENANT,
            **asdict(quota),
        )
        if how == "files":
            raise too_many_files(amount)
        if how == "room":
            raise no_room(amount)
        return int(amount)

    def release_uploads(self, ids: Sequence[str]) -> None:
        if ids:
            self._client.hdel(self._key("uploads"), *ids)

    def uploads(self) -> dict[str, int]:
        found = self._all("uploads")
        return {name.decode(): int(value.split(b" ", 1)[0]) for name, value in found.items()}

    def add_file(self, file: StoredFile, upload_id: str, quota: Quota) -> None:
        how, *room = self._run(
            scripts.ADD_FILE, id=upload_id, file=_file_argument(file), **asdict(quota)
        )
        if how == "room":
            raise no_room(*room)

    def file(self, file_id: str, tenant: str, now: int = 0) -> StoredFile:
        file = next(self._records_of([file_id]), None)
        if file is None or file.tenant != tenant or file.expires_at <= now:
            raise NotFound("there is no such file", param="file_id")
        return file

    def files(
        self, tenant: str, purpose: str, after: str, limit: int, *, ascending: bool, now: int = 0
    ) -> list[StoredFile]:
        found: list[StoredFile] = []
        ids = self._page("files", tenant, after, ascending=ascending)
        for start in range(0, len(ids), _READ_TOGETHER):
            for file in self._records_of(ids[start : start + _READ_TOGETHER]):
                if purpose in ("", file.purpose) and file.expires_at > now:
                    found.append(file)
            if len(found) >= limit:
                break
        return found[:limit]

    def _records_of(self, ids: Sequence[str]) -> Iterator[StoredFile]:
        for raw in cast("list[bytes | None]", self._client.hmget(self._key("file"), list(ids))):
            if raw is not None:
                yield StoredFile(**json.loads(raw))

    def delete_file(self, file_id: str, tenant: str) -> None:
        self.file(file_id, tenant)
        how, *user = self._run(scripts.DELETE_FILE, id=file_id)
        if how == "used":
            raise InvalidRequest(
                f"the batch {user[0].decode()} still needs the file: cancel the batch first",
                param="file_id",
            )

    def collect(self, now: int) -> list[str]:
        _, *gone = self._run(scripts.COLLECT, now=now)
        return [name.decode() for name in gone]

    def content_ids(self) -> set[str]:
        files = cast("list[bytes]", self._client.zrange(self._key("expiring"), 0, -1))
        return {name.decode() for name in (*files, *self._all("open"))}

    # Batches

    def add_batch(self, batch: Batch) -> None:
        how, *found = self._run(
            scripts.ADD_BATCH,
            id=batch.id,
            tenant=batch.tenant,
            input=batch.input_file_id,
            now=batch.created_at,
            fields=_texts(asdict(batch)),
            max_unfinished=bounds.MAX_UNFINISHED_OF_TENANT,
            max_ended=bounds.MAX_ENDED_OF_TENANT,
        )
        if how == "full":
            raise Overloaded(
                f"{found[0]} unfinished batches are the maximum: wait, or cancel some",
                retry_after=bounds.BUSY_RETRY_S,
            )
        if how == "none":
            raise NotFound("there is no such file", param="file_id")
        if how == "purpose":
            raise InvalidRequest("the file's purpose must be 'batch'", param="input_file_id")

    def batch(self, batch_id: str, tenant: str | None = None) -> Batch:
        found = self.of_ids([batch_id])
        if not found or tenant not in (None, found[0].tenant):
            raise NotFound("there is no such batch", param="batch_id")
        return found[0]

    def batches(self, tenant: str, after: str, limit: int) -> list[Batch]:
        ids = self._page("batches", tenant, after, ascending=False, limit=limit)
        return self.of_ids(ids)[::-1]

    def of_ids(self, batch_ids: Collection[str]) -> list[Batch]:
        ids, found = list(batch_ids), []
        for start in range(0, len(ids), _READ_TOGETHER):
            with self._client.pipeline(transaction=False) as pipeline:
                for name in ids[start : start + _READ_TOGETHER]:
                    pipeline.hgetall(self._key("batch", name))
                found += [raw for raw in pipeline.execute() if raw]
        found.sort(key=lambda raw: int(raw[b"place"]))
        return [_batch(raw) for raw in found]

    def beats(self) -> dict[str, int]:
        beats: defaultdict[str, int] = defaultdict(int)
        for entry in self._open():
            if entry.owner:
                beats[entry.owner] += entry.beat
        return dict(beats)

    def to_be_ended(self, free: Free, now: int, limit: int) -> list[Batch]:
        ending = (BatchStatus.CANCELLING, BatchStatus.FINALIZING)
        found = [
            entry
            for entry in self._open()
            if entry.is_free(free) and (entry.status in ending or entry.expires_at <= now)
        ]
        found.sort(key=lambda entry: entry.place)
        return self.of_ids([entry.id for entry in found[:limit]])

    def to_be_run(self, free: Free, model: str, *, of_tenant: int, limit: int) -> list[Batch]:
        turns: defaultdict[str, int] = defaultdict(int)
        found: list[tuple[int, int, int, str]] = []
        entries = sorted(self._open(), key=lambda entry: (entry.expires_at, entry.place))
        for entry in entries:
            if entry.is_free(free) and entry.model == model and turns[entry.tenant] < of_tenant:
                turns[entry.tenant] += 1
                found.append((turns[entry.tenant], entry.expires_at, entry.place, entry.id))
        ids = [name for *_, name in sorted(found)[:limit]]
        return sorted(self.of_ids(ids), key=lambda batch: ids.index(batch.id))

    def _open(self) -> list[_Entry]:
        return [_Entry.of(name, raw) for name, raw in self._all("open").items()]

    # Planning

    def works(self, model: str) -> list[BatchWork]:
        found = [
            entry
            for entry in self._open()
            if entry.model == model and entry.status is BatchStatus.IN_PROGRESS
        ]
        found.sort(key=lambda entry: entry.expires_at)
        return [
            BatchWork(
                entry.id,
                entry.tenant,
                entry.expires_at,
                entry.total,
                entry.ended_lines,
                entry.tokens,
            )
            for entry in found[: bounds.MAX_PLANNED]
        ]

    def progress(self, model: str) -> Progress:
        found = self._all("progress", model)
        if not found:
            return Progress()
        speed = found.get(b"tokens_per_s")
        return Progress(
            int(found[b"lines"]), int(found[b"tokens"]), None if speed is None else float(speed)
        )

    def learn_speed(self, model: str, tokens_per_s: float) -> None:
        self._run(scripts.LEARN_SPEED, model=model, tokens_per_s=repr(tokens_per_s))

    def cancel(self, batch_id: str, tenant: str, now: int) -> Batch:
        self.batch(batch_id, tenant)
        changes = {"status": BatchStatus.CANCELLING, "cancelling_at": now}
        _, status = self._run(scripts.CANCEL, id=batch_id, changes=_texts(changes))
        if status.decode() not in (
            BatchStatus.VALIDATING,
            BatchStatus.IN_PROGRESS,
            BatchStatus.CANCELLING,
        ):
            raise InvalidRequest(f"a batch that is {status.decode()} cannot be cancelled")
        return self.batch(batch_id, tenant)

    # Methods for the owner of a batch

    def claim(self, batch: Batch, owner: str) -> Batch | None:
        how, *_ = self._run(
            scripts.CLAIM,
            id=batch.id,
            owner=batch.owner,
            beat=str(batch.beat),
            epoch=str(batch.epoch),
            by=owner,
        )
        if how == "none":
            raise NotFound("there is no such batch", param="batch_id")
        if how == "lost":
            return None
        now = self.batch(batch.id)
        # Another process may have claimed the batch in between.
        return now if (now.owner, now.epoch) == (owner, batch.epoch + 1) else None

    def beat(self, owner: str) -> None:
        self._run(scripts.BEAT, owner=owner)

    def release(self, owner: str) -> None:
        self._run(scripts.RELEASE, owner=owner)

    def move(self, held: Batch, /, **changes: Any) -> Batch:
        self._change(held, scripts.MOVE, status=held.status, changes=_texts(changes))
        # Another process may have claimed the batch in between: the caller must not get its epoch.
        own: dict[str, Any] = {"owner": held.owner, "epoch": held.epoch}
        return replace(self.batch(held.id), **(own | changes))

    def done_lines(self, batch_id: str) -> set[int]:
        bits = cast("bytes | None", self._client.get(self._key("lines", batch_id))) or b""
        return {
            8 * place + bit
            for place, byte in enumerate(bits)
            if byte
            for bit in range(8)
            if byte & (0x80 >> bit)
        }

    def add_results(self, held: Batch, results: Sequence[LineResult], quota: Quota) -> None:
        if not results:
            return
        part = secrets.token_hex(8)
        path = self._contents.incoming / part
        try:
            path.touch(mode=0o600, exist_ok=False)
            path.write_bytes(b"".join(map(_row, results)))
            self._contents.put(path, f"parts/{held.id}/{part}")
        finally:
            path.unlink(missing_ok=True)
        told = [
            (
                one.number,
                int(one.ok),
                one.size,
                one.prompt_tokens,
                one.cached_tokens,
                one.completion_tokens,
            )
            for one in results
        ]
        self._change(held, scripts.ADD_RESULTS, part=part, results=told, **asdict(quota))

    def records(self, batch_id: str, *, ok: bool) -> Iterator[str]:
        with tempfile.TemporaryFile(dir=self._contents.incoming) as spool:
            places: list[tuple[int, int, int]] = []
            """Line number, offset in the spool, and size of each record."""
            for part, skipped in self._all("parts", batch_id).items():
                left_out = set(map(int, skipped.split()))
                for position, row in enumerate(self._rows(batch_id, part.decode())):
                    number, good, record = row.split(b" ", 2)
                    if position not in left_out and bool(int(good)) == ok:
                        places.append((int(number), spool.tell(), len(record)))
                        spool.write(record)
            for _, offset, size in sorted(places):
                spool.seek(offset)
                yield spool.read(size).decode()

    def _rows(self, batch_id: str, part: str) -> list[bytes]:
        try:
            reader = self._contents.open(f"parts/{batch_id}/{part}")
        except FileNotFoundError:
            log.error("results of batch %s are lost: its part %s is gone", batch_id, part)
            return []
        with closing(reader):
            return b"".join(iter(lambda: reader.read(_PIECE_BYTES), b"")).split(b"\n")[:-1]

    def finish(self, held: Batch, files: Sequence[StoredFile], **changes: Any) -> Batch:
        changes |= {"owner": "", "result_bytes": 0}
        told = [_file_argument(file) for file in files]
        self._change(held, scripts.FINISH, files=told, changes=_texts(changes))
        return self.batch(held.id)

    def _change(self, held: Batch, script: str, **asked: Any) -> None:
        """Run a script that changes a batch for its owner. Raises LeaseLost, StatusChanged and
        NoSpace."""
        how, *_ = self._run(script, id=held.id, owner=held.owner, epoch=str(held.epoch), **asked)
        if how == "none":
            raise NotFound("there is no such batch", param="batch_id")
        if how == "lost":
            raise LeaseLost(held.id)
        if how == "status":
            raise StatusChanged(held.id)
        if how == "space":
            raise NoSpace(held.id)

    # Calls

    def _key(self, *parts: str) -> str:
        return ":".join((self._prefix, *parts))

    def _all(self, *parts: str) -> dict[bytes, bytes]:
        return cast("dict[bytes, bytes]", self._client.hgetall(self._key(*parts)))

    def _run(self, script: str, **asked: Any) -> list[Any]:
        """Run a script. Return its answer, whose first element says how it went."""
        known = self._scripts.get(script)
        if known is None:
            known = self._scripts[script] = self._client.register_script(script)
        how, *found = known(keys=[self._prefix], args=[json.dumps(asked)])
        return [how.decode(), *found]

    def _page(
        self, kind: str, tenant: str, after: str, *, ascending: bool, limit: int | None = None
    ) -> list[str]:
        """Return the ids of a tenant's files or batches that follow ``after`` in a list."""
        key = self._key(kind, tenant)
        first, last = ("-inf", "+inf") if ascending else ("+inf", "-inf")
        if after:
            place = self._client.zscore(key, after)
            if place is None:
                return []
            first = f"({int(place)}"
        found = self._client.zrange(
            key,
            first,
            last,
            desc=not ascending,
            byscore=True,
            offset=0,
            num=-1 if limit is None else limit,
        )
        return [name.decode() for name in cast("list[bytes]", found)]


def _row(result: LineResult) -> bytes:
    return f"{result.number} {int(result.ok)} {result.record}\n".encode()


def _file_argument(file: StoredFile) -> dict[str, Any]:
    record = json.dumps(asdict(file))
    return {
        "id": file.id,
        "tenant": file.tenant,
        "size": file.size,
        "expires_at": file.expires_at,
        "record": record,
    }


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return fields of a batch as Redis keeps them; those that are None are left out."""
    values = dict(values)
    if "metadata" in values:
        values["metadata"] = json.dumps(values["metadata"])
    if "faults" in values:
        faults: Iterable[Any] = values["faults"]
        values["faults"] = json.dumps(
            [asdict(fault) if isinstance(fault, Fault) else fault for fault in faults]
        )
    return {name: str(value) for name, value in values.items() if value is not None}


def _batch(raw: Mapping[bytes, bytes]) -> Batch:
    values: dict[str, Any] = {name.decode(): value.decode() for name, value in raw.items()}
    del values["place"]
    values |= {name: int(values[name]) for name in _NUMBERS & values.keys()}
    values["status"] = BatchStatus(values["status"])
    values["metadata"] = json.loads(values["metadata"])
    values["faults"] = tuple(Fault(**fault) for fault in json.loads(values["faults"]))
    return Batch(**values)
