"""How one process of a router is told from the others that share its ports."""

from __future__ import annotations

ROUTER_HEADER = "x-baton-router"
"""Of an answer of /health: the number of the process that gave it."""
