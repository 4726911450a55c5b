"""Access control: the scope that each endpoint requires, and whether a caller's key allows it.

The tables below name every path of the HTTP listeners and every service of the gRPC listener. A
test fails for an endpoint that is missing there; such an endpoint requires the scope ``admin``.
"""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from baton.config.access import KeyConfig
from baton.config.choices import Scope
from baton.config.cluster import Config
from baton.config.fields import split_host_port
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    Forbidden,
    Overloaded,
    RateLimitExceeded,
    RequestTooLarge,
    Unauthenticated,
    Unavailable,
)
from baton.request import Principal
from baton.telemetry.metrics import RouterMetrics
from router.access.api_keys import ApiKeys, Caller, authorization_of
from router.access.rate_limits import RateLimits
from router.access.visit import Visit
from router.billing.ledger import Ledger
from router.core.accounting import count_refusal
from router.core.request import Choice, GenerationRequest

OPEN = frozenset({"/health", "/live", "/ping"})
"""Paths that require no key: they only show whether the process serves."""
_OPEN_PAGES = ("/console", "/console/")
_OPEN_FILES = "/console/static/"
"""Path prefix of the console's pages and files. It requires no key, since they contain no data:
they load it from paths that require a key."""
_ADMIN = (
    *("/console/ratios", "/console/what-if"),
    *("/v1/cache", "/v1/cluster", "/v1/pools", "/v1/requests", "/v1/workers"),
)
_METRICS = ("/console", "/load", "/metrics")
_INFERENCE = (
    "/detokenize",
    "/openapi.json",
    "/tokenize",
    "/v1/batches",
    "/v1/cache/prefixes",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/feedback",
    "/v1/files",
    "/v1/generate",
    "/v1/messages",
    "/v1/model/info",
    "/v1/models",
    "/v1/responses",
    "/v1/usage",
    "/version",
)
_BY_PREFIX: dict[str, Scope] = {
    **dict.fromkeys(_ADMIN, "admin"),
    **dict.fromkeys(_METRICS, "metrics"),
    **dict.fromkeys(_INFERENCE, "inference"),
}
_PROXY_HEADERS = (
    *("forwarded", "via", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip"),
    *("x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-forwarded-port"),
    *("x-forwarded-server", "x-original-forwarded-for", "x-envoy-external-address"),
)
"""Names of the headers that proxies add to requests that they forward."""
_OPEN_SERVICES = frozenset({"grpc.health.v1.Health"})
_INFERENCE_SERVICES = frozenset(
    {
        "baton.v1.InferenceService",
        "baton.v1.TokenService",
        "grpc.reflection.v1alpha.ServerReflection",
    }
)


@dataclass(frozen=True, slots=True)
class Charge:
    """The state of a request's limits and budgets after the request was charged."""

    headers: Mapping[str, str]
    """Response headers that show the remaining limits of the key."""
    slow: bool = False
    """Whether so much of a budget is used that the request must run in the background."""


_NO_CHARGE = Charge({})


class Access:
    """Checks keys and their scopes, counts requests against limits and budgets, and bills
    requests.
    """

    def __init__(
        self,
        config: Config,
        metrics: RouterMetrics,
        limits: RateLimits | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """Create the access control. Without ``limits``, no rate limits apply. Without ``ledger``,
        no request is billed."""
        self._config = config
        self._ledger = ledger
        self._metrics = metrics
        self._limits = limits
        hosts = [split_host_port(one)[0] for one in (config.admin_http or config.http, config.grpc)]
        keyless = not config.keys and not config.keys_file and not config.require_key
        self._all_are_operators = keyless and all(map(is_loopback, hosts))
        self.set_keys(())

    def set_keys(self, keys: Sequence[KeyConfig]) -> None:
        """Replace all keys except those of the configuration. Running requests are not affected."""
        known = (*self._config.keys, *keys)
        self._keys = ApiKeys(known, required=self._config.require_key)

    def keys(self) -> Sequence[KeyConfig]:
        """Return all current keys."""
        return self._keys.all()

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Return the caller that sent these HTTP headers or gRPC metadata. Their names must be in
        lower case.

        Raises Unauthenticated."""
        return self._keys.caller(authorization_of(headers))

    def owner_of(self, principal: Principal) -> Caller | None:
        """Return the caller that started long work, such as a batch, with the current state of its
        key.

        None if the key was revoked, has expired, or no longer allows inference for the tenant.
        """
        if not principal.key_id:
            return Caller(principal)
        key = self._keys.named(principal.key_id)
        if key is None or key.tenant != principal.tenant or not key.allows("inference"):
            return None
        return Caller(principal, key)

    def may_see_workers(self, caller: Caller) -> bool:
        """Return whether answers to a caller may name the workers that computed them.

        A caller with the scope ``metrics`` sees them. Without a required key all callers see them,
        unless the metrics have a listener of their own.
        """
        if caller.key is not None and caller.key.allows("metrics"):
            return True
        return not self._config.require_key and not self._config.admin_http

    def is_operator(self, headers: Mapping[str, str]) -> bool:
        """Return whether the API key in the headers has the scope ``admin``."""
        try:
            self.check(headers, "admin")
        except (Unauthenticated, Forbidden):
            return False
        return True

    def key_name(self, headers: Mapping[str, str]) -> str:
        """Return the public name of the caller's key; empty without a known key."""
        try:
            return self.caller(headers).principal.key_id
        except Unauthenticated:
            return ""

    def check(self, headers: Mapping[str, str], scope: Scope) -> Caller:
        """Check that the caller's key allows ``scope``. Raises Unauthenticated, Forbidden.

        If no key is required, all callers have the scopes ``inference`` and ``metrics``. All
        callers on this machine have ``admin`` if there are no keys and all listeners are on
        loopback. A call through a proxy may come from another machine, so it is rejected.
        """
        caller = self.caller(headers)
        if caller.key is not None and caller.key.allows(scope):
            return caller
        if scope == "admin":
            if self._all_are_operators:
                _check_direct(headers)
                return caller
        elif not self._config.require_key:
            return caller
        if not authorization_of(headers):
            raise Unauthenticated(f"an API key that allows {scope} is required")
        raise Forbidden(f"this API key does not allow {scope}")

    async def arrive(self, caller: Caller, *, background: bool = False) -> Caller:
        """Count a request against its API key's limits. Return the caller that must be passed to
        ``leave`` when the request ends.

        ``background``: true if no deadline applies to the request. Raises RateLimitExceeded; then
        ``leave`` must not be called."""
        if self._limits is None:
            return caller
        # The tenant may have a budget even without a key.
        key = caller.key or KeyConfig.model_construct(name="", tenant=caller.principal.tenant)
        deadline_s = None if background else self._config.request_deadline_s
        return replace(caller, visit=await self._limits.arrive(key, deadline_s))

    def leave(self, caller: Caller) -> None:
        """Record the end of a request that ``arrive`` has counted, whether the request succeeded or
        not."""
        if caller.visit is not None and self._limits is not None:
            self._limits.leave(caller.visit)

    @asynccontextmanager
    async def visiting(self, caller: Caller, *, background: bool = False) -> AsyncIterator[Caller]:
        """Count a request against its API key's limits from now to the end of the block.

        Yields the caller, with the count of this request in ``visit``. Raises RateLimitExceeded."""
        there = await self.arrive(caller, background=background)
        try:
            yield there
        finally:
            self.leave(there)

    @asynccontextmanager
    async def charged(
        self,
        caller: Caller,
        answer_id: str,
        requests: Sequence[GenerationRequest],
        choices: Sequence[Choice],
    ) -> AsyncIterator[Charge]:
        """Before the block, charge a request the maximum that it can cost. After the block, bill
        what it used.

        ``choices`` must have the numbers of generated tokens when the block ends. A request that
        was rejected before it began costs no tokens, and one that failed by the server's fault is
        not billed. Raises RateLimitExceeded, RequestTooLarge and Unavailable, and counts them as
        refusals."""
        visit = caller.visit
        try:
            charge = await self._charge(visit, requests)
        except (RateLimitExceeded, RequestTooLarge, Unavailable) as error:
            count_refusal(self._metrics, error, caller.principal)
            raise
        failure: BaseException | None = None
        try:
            yield charge
        except BaseException as error:
            failure = error
            raise
        finally:
            began = any(choice.begun for choice in choices)
            refused = isinstance(failure, Overloaded | Unavailable) and not began
            if visit is not None and self._limits is not None and not refused:
                prompt_tokens = sum(len(request.prompt_ids) for request in requests)
                generated = [choice.completion_tokens for choice in choices]
                self._limits.answered(visit, prompt_tokens, generated)
            if self._ledger is not None:
                billed = not _is_own_fault(failure)
                lines = tuple(self._ledger.prices.lines(requests, choices)) if billed else ()
                hold = None if visit is None else visit.hold
                agent = requests[0].agent if requests else ""
                answered = (one.fingerprint for one in choices if one.fingerprint)
                self._ledger.settle(
                    caller.principal, agent, answer_id, hold, lines, next(answered, "")
                )

    async def _charge(self, visit: Visit | None, requests: Sequence[GenerationRequest]) -> Charge:
        if visit is None or self._limits is None:
            return _NO_CHARGE
        prompt_tokens = sum(len(request.prompt_ids) for request in requests)
        most = [one.sampling.max_tokens for one in requests for _ in range(one.choices)]
        cost = 0 if self._ledger is None else self._ledger.prices.max_cost(requests)
        await self._limits.charge(visit, prompt_tokens, most, cost)
        return Charge(visit.headers(), visit.hold.slow)


def _is_own_fault(failure: BaseException | None) -> bool:
    """Return whether the server caused the failure of a request. False if the client or the
    request's deadline caused it."""
    if not isinstance(failure, Exception) or isinstance(failure, DeadlineExceeded):
        return False
    return not isinstance(failure, BatonError) or failure.http_status >= 500


def _check_direct(headers: Mapping[str, str]) -> None:
    """Check that no header shows that a proxy has forwarded the request. Raises Forbidden."""
    added = next((name for name in _PROXY_HEADERS if name in headers), None)
    if added is not None:
        raise Forbidden(
            f"this call came through a proxy (it has the header {added}), and without API keys"
            " only users of this machine are operators: create an operator's key with"
            " `baton keys create NAME --scope admin --file keys.json` and start with --keys-file"
            " keys.json, or call the router directly; the proxy should forward only the paths of"
            " inference"
        )


def is_loopback(host: str) -> bool:
    """Return whether a listener on ``host`` is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listed_scope(path: str) -> Scope | None:
    """Return the scope that the tables of this module give an HTTP path. None if the path needs no
    key or is not in the tables."""
    end = len(path)
    while end > 0:
        scope = _BY_PREFIX.get(path[:end])
        if scope is not None:
            return scope
        end = path.rfind("/", 0, end)
    return None


def scope_of_path(path: str) -> Scope | None:
    """Return the scope that an HTTP path requires; None if the path needs no key."""
    if path in OPEN or path in _OPEN_PAGES or path.startswith(_OPEN_FILES):
        return None
    return listed_scope(path) or "admin"


def scope_of_service(name: str) -> Scope | None:
    """Return the scope that the gRPC service with this full name requires; None if the service
    needs no key."""
    if name in _OPEN_SERVICES:
        return None
    return "inference" if name in _INFERENCE_SERVICES else "admin"


def is_for_operators(path: str) -> bool:
    """Return whether an HTTP path is for operators: only the listener at ``admin_http`` serves it,
    if that is configured."""
    return listed_scope(path) in ("admin", "metrics")
