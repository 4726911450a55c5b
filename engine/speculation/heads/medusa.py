"""Medusa heads draft several tokens at once: chains, no trees.

Each head (Cai et al., Medusa, 2024; with a frozen target: Medusa-1) takes the target's last hidden
state, normed, from which the last token was drawn. The first head predicts the token after the last
one, the second head the token after that, and so on. A head consists of blocks ``x + silu(W x +
b)`` and a matrix to the vocabulary. The drafter has no KV and no other state. A handoff costs only
one step without a draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from baton.config_fields import ConfigFields
from baton.errors import ConfigError
from engine.checkpoint.model_config import ModelConfig
from engine.cpu.library import CoreShare
from engine.model.layers import Linear
from engine.model.model import DecoderModel
from engine.model.named_tensors import Matrix, NamedTensors
from engine.sampling.sampling import draw_of
from engine.scheduling.plan import PlanRow
from engine.speculation.model_drafter import ComputedRow, DraftDraws, DraftQuery, Sampler


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """The number and shape of the Medusa heads of a target."""

    heads: int
    blocks: int
    """Number of residual blocks in each head."""
    hidden_size: int
    vocab_size: int
    truncated_vocab_size: int
    """Number of tokens in the vocabulary from which the heads draft."""


def load_medusa_config(folder: Path, target: ModelConfig) -> MedusaConfig:
    """Read the ``config.json`` of Medusa heads that were trained for ``target``.

    Field names are accepted as in the authors' checkpoints (``medusa_num_heads``) and as in vLLM's
    (``num_heads``, ``model_type`` medusa).

    Raises ConfigError if ``folder`` has no Medusa heads, or heads of another target.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no config.json: it holds no Medusa heads")
    fields = ConfigFields.read(path)
    if fields.get("medusa_num_heads") is not None:
        heads, blocks = fields.size("medusa_num_heads"), fields.size("medusa_num_layers", 1)
    elif fields.get("model_type") == "medusa":
        heads, blocks = fields.size("num_heads"), fields.size("num_hidden_layers", 1)
    else:
        raise ConfigError(
            f"{path}: these are not Medusa heads: there is neither medusa_num_heads nor model_type"
            " medusa"
        )
    for name, wanted in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        found = fields.size(name, wanted)
        if found != wanted:
            raise ConfigError(
                f"{path}: {name} is {found}, and the target's is {wanted}: the heads were trained"
                " for another model"
            )
    truncated = fields.size("truncated_vocab_size", target.vocab_size)
    if truncated > target.vocab_size:
        raise ConfigError(
            f"{path}: truncated_vocab_size {truncated} is more than vocab_size {target.vocab_size}"
        )
    return MedusaConfig(heads, blocks, target.hidden_size, target.vocab_size, truncated)


class MedusaModel:
    """The Medusa heads of a target, in plain torch. Holds no state except its weights."""

    def __init__(
        self, config: MedusaConfig, weights: Mapping[str, Matrix], target: DecoderModel
    ) -> None:
        """Raises ConfigError if a tensor of the heads is missing or has the wrong shape."""
        tensors = NamedTensors(_plain_names(config, weights))
        hidden = config.hidden_size
        self.token_ids = _token_ids(config, weights)
        """int64 [truncated_vocab_size]: the target's ids of the tokens that the heads can draft."""
        self.dtype = target.dtype
        self._norm, self._eps = target.norm, target.config.rms_norm_eps
        self._heads = [
            (
                [
                    tensors.linear(f"{head}.{block}", hidden, hidden)
                    for block in range(config.blocks)
                ],
                _head(config, tensors, head),
            )
            for head in range(config.heads)
        ]

    @property
    def heads(self) -> int:
        return len(self._heads)

    def logits(self, hidden: torch.Tensor, heads: int) -> torch.Tensor:
        """Compute the logits of the first ``heads`` heads: fp32 [heads, rows,
        truncated_vocab_size].

        ``hidden`` is fp32 [rows, hidden_size], the output of the target's last layer.
        """
        first = F.rms_norm(hidden, (hidden.shape[-1],), self._norm, self._eps).to(self.dtype)
        found = []
        for blocks, head in self._heads[:heads]:
            x = first
            for block in blocks:
                x = x + F.silu(block(x))
            found.append(head.to_float(x))
        return torch.stack(found)


def _plain_names(config: MedusaConfig, weights: Mapping[str, Matrix]) -> dict[str, Matrix]:
    """Rename weights of either naming to ``<head>.<block>.weight`` and ``<head>.head.weight``."""
    names: dict[str, str] = {}
    for head in range(config.heads):
        for block in range(config.blocks):
            for part in ("weight", "bias"):
                plain = f"{head}.{block}.{part}"
                names[f"{head}.{block}.linear.{part}"] = plain
                names[f"blocks.{head}.layers.{block}.{part}"] = plain
        names[f"{head}.{config.blocks}.weight"] = f"{head}.head.weight"
        names[f"lm_heads.{head}.weight"] = f"{head}.head.weight"
    stripped = {
        name.removeprefix("medusa_heads.").removeprefix("medusa_head."): weight
        for name, weight in weights.items()
    }
    return {names[name]: weight for name, weight in stripped.items() if name in names}


