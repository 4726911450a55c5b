"""What a live cluster makes of a load. Owned by the event loop that drives it."""

from __future__ import annotations

from loadtest.generator.load_driver import LoadDriver
from loadtest.generator.results.request_record import RequestRecord
from loadtest.generator.targets.openai_target import OpenAiTarget
from loadtest.generator.targets.target import AskOptions
from loadtest.research.validation.offered_load import OfferedLoad

LATE_S = 0.05
"""A client that was later than this at p99 measures itself."""


async def measured(
    load: OfferedLoad, url: str, model: str, *, run: int = 0
) -> tuple[list[RequestRecord], float]:
    """A record of each request, in their order, and how late the client's event loop was, at p99

    in seconds. Another ``run`` has prompts that no cache knows from one before.
    """
    target = OpenAiTarget(url, "completions", AskOptions(model))
    driver = LoadDriver(target)
    try:
        records = await driver.open_loop(iter(load.planned(run)))
    finally:
        await target.close()
    late = sorted(driver.loop_lag_s)
    records.sort(key=lambda record: record.number)
    return records, late[int(0.99 * (len(late) - 1))] if late else 0.0
