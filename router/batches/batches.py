"""All parts of files and batches in one router process."""

from __future__ import annotations

from baton.config.cluster import Config
from router.access.access import Access
from router.batches.api import BatchesApi
from router.batches.desk import BatchDesk
from router.batches.line_runner import LineRunner, line_handlers
from router.batches.runner import BatchRunner
from router.batches.store import BatchStore
from router.core.request import Dispatcher
from router.core.request_recorder import RequestStats
from router.core.served_model import ServedModel
from router.text.tokenizer import Tokenizer


class Batches:
    """Owned by the event loop.

    new ─start→ running ─stop→ stopped (the endpoints still answer) ─close→ closed
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        tokenizer: Tokenizer,
        model: ServedModel,
        stats: RequestStats,
        config: Config,
        access: Access,
    ) -> None:
        """``access`` knows the keys of those who upload and ask."""
        handlers = line_handlers(dispatcher, tokenizer, model, stats, config)
        self._store = BatchStore(config.data_folder, config.max_total_file_bytes)
        self._runner = BatchRunner(
            self._store,
            LineRunner(handlers).run,
            model.id,
            stats.metrics,
            max_in_flight=config.max_batch_in_flight,
            max_line_bytes=config.max_body_bytes,
        )
        desk = BatchDesk(self._store, model.id, config, self._runner.wake)
        self.api = BatchesApi(desk, config, access)

    async def start(self) -> None:
        """Begin to run batches."""
        await self._runner.start()

    async def stop(self) -> None:
        """Run no more lines."""
        await self._runner.close()

    async def close(self) -> None:
        """Close the table."""
        await self._store.close()