def _head(config: MedusaConfig, tensors: NamedTensors, head: int) -> Linear:
    # All heads share the first one's matrix if the checkpoint has only that one.
    name = f"{head}.head" if f"{head}.head.weight" in tensors else "0.head"
    return tensors.linear(name, config.truncated_vocab_size, config.hidden_size)


def _token_ids(config: MedusaConfig, weights: Mapping[str, Matrix]) -> torch.Tensor:
    count = config.truncated_vocab_size
    found = weights.get("token_map", weights.get("medusa_heads.token_map"))
    if found is None:
        if count != config.vocab_size:
            raise ConfigError(
                f"the Medusa heads draft {count} tokens of {config.vocab_size} and have no"
                " token_map"
            )
        return torch.arange(count)
    if not isinstance(found, torch.Tensor) or found.shape != (count,) or found.is_floating_point():
        raise ConfigError(f"the Medusa heads' token_map must have {count} integers")
    token_ids = found.cpu().long()
    if not 0 <= int(token_ids.min()) <= int(token_ids.max()) < config.vocab_size:
        raise ConfigError(
            "the Medusa heads' token_map contains tokens that the target does not have"
        )
    return token_ids


_MAX_DECODED = 16
"""Maximum tokens of a row that decodes; it is above 1 + ``MAX_DRAFT_TOKENS``. A longer row is a
chunk of a prompt."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """Output of the target's last layer for the second to last token of a sequence. The sequence's
    last token was drawn from this output."""

    position: int
    hidden: torch.Tensor
    """The last layer's output, fp32 [hidden_size]."""


class MedusaDrafter:
    """Drafts several tokens at once with Medusa heads. Implements ``ModelDrafter``. Owned by the
    engine thread."""

    name = "medusa"

    def __init__(
        self,
        model: MedusaModel,
        layers: int,
        vocab_size: int,
        sampler: Sampler,
    ) -> None:
        """``layers`` and ``vocab_size`` are the target's numbers of layers and tokens."""
        self._model = model
        self._layers = (layers,)
        self._draws = DraftDraws(model.token_ids, vocab_size, sampler)
        self._seen: dict[int, _Seen] = {}
        self._prompts = False

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Number of the target's last output, which ``computed`` needs; empty for a step with
        prompts.

        In a step with prompts, the target would return this output for all tokens of the prompts,
        and only their last tokens need it.
        """
        return () if self._prompts else self._layers

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of a draft: one for each head."""
        return self._model.heads

    def backlog(self, query: DraftQuery) -> int | None:
        """Return 0 if the drafter can draft for a sequence, None if it cannot. There is never a
        backlog."""
        seen = self._seen.get(query.row.sequence_id)
        return 0 if seen is not None and seen.position == query.row.start - 1 else None

    def catch_up(self, query: DraftQuery, most: int) -> None:
        """Do nothing: Medusa heads have no backlog."""

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        """Draft tokens for each query, all with one pass of the heads."""
        hidden = torch.stack([self._seen[query.row.sequence_id].hidden for query in queries])
        most = max(query.most for query in queries)
        drafts: list[list[int]] = [[] for _ in queries]
        for logits in self._model.logits(hidden, most):
            draws = [
                draw_of(query.known, [*query.known.token_ids, *draft])
                for query, draft in zip(queries, drafts, strict=True)
            ]
            for draft, token in zip(drafts, self._draws.draw(logits, draws), strict=True):
                draft.append(token)
        return [draft[: query.most] for draft, query in zip(drafts, queries, strict=True)]

    def begin(self, rows: Sequence[PlanRow]) -> None:
        """Prepare for a step: record whether the step has prompts."""
        self._prompts = any(not row.sample or row.count > _MAX_DECODED for row in rows)

    def computed(
        self, rows: Sequence[ComputedRow], hidden: torch.Tensor | None, *, prompts: bool
    ) -> int:
        """Keep the last layer's output for each sequence. Returns 0, because no tokens are
        processed."""
        for found in rows:
            row = found.row
            if hidden is None or not row.sample:
                self._seen.pop(row.sequence_id, None)
                continue
            last = found.right - 1
            state = hidden[found.first + last, 0].clone()
            self._seen[row.sequence_id] = _Seen(row.start + last, state)
        return 0

    def forget(self, sequence_id: int) -> None:
        """Drop the state of a sequence; an unknown one is ignored."""
        self._seen.pop(sequence_id, None)

    def use_threads(self, threads: int) -> None:
        """Do nothing: torch computes the heads with its own threads."""

    def share_cores(self, share: CoreShare) -> None:
        """Do nothing: torch computes the heads, and shares no cores."""
