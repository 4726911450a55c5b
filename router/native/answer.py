"""Answers of ``/v1/generate``: texts, their latency, and the optimizations that were used."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton.store.registry import WorkerRecord
from router.core.request import Choice, GenerationRequest, OutputDelta
from router.http.sse import DONE, encode_events, to_json
from router.inference.endpoint import ApiAnswer
from router.native.protocol import BatchGenerated, Generated

Records = Callable[[], Sequence[WorkerRecord]]
"""Returns the registry record of every worker."""


def optimization_used(choice: Choice, records: Sequence[WorkerRecord]) -> str:
    """Return the optimizations that an answer has used, as the counts of its tokens and the records
    of workers show."""
    worker = next((one for one in records if one.slot == choice.decode_worker), None)
    used = []
    if worker is None or worker.max_sequences > 1:
        used.append("continuous_batching")
    if choice.cached_tokens:
        used.append("prefix_cache")
    if choice.accepted_drafts:
        # The drafter of a worker that has left is unknown.
        used.append(f"speculation={worker.drafter}" if worker else "speculation")
    if worker is not None and worker.quantization:
        used.append(f"quantization={worker.quantization}")
    return ",".join(used) or "none"


class GenerateAnswer(ApiAnswer):
    """An answer of ``/v1/generate`` with one text, or with ``is_batch`` a list of texts: see
    ``ApiAnswer``."""

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        received_at: float,
        records: Records,
        *,
        stream: bool = False,
        is_batch: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an answer. ``received_at`` is the time at which the request arrived, in seconds of
        ``clock``."""
        super().__init__(requests, stream=stream)
        self._received_at = received_at
        self._records = records
        self._is_batch = is_batch
        self._clock = clock
        self._ended_at = [received_at] * len(requests)

    def events(self, prompt: int, delta: OutputDelta) -> bytes:
        """Count a prompt's delta. Return its server-sent events; empty if the client sees nothing
        of it. See ``ApiAnswer``."""
        self._add(prompt, delta, keep_text=False)
        return encode_events([to_json({"text": delta.text})]) if delta.text else b""

    def last_events(self) -> bytes:
        """Return the last events of a stream whose requests have not failed. See ``ApiAnswer``."""
        return encode_events([to_json(self._generated(0).model_dump()), DONE])

    def keep(self, prompt: int, delta: OutputDelta) -> None:
        """Count a prompt's delta, and store it for ``whole``. See ``ApiAnswer``."""
        self._add(prompt, delta, keep_text=True)

    def whole(self) -> Mapping[str, Any]:
        """Return the body of an answer that is not streamed. Long lists in it are ``Items``. See
        ``ApiAnswer``."""
        results = [self._generated(place) for place in range(len(self.requests))]
        if not self._is_batch:
            return results[0].model_dump()
        seconds = max(self._ended_at) - self._received_at
        tokens = sum(one.tokens_generated for one in results)
        return BatchGenerated(
            results=results,
            total_latency_ms=_ms(seconds),
            throughput_tokens_per_sec=round(tokens / seconds, 3) if seconds > 0 else 0.0,
        ).model_dump()

    def _add(self, prompt: int, delta: OutputDelta, *, keep_text: bool) -> None:
        self.choices[prompt].add(delta, keep_text=keep_text)
        self._ended_at[prompt] = self._clock()

    def _generated(self, place: int) -> Generated:
        choice = self.choices[place]
        return Generated(
            text=choice.text,
            tokens_generated=choice.completion_tokens,
            latency_ms=_ms(self._ended_at[place] - self._received_at),
            optimization_used=optimization_used(choice, self._records()),
            finish_reason=choice.finish,
            system_fingerprint=choice.fingerprint or None,
        )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
