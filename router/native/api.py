"""``POST /v1/generate`` and ``POST /v1/generate/batch``: prompts in, texts and latencies out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import Request
from starlette.responses import Response

from router.core.request import GenerationRequest
from router.http.fields import validate
from router.inference.builder import Arrival
from router.inference.endpoint import ApiAnswer, Endpoint
from router.inference.sampling_input import SamplingInput
from router.inference.service import InferenceService
from router.native.answer import GenerateAnswer
from router.native.protocol import (
    MAX_TOKENS,
    TEMPERATURE,
    BatchGenerateRequest,
    GenerateRequest,
    Optimization,
)


class NativeApi:
    """The handlers of ``/v1/generate`` and ``/v1/generate/batch``. Their endpoints convert errors
    to responses."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self._builder = service.builder
        self._one = Endpoint(service, "gen-", self._parse)
        self._batch = Endpoint(service, "genbatch-", self._parse_batch)

    async def generate(self, request: Request) -> Response:
        """Continue a prompt."""
        return await self._one.answer(request)

    async def generate_batch(self, request: Request) -> Response:
        """Continue several prompts concurrently."""
        return await self._batch.answer(request)

    async def _parse(self, raw: dict[str, Any], arrival: Arrival) -> ApiAnswer:
        body = validate(GenerateRequest, raw)
        requests = await self._requests(body, [body.prompt], arrival, "prompt")
        records = self._service.worker_records
        return GenerateAnswer(requests, arrival.at, records, stream=bool(body.stream))

    async def _parse_batch(self, raw: dict[str, Any], arrival: Arrival) -> ApiAnswer:
        body = validate(BatchGenerateRequest, raw)
        requests = await self._requests(body, body.prompts, arrival, "prompts")
        return GenerateAnswer(requests, arrival.at, self._service.worker_records, is_batch=True)

    async def _requests(
        self,
        body: GenerateRequest | BatchGenerateRequest,
        prompts: list[str],
        arrival: Arrival,
        param: str,
    ) -> list[GenerationRequest]:
        if body.model is not None:
            self._builder.check_model(body.model)
        sampling = SamplingInput(
            temperature=TEMPERATURE if body.temperature is None else body.temperature
        )
        limit = MAX_TOKENS if body.max_tokens is None else body.max_tokens
        if "max_tokens" in body.model_fields_set and body.max_tokens is not None:
            # A client's maximum must fit; the default is cut at the end of the context.
            sampling = replace(sampling, max_tokens=limit)
        requests = await self._builder.prompts(arrival, prompts, sampling, limit, param=param)
        return [_optimized(one, body.optimization or "full") for one in requests]


def _optimized(request: GenerationRequest, optimization: Optimization) -> GenerationRequest:
    if optimization == "full":
        return request
    return replace(request, without_prefix_cache=True, without_speculation=True)
