"""Parameters of draws on a GPU, and the choice of the tokens that a draw may take.

The parameters of a sequence's draws are the same at each step; only the position changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from baton.sampling_params import SamplingParams
from engine.sampling.noise import noise_keys_of


@dataclass(frozen=True, slots=True)
class Draw:
    """Parameters of a sequence's draws from unchanged logits, that is, without penalties or
    biases."""

    temperature: float
    """Sampling temperature; 0 takes the most likely token."""
    seed: int
    """Seed of the noise, 64 bits."""
    choice: int
    """Number of the sequence within its request, another input of the noise."""
    top_k: int
    """Only this number of most likely tokens may be drawn; 0 means that all tokens may be drawn."""
    top_p: float
    min_p: float

    @property
    def limited(self) -> bool:
        """Whether top_k, top_p or min_p exclude some tokens."""
        return bool(self.temperature) and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


GREEDY = Draw(0.0, 0, 0, 0, 1.0, 0.0)


def draw_of(sampling: SamplingParams, choice: int) -> Draw:
    """Make the GPU's draw of a sequence whose logits are used unchanged (``SampleRow.plain``)."""
    if sampling.greedy:
        return GREEDY
    limits = sampling.top_k, sampling.top_p, sampling.min_p
    return Draw(sampling.temperature, sampling.seed, choice, *limits)


class DrawArrays:
    """The draws of a step as arrays. The next step uses them again if it has the same draws."""

    def __init__(self, draws: Sequence[Draw]) -> None:
        self.draws = list(draws)
        self.temperatures = np.array([draw.temperature for draw in draws], dtype=np.float32)
        self.limited = [number for number, draw in enumerate(draws) if draw.limited]
        """Indexes of the draws that may not take all tokens."""
        self._seeds = np.array([draw.seed for draw in draws], dtype=np.uint64)
        self._choices = np.array([draw.choice for draw in draws], dtype=np.int64)

    def keys(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Compute the noise keys of each draw, int64 [draws, 2]. ``positions`` are those of the
        drawn tokens in their sequences, [draws]."""
        return noise_keys_of(self._seeds, self._choices, positions)


def keep_allowed(logits: torch.Tensor, draws: DrawArrays) -> torch.Tensor:
    """Set logits, fp32 [rows, vocab], to -inf for each token that its draw may not take.

    Which tokens a draw may take is defined by ``engine.sampling.sampling``. This function does it
    for all rows at once, and the host does not wait for the GPU.
    """
    if not draws.limited:
        return logits
    limited = [draws.draws[n] for n in draws.limited]
    rows = _on_device(torch.tensor(draws.limited), logits.device)
    taken = logits[rows]
    allowed = _allowed(taken, _limits(limited, taken))
    return logits.index_copy(0, rows, taken.masked_fill(~allowed, -torch.inf))


def _limits(draws: Sequence[Draw], logits: torch.Tensor) -> torch.Tensor:
    """Make the tensor of the draws' limits, fp32 [4, rows, 1]: temperature, number of allowed
    tokens, top_p, and logarithm of min_p."""
    vocab = logits.shape[1]
    rows = [
        [draw.temperature for draw in draws],
        # Up to 2^24 a rank is exact in fp32.
        [draw.top_k if 0 < draw.top_k < vocab else vocab for draw in draws],
        [draw.top_p for draw in draws],
        [draw.min_p for draw in draws],
    ]
    limits = torch.tensor(rows, dtype=torch.float32)
    limits[3].log_()
    return _on_device(limits, logits.device)[:, :, None]


def _allowed(logits: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """Compute which tokens each row may draw: bool [rows, vocab]."""
    temperatures, ranks, top_p, log_min_p = limits
    scores = logits / temperatures
    # A stable sort: on equal scores the lower id comes first, as in a greedy draw.
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    kept = rank < ranks
    probabilities = ordered.masked_fill(~kept, -torch.inf).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    counts = ((before < top_p) & kept).sum(dim=-1, keepdim=True).clamp(min=1)
    # If top_p is 1, rounding of the sum must not drop a token.
    kept &= (rank < counts) | (top_p >= 1.0)
    near = ~(ordered < ordered[:, :1] + log_min_p)
    return torch.zeros_like(kept).scatter(1, order, kept & near)


def _on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to the device; the host does not wait for the copy."""
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
