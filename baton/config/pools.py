"""Pools of workers, and the context-length classes of the requests that they serve."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from baton.config.choices import Device, RankPlacement, Role
from baton.config.fields import Section


class PoolConfig(Section):
    """A set of workers with one configuration."""

    name: str
    """Unique name of the pool; its workers are called ``<name>-<number>``."""
    role: Role
    """Role in which its workers start."""
    count: int = Field(default=1, ge=0, le=1024)
    """Number of workers. A prefill pool may start with 0, and grow by ``baton scale``."""
    tp: int = Field(default=1, ge=1, le=64)
    """Tensor parallelism: number of ranks of each worker, each a process with a GPU, that share the
    model's weights."""
    cp: int = Field(default=1, ge=1, le=64)
    """Context parallelism of prefill workers: number of ranks of each worker that share the tokens
    of long prompts. Each rank has all weights and all KV. It excludes ``tp``."""
    rank_placement: RankPlacement = "strict_pack"
    """Where Ray places the ranks of a worker: on one node (strict_pack), on few nodes (pack), on
    many (spread), or each on a different node (strict_spread). Without Ray, any other than
    strict_pack means the pods of a LeaderWorkerSet."""
    threads: int = Field(default=0, ge=0, le=1024)
    """Compute threads of each rank on a CPU; 0 divides the machine's cores among the workers, and
    assigns them again for each step, to decode workers first."""
    device: Device = "auto"
    """Device that runs the model; ``auto`` takes a GPU if there is one."""
    kv_pool_mib: int = Field(default=1024, ge=1)
    """Memory for the KV blocks of each worker on a CPU, in MiB. The ranks of a worker divide it.
    With ``cp`` each rank holds all blocks, so that fewer fit."""
    gpu_memory_fraction: float = Field(default=0.9, gt=0, le=1)
    """Fraction of a GPU's memory that the workers on it use together."""
    max_sequences: int = Field(default=64, ge=1, le=4096)
    """Maximum number of sequences in one step of a worker."""
    chunk_tokens: int = Field(default=0, ge=0)
    """Maximum number of prompt tokens in one step of a worker; 0 takes 512 on a CPU and 8192 on a
    GPU. With ``cp`` a step takes ``cp`` times as many."""
    block_size: int = Field(default=0, ge=0, le=1024)
    """Tokens in a KV block of this pool, a multiple of the cluster's ``block_size``; 0 takes the
    cluster's. Workers convert blocks that they send to a pool with another size."""
    kv_dtype: Literal["", "float32", "bfloat16", "float16", "int8", "fp8"] = ""
    """Type of the KV cache of this pool; empty takes the cluster's. Workers convert blocks as they
    do for other sizes. On a CPU, caches in float32 and float16 are slow."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Ray resources that each rank of a worker needs, in addition to one ``baton_worker``."""
    peak_gflops: float = Field(default=0.0, ge=0)
    """Peak rate of matrix products on a rank's device, in GFLOP/s of the type of the weights; 0 is
    unknown. ``baton profile`` measures it. With ``peak_gb_per_s`` it adds MFU and MBU to the
    metrics."""
    peak_gb_per_s: float = Field(default=0.0, ge=0)
    """Peak memory bandwidth of a rank's device, in GB per second; 0 is unknown. ``baton profile``
    measures it."""
    price_per_hour: float = Field(default=0.0, ge=0)
    """Price of one worker per hour, in the same currency for all pools; 0 is unknown. The metric of
    the cost per million tokens uses it."""

    @property
    def ranks(self) -> int:
        """Number of ranks of each worker."""
        return self.tp * self.cp

    @model_validator(mode="after")
    def _steps_have_room_for_all_sequences(self) -> PoolConfig:
        if 0 < self.chunk_tokens < self.max_sequences:
            raise ValueError("chunk_tokens must be 0 or at least max_sequences")
        return self

    @model_validator(mode="after")
    def _decode_pools_have_workers(self) -> PoolConfig:
        if self.role == "decode" and not self.count:
            raise ValueError("count must be at least 1 in a decode pool")
        return self

    @model_validator(mode="after")
    def _both_peaks_or_none(self) -> PoolConfig:
        if bool(self.peak_gflops) != bool(self.peak_gb_per_s):
            raise ValueError("peak_gflops and peak_gb_per_s go together")
        return self


class ContextClass(Section):
    """A context-length class: a name for requests with prompts of about one length."""

    name: str
    """Name of the class in metrics and logs."""
    max_tokens: int | None = None
    """Maximum number of prompt tokens of the class; the last class, and no other, has no maximum.
    """
    local_prefill: Literal["", "auto", "never", "always"] = ""
    """Whether decode workers compute prompts of this class; empty takes the cluster's
    ``local_prefill``. With ``never`` the class needs a prefill worker."""
    pools: tuple[str, ...] = ()
    """Names of pools that are reserved for this class and for other classes that name them. The
    class uses no other pools of their roles."""
    slo_ttft_s: float | None = Field(default=None, gt=0)
    """Maximum time to the first token that counts as good in this class, in seconds; without a
    value it is the cluster's ``slo_ttft_s``."""


def default_pools() -> tuple[PoolConfig, ...]:
    """The pools of a configuration without any: one worker of each role."""
    return (
        PoolConfig(name="prefill", role="prefill"),
        PoolConfig(name="decode", role="decode"),
    )


def default_classes() -> tuple[ContextClass, ...]:
    """The classes of a configuration without any."""
    return (
        ContextClass(name="short", max_tokens=512),
        ContextClass(name="medium", max_tokens=4096),
        ContextClass(name="long"),
    )
