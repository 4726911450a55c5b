"""The request and the response of ``POST /v1/embeddings``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel

from router.http.client import Int, IntLists, Ints, Strings
from router.http.fields import RequestBody


class EmbeddingsRequest(RequestBody):
    """The body of `POST /v1/embeddings`."""

    ignored = frozenset({"user"})
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_special_tokens": (True,),
        "chat_template": (),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "messages": (),
        "normalize": (True,),
        "use_activation": (True,),
    }

    model: str
    """The served model's id; see `GET /v1/models`."""
    input: str | Strings | Ints | IntLists
    """Text, a list of texts, a list of token ids, or a list of lists of token ids; up to 2048."""
    encoding_format: Literal["float", "base64"] | None = None
    """`float` (the default): a list of numbers; `base64`: the bytes of little-endian fp32 in
    base64."""
    dimensions: Int | None = None
    """Number of leading values to keep, scaled to length 1 again. Default: all."""
    truncate_prompt_tokens: Int | None = None
    """Keep only this number of tokens at each input's end; -1: the maximum that fits (extension).
    """
    priority: Int | None = None
    """A 32-bit integer: waiting requests with lower values go first (extension)."""


class EmbeddingObject(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    """Index of the input, from 0."""
    embedding: list[float] | str


class EmbeddingsUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    object: Literal["list"] = "list"
    data: list[EmbeddingObject]
    """One for each input, in the same order."""
    model: str
    usage: EmbeddingsUsage
    system_fingerprint: str | None
    """Fingerprint of the workers that answered. Embeddings of different fingerprints cannot be
    compared."""
