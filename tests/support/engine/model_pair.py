"""A model folder in both implementations, this engine's and that of ``transformers``, in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.model_config import load_model_config
from engine.kv.kv_cache import KvCache
from engine.model.attention import attention_meta
from engine.model.model import DecoderModel, StepTokens
from engine.model.weights import load_weights
from engine.scheduling.plan import PlanRow

CPU = torch.device("cpu")
VOCAB = 120
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Pair:
    """One folder in both implementations."""

    reference: Any
    model: DecoderModel

    @torch.inference_mode()
    def expected(self, tokens: list[int]) -> torch.Tensor:
        """Logits of all positions, fp32 [tokens, VOCAB]."""
        logits: torch.Tensor = self.reference(torch.tensor([tokens]), use_cache=False).logits[0]
        return logits


def load(folder: Path) -> DecoderModel:
    return DecoderModel(load_model_config(folder), load_weights(folder, CPU, torch.float32), CPU)


def randomise(model: Any, offset: float = 0.0) -> None:
    """Give every weight, norms and biases too, random values, so that none can hide.

    Norms are near 1 once their family's ``offset`` is added.
    """
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0 - offset if "norm" in name else 0.0, 0.25)


def save_pair(reference: Any, folder: Path, shard: str = "1GB") -> Pair:
    """The pair, by way of the folder that ``transformers`` saves."""
    reference.save_pretrained(folder, max_shard_size=shard)
    return Pair(reference, load(folder))


def new_cache(pair: Pair, block_size: int, blocks: int = 64) -> KvCache:
    cache = KvCache(pair.model.config, blocks, block_size, torch.float32, CPU)
    # What others have left there must not matter.
    cache.data.fill_(50.0)
    return cache


@torch.inference_mode()
def compute(pair: Pair, cache: KvCache, rows: list[tuple[list[int], PlanRow]]) -> torch.Tensor:
    """Logits of every computed token; a row comes with all tokens of its sequence."""
    size = cache.block_size
    token_ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    for tokens, row in rows:
        span = range(row.start, row.start + row.count)
        token_ids += tokens[span.start : span.stop]
        positions += span
        blocks += [row.block_table[position // size] for position in span]
    where = torch.tensor(positions)
    meta = attention_meta(tuple(row for _, row in rows), size, CPU)
    batch = StepTokens(torch.tensor(token_ids), where, torch.tensor(blocks), where % size, meta)
    return pair.model.logits(pair.model.hidden_states(batch, cache))


def some_tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=generator).tolist()


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
