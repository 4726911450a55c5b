"""How the autoscaler changes the roles of workers and the sizes of pools."""

from __future__ import annotations

from pydantic import Field, model_validator

from baton.config.fields import Section


class AutoscalerConfig(Section):
    """How roles and pool sizes follow the traffic; docs/how-to/tune/autoscaler.md."""

    enabled: bool = False
    """Change the roles of workers and the sizes of pools as the traffic changes."""
    dry_run: bool = False
    """Only log and count the changes that the autoscaler would make."""
    interval_s: float = Field(default=10.0, ge=0.5, le=3600)
    """Time between two decisions, in seconds."""
    cooldown_s: float = Field(default=60.0, gt=0, le=86400)
    """Time before a change may be reversed, and over which SLOs are judged, in seconds."""
    target_load: float = Field(default=0.8, gt=0, le=1)
    """Fraction of a worker's capacity within the SLOs that the autoscaler plans to use."""
    min_prefill: int = Field(default=1, ge=0, le=1024)
    """Minimum number of prefill workers. With 0, decode workers may take over all prompts."""
    max_prefill: int = Field(default=0, ge=0, le=1024)
    """Maximum number of prefill workers; 0 leaves the bound to ``max_workers``."""
    min_decode: int = Field(default=1, ge=1, le=1024)
    """Minimum number of decode workers."""
    max_decode: int = Field(default=0, ge=0, le=1024)
    """Maximum number of decode workers; 0 leaves the bound to ``max_workers``."""
    min_workers: int = Field(default=0, ge=0, le=2048)
    """Minimum number of workers in total; 0 takes the total of the pools, so that none is removed.
    """
    max_workers: int = Field(default=0, ge=0, le=2048)
    """Maximum number of workers in total; 0 takes the total of the pools, so that none is added."""

    @model_validator(mode="after")
    def _bounds_do_not_contradict(self) -> AutoscalerConfig:
        for role, low, high in (
            ("prefill", self.min_prefill, self.max_prefill),
            ("decode", self.min_decode, self.max_decode),
            ("workers", self.min_workers, self.max_workers),
        ):
            if 0 < high < low:
                raise ValueError(f"max_{role} must be 0 or at least min_{role}")
        if 0 < self.max_workers < self.min_prefill + self.min_decode:
            raise ValueError("max_workers must be 0 or at least min_prefill + min_decode")
        if 0 < self.max_prefill + self.max_decode < self.min_workers and (
            self.max_prefill and self.max_decode
        ):
            raise ValueError("min_workers must be at most max_prefill + max_decode")
        return self
