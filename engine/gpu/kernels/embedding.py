"""Looks up the embeddings of tokens; the host may not know these tokens yet."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.gpu.kernels.launch import Launch, check_strides

_TILE = 1024


@triton.jit(do_not_specialize=["scale"])  # type: ignore[untyped-decorator]
def embed_kernel(  # type: ignore[no-untyped-def]
    token_ids, drawn, embedding, out, stride_embedding, hidden, scale, tile: tl.constexpr
):
    """Look up a tile of one token's embedding, and multiply it by ``scale``."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * tile + tl.arange(0, tile)
    token = tl.load(token_ids + row).to(tl.int64)
    if token < 0:
        token = tl.load(drawn - 1 - token)
    x = tl.load(embedding + token * stride_embedding + at, mask=at < hidden, other=0.0)
    tl.store(out + row * hidden + at, x.to(tl.float32) * scale, mask=at < hidden)


def embed(
    token_ids: torch.Tensor, drawn: torch.Tensor, embedding: torch.Tensor, scale: float
) -> torch.Tensor:
    """Look up the embeddings of tokens, multiplied by ``scale``: fp32 [tokens, hidden].

    ``token_ids`` int32 [tokens] has token ids. An id of -1 - n is a placeholder for entry n of
    ``drawn``, int64 [most]. ``embedding`` is [vocab, hidden] of any float type. Raises ValueError
    if types do not fit.
    """
    out = torch.empty(
        (len(token_ids), embedding.shape[1]), dtype=torch.float32, device=embedding.device
    )
    embed_launch(out, token_ids, drawn, embedding, scale).run()
    return out


def embed_launch(
    out: torch.Tensor,
    token_ids: torch.Tensor,
    drawn: torch.Tensor,
    embedding: torch.Tensor,
    scale: float,
) -> Launch:
    """Describe the kernel launch that computes ``embed`` into ``out``."""
    if token_ids.dtype != torch.int32 or drawn.dtype != torch.int64:
        raise ValueError("token_ids must be int32, and drawn must be int64")
    check_strides(embedding, "the embedding")
    hidden = embedding.shape[1]
    return Launch(
        embed_kernel,
        (len(token_ids), -(-hidden // _TILE)),
        {
            "token_ids": token_ids,
            "drawn": drawn,
            "embedding": embedding,
            "out": out,
            "stride_embedding": embedding.stride(0),
            "hidden": hidden,
            "scale": scale,
        },
        {"tile": _TILE},
    )


def known_tokens(token_ids: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Replace the placeholders in ``token_ids`` of ``embed`` by the tokens in ``drawn``, in plain
    torch: int64 [tokens]."""
    ids = token_ids.long()
    return torch.where(ids < 0, drawn[(-1 - ids).clamp(min=0)], ids)
