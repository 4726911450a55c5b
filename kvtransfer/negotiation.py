"""Which transport a pair takes."""

from __future__ import annotations

TRANSPORTS = ("cuda_ipc", "shm", "nixl", "nccl", "grpc", "gloo")
"""By preference."""
