"""Who may ask, and how much: what both fronts do before a request goes on its way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from baton.config import Config
from baton.errors import Overloaded, RateLimitExceeded, RequestTooLarge, Unavailable
from baton.metrics import RouterMetrics
from router.answer import Choice
from router.api_keys import ApiKeys, Caller
from router.generation import GenerationRequest
from router.rate_limits import Charge, RateLimits
from router.request_recorder import count_refusal


class Access:
    """API keys, and their limits where there is a Redis to keep them in."""

    def __init__(
        self, config: Config, metrics: RouterMetrics, limits: RateLimits | None = None
    ) -> None:
        self._keys = ApiKeys(config.keys, required=config.require_key)
        self._metrics = metrics
        self._limits = limits

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Who asks, by ``headers`` (or gRPC metadata) with names in lower case.

        Raises Unauthenticated.
        """
        return self._keys.caller(headers.get("authorization", ""))

    @asynccontextmanager
    async def entered(
        self, caller: Caller, requests: Sequence[GenerationRequest], choices: Sequence[Choice]
    ) -> AsyncIterator[Mapping[str, str]]:
        """Count the prompts of one request against its key while they are answered.

        Yields headers that tell what is left. ``choices`` hold in the end how much was generated.
        Raises RateLimitExceeded and RequestTooLarge, which are counted here.
        """
        charge = await self._charge(caller, requests)
        if charge is None or self._limits is None:
            yield {}
            return
        refund = False
        try:
            yield charge.headers()
        except (Overloaded, Unavailable):
            refund = not any(choice.begun for choice in choices)
            raise
        finally:
            generated = sum(choice.completion_tokens for choice in choices)
            self._limits.leave(charge, generated, refund=refund)

    async def _charge(self, caller: Caller, requests: Sequence[GenerationRequest]) -> Charge | None:
        if caller.key is None or self._limits is None:
            return None
        first = requests[0]
        tokens = sum(len(request.prompt_ids) for request in requests)
        try:
            return await self._limits.enter(caller.key, first.request_id, tokens, first.deadline_s)
        except (RateLimitExceeded, RequestTooLarge) as error:
            count_refusal(self._metrics, error)
            raise
