"""gRPC clients of a Baton cluster, for threads and for asyncio, and the headers of its HTTP API.

    from baton.client import Client, Message

    with Client("127.0.0.1:8001") as client:
        print(client.chat([Message("user", "Name a river.")]).text)

Failures raise ``baton.errors.BatonError``. Over HTTP the `openai` package is the client.
docs/reference/python-client.md has examples. This ``__init__.py`` is not empty, since other
programs import it. It needs no torch.
"""

from baton.client.grpc_client import DEFAULT_ADDRESS, AsyncClient, Client
from baton.client.headers import request_headers, retry_after_s
from baton.client.values import (
    Answer,
    Message,
    ModelCard,
    Piece,
    Sampling,
    TokenScore,
    Usage,
)
from baton.grammar import Grammar, GrammarKind
from baton.request import TraceContext
from baton.security.tls import TlsFiles

__all__ = [
    "DEFAULT_ADDRESS",
    "Answer",
    "AsyncClient",
    "Client",
    "Grammar",
    "GrammarKind",
    "Message",
    "ModelCard",
    "Piece",
    "Sampling",
    "TlsFiles",
    "TokenScore",
    "TraceContext",
    "Usage",
    "request_headers",
    "retry_after_s",
]
