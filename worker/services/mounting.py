"""A role's gRPC services on a server that has started: they change with the role.

A server takes no more handlers once it runs. So it gets one that asks, call by call, those of the
role that is mounted. Owned by the control loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grpc


class Mounting(grpc.GenericRpcHandler):
    """Takes the place of a server where generated code adds services to one."""

    def __init__(self) -> None:
        self._handlers: tuple[grpc.GenericRpcHandler, ...] = ()

    def clear(self) -> None:
        """Forget the services: their methods are unknown from now on. Open calls go on."""
        self._handlers = ()

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """As a server's."""
        self._handlers += tuple(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """As a server's: generated code says the same twice."""

    def service(self, handler_call_details: Any) -> Any:
        """As gRPC asks: the method's handler, None where the role has none."""
        for handler in self._handlers:
            found = handler.service(handler_call_details)
            if found is not None:
                return found
        return None
