"""Clients of a Baton cluster: over HTTP or gRPC, for threads or for an event loop. No torch.

    from baton.client import HttpClient, Message

    with HttpClient("http://127.0.0.1:8000") as client:
        print(client.chat([Message("user", "Name a river.")]).text)

What fails raises ``baton.errors.BatonError``. docs/client.md has examples. This is the one
``__init__.py`` that is not empty: it is what other people's programs import.
"""

from baton.client.async_grpc_client import AsyncClient
from baton.client.async_http_client import AsyncHttpClient
from baton.client.grpc_client import DEFAULT_ADDRESS, Client
from baton.client.http_client import DEFAULT_URL, HttpClient
from baton.client.values import (
    Answer,
    BatchInfo,
    Embeddings,
    FileInfo,
    Message,
    ModelInfo,
    Piece,
    Sampling,
    TokenScore,
    Usage,
)
from baton.grammar import Grammar, GrammarKind
from baton.tls import TlsFiles

__all__ = [
    "DEFAULT_ADDRESS",
    "DEFAULT_URL",
    "Answer",
    "AsyncClient",
    "AsyncHttpClient",
    "BatchInfo",
    "Client",
    "Embeddings",
    "FileInfo",
    "Grammar",
    "GrammarKind",
    "HttpClient",
    "Message",
    "ModelInfo",
    "Piece",
    "Sampling",
    "TlsFiles",
    "TokenScore",
    "Usage",
]
