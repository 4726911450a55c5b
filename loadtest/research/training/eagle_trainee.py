"""An EAGLE-3 head during training, in plain torch with gradients (Li et al., EAGLE-3, 2025).

An input row is a token and the target's feature of the token before it. The output predicts the
next token. After drafted tokens there is no such feature, and the head's own output takes its
place. The head learns both cases by ``training-time test``: each pass uses the output of the pass
before it, shifted by one row, as its features. Attention to earlier rows uses the values of those
passes in which drafting would compute them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn

from engine.checkpoint.model_config import ModelConfig
from engine.model.rope import rope_table

FEATURE_LAYERS = 3


class Norm(nn.Module):
    """Root mean square norm, in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class EagleTrainee(nn.Module):
    """The trainable EAGLE-3 head. Its tensors have the names of published checkpoints."""

    def __init__(self, config: ModelConfig, draft_vocab: int) -> None:
        """``config`` is the target's configuration. The head's layer has the same shape as the
        target's.
        """
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.fc = nn.Linear(FEATURE_LAYERS * hidden, hidden, bias=False)
        self.midlayer = _Layer(config)
        self.norm = Norm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, draft_vocab, bias=False)
        table = rope_table(config.ropes[0], config.context_length, torch.device("cpu"))
        self.register_buffer("rope", table, persistent=False)

    def forward(
        self, embedded: torch.Tensor, features: torch.Tensor, passes: int
    ) -> list[torch.Tensor]:
        """Return the logits of each pass, [rows, length, draft_vocab] each.

        ``embedded`` is [rows, length, hidden_size]. ``features`` is [rows, length, 3 *
        hidden_size]: the target's features of the previous token, or zeros if there is none.
        """
        feature = self.fc(features)
        before: list[tuple[torch.Tensor, torch.Tensor]] = []
        found = []
        for _ in range(passes):
            output = self.midlayer(embedded, feature, self.rope, before)
            found.append(self.lm_head(self.norm(output)))
            feature = F.pad(output, (0, 0, 1, 0))[:, :-1]
        return found


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = Norm(hidden, eps)
        self.hidden_norm = Norm(hidden, eps)
        self.post_attention_layernorm = Norm(hidden, eps)
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(hidden, config.intermediate_size)

    def forward(
        self,
        embedded: torch.Tensor,
        feature: torch.Tensor,
        rope: torch.Tensor,
        before: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(feature)), dim=-1)
        x = feature + self.self_attn(both, rope, before)
        found: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return found


class _Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = config.heads, config.kv_heads, config.head_dim
        hidden = config.hidden_size
        self.q_proj = nn.Linear(2 * hidden, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, hidden, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        rope: torch.Tensor,
        before: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Run the head's layer for one pass.

        ``before`` has the keys and values of earlier passes. The keys and values of this pass are
        appended to ``before``.
        """
        rows, length, _ = x.shape
        query = _rotate(self.q_proj(x).view(rows, length, -1, self.dim), rope)
        key = _rotate(self.k_proj(x).view(rows, length, -1, self.dim), rope)
        value = self.v_proj(x).view(rows, length, -1, self.dim)
        before.append((key, value))
        # Shape: [rows, kv_heads, group, length, dim]
        query = query.view(rows, length, self.kv_heads, -1, self.dim).permute(0, 2, 3, 1, 4)
        weights = torch.cat(self._scores(query, before), dim=-1).float().softmax(dim=-1)
        mixed = self._mix(weights.to(value.dtype), before, length)
        found: torch.Tensor = self.o_proj(mixed.permute(0, 3, 1, 2, 4).reshape(rows, length, -1))
        return found

    def _scores(
        self, query: torch.Tensor, before: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Return attention scores: first those to the rows of the first pass, up to ``passes - 1``
        before, then those to one row of each later pass."""
        length, late = query.shape[3], len(before) - 1
        query = query * self.dim**-0.5
        keys = before[0][0].permute(0, 2, 3, 1).unsqueeze(2)
        seen = torch.ones(length, length, dtype=torch.bool).tril(-late)
        found = [(query @ keys).masked_fill(~seen, float("-inf"))]
        for number in range(1, len(before)):
            keys = _shifted(before[number][0], late - number)
            found.append((query * keys).sum(dim=-1, keepdim=True))
        return found

    def _mix(
        self,
        weights: torch.Tensor,
        before: list[tuple[torch.Tensor, torch.Tensor]],
        length: int,
    ) -> torch.Tensor:
        late = len(before) - 1
        mixed = weights[..., :length] @ before[0][1].transpose(1, 2).unsqueeze(2)
        for number in range(1, len(before)):
            weight = weights[..., length + number - 1 : length + number]
            mixed = mixed + weight * _shifted(before[number][1], late - number)
        return mixed


def _shifted(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Reshape [rows, length, heads, dim] to [rows, heads, 1, length, dim], delayed by ``rows``
    rows."""
    if rows:
        x = F.pad(x, (0, 0, 0, 0, rows, 0))[:, :-rows]
    return x.transpose(1, 2).unsqueeze(2)


def _rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotate x [rows, length, heads, dim] by its positions, which begin at 0."""
    cosine, sine = rope[: x.shape[1]].unbind(dim=1)
    cosine, sine = cosine[None, :, None], sine[None, :, None]
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.to(x.dtype)
