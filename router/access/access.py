"""Who may ask, and how much: what both fronts do before a request goes on its way."""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from baton.config.access import KeyConfig
from baton.config.choices import Scope
from baton.config.cluster import Config
from baton.config.fields import split_host_port
from baton.errors import (
    Forbidden,
    Overloaded,
    RateLimitExceeded,
    RequestTooLarge,
    Unauthenticated,
    Unavailable,
)
from baton.telemetry.metrics import RouterMetrics
from router.access.api_keys import ApiKeys, Caller, authorization_of
from router.access.rate_limits import Charge, RateLimits
from router.core.choice import Choice
from router.core.request import GenerationRequest
from router.core.request_recorder import count_refusal


class Access:
    """API keys, and their limits where there is a Redis to keep them in."""

    def __init__(
        self, config: Config, metrics: RouterMetrics, limits: RateLimits | None = None
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._limits = limits
        hosts = [split_host_port(one)[0] for one in (config.admin_http or config.http, config.grpc)]
        keyless = not config.keys and not config.keys_file and not config.require_key
        self._all_are_operators = keyless and all(map(is_loopback, hosts))
        self.set_keys(())

    def set_keys(self, keys: Sequence[KeyConfig]) -> None:
        """From now on these are known, and those of the configuration; what runs goes on."""
        known = (*self._config.keys, *keys)
        self._keys = ApiKeys(known, required=self._config.require_key)

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Who asks, by ``headers`` (or gRPC metadata) with names in lower case.

        Raises Unauthenticated.
        """
        return self._keys.caller(authorization_of(headers))

    def may_see_workers(self, caller: Caller) -> bool:
        """Whether answers name their workers to a caller: it may read metrics, which name them too.

        Without a required key every caller may, unless metrics have a listener of their own.
        """
        if caller.key is not None and caller.key.allows("metrics"):
            return True
        return not self._config.require_key and not self._config.admin_http

    def check(self, headers: Mapping[str, str], scope: Scope) -> None:
        """Whether whoever asks may do what takes ``scope``. Raises Unauthenticated, Forbidden.

        Where no key is required, everybody may ask the model and read metrics; an operator is who
        shows an admin's key, or everybody where there are no keys at all and the fronts listen on
        loopback alone.
        """
        caller = self.caller(headers)
        if caller.key is not None and caller.key.allows(scope):
            return
        if scope == "admin":
            if self._all_are_operators:
                return
        elif not self._config.require_key:
            return
        if not authorization_of(headers):
            raise Unauthenticated(f"an API key that allows {scope} is required")
        raise Forbidden(f"this API key does not allow {scope}")

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
            return await self._limits.enter(caller.key, tokens, first.deadline_s)
        except (RateLimitExceeded, RequestTooLarge) as error:
            count_refusal(self._metrics, error)
            raise


def is_loopback(host: str) -> bool:
    """Whether who listens on ``host`` is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
