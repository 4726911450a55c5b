"""The files and batches of one router process: creates and connects all parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from baton.config.cluster import Config
from baton.telemetry.metrics import RouterMetrics
from router.batches.api import BatchesApi
from router.batches.batch_planner import BatchPlanner
from router.batches.line_runner import LineRunner
from router.batches.runner import BatchRunner
from router.batches.service import BatchService
from router.batches.slots import LineSlots
from router.batches.storage.contents import Contents, FolderContents
from router.batches.storage.quota import Quota
from router.batches.storage.s3_contents import S3Contents
from router.batches.storage.store import BatchStore
from router.inference.endpoint import Endpoint
from router.inference.service import InferenceService

_OFF = (
    "files and batches are not configured: this router may be one of several, and what it kept on"
    " its own disk would be unknown to the others. The operator sets batch_store"
    " (BATON_BATCH_STORE) to a folder on a shared volume or to s3://bucket/prefix, or to local if"
    " all routers share the data_dir of one host"
)


def contents_of(config: Config) -> Contents:
    """Return what keeps the contents of files at the configured ``batch_store``. Raises
    ConfigError."""
    if config.batch_store.startswith("s3://"):
        return S3Contents(config.batch_store, config.data_folder)
    return FolderContents(Path(config.batch_store))


class Batches:
    """Files and batches. Owned by the event loop.

    new ─start→ running ─stop→ stopped (the endpoints still answer) ─close→ closed
    """

    def __init__(
        self,
        service: InferenceService,
        endpoints: Mapping[str, Endpoint],
        metrics: RouterMetrics,
        redis_url: str = "",
        cluster_id: str = "",
        *,
        replicated: bool = False,
    ) -> None:
        """Create the parts; ``endpoints`` holds the endpoint of each URL that a line may call.

        ``redis_url`` and ``cluster_id`` are for a ``batch_store``. ``replicated``: other routers of
        the cluster may run on other hosts. Raises ConfigError if the ``batch_store`` cannot be
        used.
        """
        config, model = service.config, service.model
        quota = Quota(config.max_tenant_file_bytes, config.max_total_file_bytes)
        if config.batch_store not in ("", "local"):
            contents = contents_of(config)
            self._store = BatchStore.shared(redis_url, cluster_id, contents, quota)
        else:
            self._store = BatchStore.local(config.data_folder, quota)
        self._is_off = replicated and not config.batch_store
        slots = LineSlots(config.max_batch_in_flight, config.tenant_weights)
        line_runner = LineRunner(endpoints, service.access, slots)
        planner = BatchPlanner(
            self._store, model.id, config.daily_batch_hours, config.tenant_weights
        )
        self._runner = BatchRunner(
            self._store,
            line_runner.run,
            model.id,
            metrics,
            planner=planner,
            slots=slots,
            has_key=line_runner.has_key,
            max_in_flight=config.max_batch_in_flight,
            max_line_bytes=config.max_body_bytes,
        )
        batch_service = BatchService(self._store, model.id, config, self._runner.wake)
        self.api = BatchesApi(batch_service, planner, config, _OFF if self._is_off else "")

    async def start(self) -> None:
        """Start running batches."""
        if not self._is_off:
            await self._runner.start()

    async def stop(self) -> None:
        """Stop running lines of batches."""
        if not self._is_off:
            await self._runner.close()

    async def close(self) -> None:
        """Close the table of files and batches."""
        await self._store.close()
