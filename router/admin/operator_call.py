"""Operators' calls over HTTP and gRPC: each requires the scope admin, and is in the audit log."""

from __future__ import annotations

from contextlib import AbstractContextManager

from starlette.requests import Request

from router.access.access import Access
from router.access.audit import operator_call
from router.grpc.call import Context, metadata_of, request_id_of


def http_call(
    access: Access, request: Request, action: str, target: str, **details: object
) -> AbstractContextManager[None]:
    """Wrap an operator's HTTP call as ``operator_call`` does. The HTTP gate has given the request
    an id."""
    request_id: str = request.state.request_id
    return operator_call(access, request.headers, request_id, action, target, **details)


def grpc_call(
    access: Access, context: Context, action: str, target: str, **details: object
) -> AbstractContextManager[None]:
    """Wrap an operator's gRPC call as ``operator_call`` does. The call has an id if its client
    gives one."""
    metadata = metadata_of(context)
    return operator_call(access, metadata, request_id_of(metadata), action, target, **details)
