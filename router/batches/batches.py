"""The files and batches of one router process: creates and connects all parts."""

from __future__ import annotations

from collections.abc import Mapping

from baton.telemetry.metrics import RouterMetrics
from router.batches.api import BatchesApi
from router.batches.batch_planner import BatchPlanner
from router.batches.line_runner import LineRunner
from router.batches.quota import Quota
from router.batches.runner import BatchRunner
from router.batches.service import BatchService
from router.batches.slots import LineSlots
from router.batches.store import BatchStore
from router.inference.endpoint import Endpoint
from router.inference.service import InferenceService


class Batches:
    """Files and batches. Owned by the event loop.

    new ─start→ running ─stop→ stopped (the endpoints still answer) ─close→ closed
    """

    def __init__(
        self, service: InferenceService, endpoints: Mapping[str, Endpoint], metrics: RouterMetrics
    ) -> None:
        """Create the parts; ``endpoints`` holds the endpoint of each URL that a line may call."""
        config, model = service.config, service.model
        quota = Quota(config.max_tenant_file_bytes, config.max_total_file_bytes)
        self._store = BatchStore(config.data_folder, quota)
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
        self.api = BatchesApi(batch_service, planner, config)

    async def start(self) -> None:
        """Start running batches."""
        await self._runner.start()

    async def stop(self) -> None:
        """Stop running lines of batches."""
        await self._runner.close()

    async def close(self) -> None:
        """Close the table of files and batches."""
        await self._store.close()
