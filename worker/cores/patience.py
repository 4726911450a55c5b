"""How long prompts may keep a host's cores before decode pauses for them: see
``worker.cores.cores``."""

from __future__ import annotations

PATIENCE_S = 0.15
"""How long prefill computes without a break before decode pauses for it."""
BREAK_S = 0.005
"""Less than that between two steps is no break."""
