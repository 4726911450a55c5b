"""Where the tests of the GPU kernels' numerics run."""

from __future__ import annotations

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

BFLOAT16 = 2.0**-7
"""An interpreted kernel cuts fp32 off to bf16, where a GPU rounds: a unit of the last place."""

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Of attention over values of about 1, relative and absolute."""
