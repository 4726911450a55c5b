"""The configuration: flags override the environment (``BATON_…``), which overrides a TOML file."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from baton.config.errors import fault_lines
from baton.config.sources import Flag, Sources
from baton.errors import ConfigError
from baton.security.tls import PeerRole, TlsFiles

Role = Literal["prefill", "decode"]
TransportName = Literal["auto", "shm", "grpc", "gloo", "nccl", "cuda_ipc", "nixl"]
LocalPrefill = Literal["auto", "never", "always"]
PolicyName = Literal[
    "predictive", "round_robin", "least_loaded", "prefix", "power_of_two", "session"
]
ToolParserName = Literal["auto", "hermes", "llama3", "smollm", "mistral", "mistral_args"]
KvTypeName = Literal["float32", "bfloat16", "float16", "int8", "fp8"]
Scope = Literal["inference", "metrics", "admin"]
MIB = 1 << 20
DEFAULT_TENANT = "default"
"""The tenant of whoever belongs to no other."""
_NAME = r"^[A-Za-z0-9._-]{1,64}$"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
_KV_TYPES: tuple[KvTypeName, ...] = ("float32", "bfloat16", "float16", "int8", "fp8")
"""The most precise first. Neither of the 16-bit types holds the other's values; their order must
only be the same everywhere."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


_RANKS_TRANSPORTS = ("auto", "shm", "grpc")
"""What carries the heads that ranks share."""


class PoolConfig(_Section):
    """Some workers that are alike."""

    name: str
    """Unique name of the pool; its workers are called ``<name>-<number>``."""
    role: Role
    """Role in which its workers start."""
    count: int = Field(default=1, ge=1, le=1024)
    """Number of workers."""
    tp: int = Field(default=1, ge=1, le=64)
    """Tensor parallelism: number of ranks of each worker, a process and a GPU each, over which its
    model is divided."""
    cp: int = Field(default=1, ge=1, le=64)
    """Context parallelism of prefill workers: number of ranks, each with all weights, over which a
    worker divides long prompts. Each rank has all KV, too. Not together with ``tp``."""
    rank_placement: Literal["strict_pack", "pack", "spread", "strict_spread"] = "strict_pack"
    """Where Ray places a worker's ranks: all on one node (strict_pack), on few (pack), on many
    (spread), or each on another one (strict_spread)."""
    threads: int = Field(default=0, ge=0, le=1024)
    """Compute threads of each rank on a CPU; 0 shares the machine's cores among the workers. They
    are then shared step by step, decode first."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; ``auto`` takes a GPU where there is one."""
    kv_pool_mib: int = Field(default=1024, ge=1)
    """Memory for each worker's KV blocks on a CPU, in MiB. The ranks of a worker divide it. With
    ``cp`` each rank has all blocks, so that there are fewer."""
    gpu_memory_fraction: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that its workers take together."""
    max_sequences: int = Field(default=64, ge=1, le=4096)
    """Maximum number of sequences in one step of a worker."""
    chunk_tokens: int = Field(default=0, ge=0)
    """Maximum number of prompt tokens in one step of a worker; 0 takes 512 on a CPU and 8192 on a
    GPU. It takes ``cp`` times as many where ranks divide them."""
    block_size: int = Field(default=0, ge=0, le=1024)
    """Tokens in a KV block of its workers, a multiple of the cluster's ``block_size``; 0 takes
    that. Workers convert the blocks that they send to a pool of another size."""
    kv_dtype: Literal["", "float32", "bfloat16", "float16", "int8", "fp8"] = ""
    """Type of its workers' KV cache; empty takes the cluster's. Workers convert blocks as they do
    for other sizes. On a CPU torch computes with caches in float32 and float16, which is slow."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Ray resources that each rank of a worker asks for, beside one ``baton_worker``."""
    peak_gflops: float = Field(default=0.0, ge=0)
    """Peak speed of a rank's device, in GFLOP/s of the type in which it multiplies weights; 0 is
    unknown. ``baton profile`` measures it. With ``peak_gb_per_s`` the metrics have MFU and MBU."""
    peak_gb_per_s: float = Field(default=0.0, ge=0)
    """Peak memory bandwidth of the device, in GB per second; ``baton profile`` measures it, too."""
    price_per_hour: float = Field(default=0.0, ge=0)
    """Price of a worker for an hour, in one currency for all pools, for the metric of cost per
    million tokens; 0 is unknown."""

    @property
    def ranks(self) -> int:
        """Of each worker."""
        return self.tp * self.cp

    @model_validator(mode="after")
    def _every_sequence_may_step(self) -> PoolConfig:
        if 0 < self.chunk_tokens < self.max_sequences:
            raise ValueError("chunk_tokens must be 0 or at least max_sequences")
        return self

    @model_validator(mode="after")
    def _both_peaks_or_none(self) -> PoolConfig:
        if bool(self.peak_gflops) != bool(self.peak_gb_per_s):
            raise ValueError("peak_gflops and peak_gb_per_s go together")
        return self


class ContextClass(_Section):
    """A context-length class: a name for requests of about one size."""

    name: str
    """Its name in metrics and logs."""
    max_tokens: int | None = None
    """Prompts up to this many tokens belong to it; None, for the last class alone, is unbounded."""
    local_prefill: Literal["", "auto", "never", "always"] = ""
    """Whether decode workers compute its prompts; empty takes the cluster's."""
    pools: tuple[str, ...] = ()
    """Names of the pools that it owns: of a role in which it owns one, their workers alone serve
    it, and they serve nobody else but classes that name the same pool."""
    slo_ttft_s: float | None = Field(default=None, gt=0)
    """The time to the first token that counts as good in this class, in seconds; None takes the
    cluster's ``slo_ttft_s``."""


class TenantConfig(_Section):
    """On whose behalf requests run: tenants share the cluster by their weights."""

    name: str = Field(pattern=_NAME)
    """Its name in metrics and of its prefix cache, which no other tenant shares."""
    weight: float = Field(default=1.0, ge=0.001, le=1000)
    """Its share of the tokens, against the weights of other tenants that wait at the same time."""


class KeyConfig(_Section):
    """An API key: whose it is, and what it may use."""

    name: str = Field(pattern=_NAME)
    """Its public name, for metrics and logs."""
    sha256: str = Field(default="", pattern="^([0-9a-f]{64})?$")
    """The SHA-256 of the key, in hexadecimal digits; empty, in one entry at most, stands for
    requests that show no known key."""
    tenant: str = DEFAULT_TENANT
    """The name of its tenant."""
    priority: int = Field(default=0, ge=-(1 << 31), lt=1 << 31)
    """Of requests that give none: lower ones come earlier among those of their tenant."""
    requests_per_minute: int = Field(default=0, ge=0)
    """Most requests in a minute, over all routers; 0 is unlimited."""
    tokens_per_minute: int = Field(default=0, ge=0)
    """Most tokens in a minute, of prompts and answers, over all routers; 0 is unlimited."""
    concurrency: int = Field(default=0, ge=0)
    """Most requests at a time, over all routers; 0 is unlimited."""
    scopes: tuple[Scope, ...] = Field(default=("inference",), min_length=1)
    """What it may do: ask the model, with files and batches (``inference``); read metrics and the
    console (``metrics``); all of that, and tell the cluster what to do (``admin``)."""
    expires_at: AwareDatetime | None = None
    """When it ends, with its time zone; None: never."""

    @field_validator("tenant")
    @classmethod
    def _tenant_has_a_name(cls, tenant: str) -> str:
        # Without one its prompts would share the cache of another tenant.
        if not re.fullmatch(_NAME, tenant):
            raise ValueError(
                f"a tenant's name is 1 to 64 letters, digits, dots, dashes and underscores, not"
                f" {tenant!r}; leave it out for the tenant {DEFAULT_TENANT}"
            )
        return tenant

    def allows(self, scope: Scope) -> bool:
        """Whether it may do what ``scope`` stands for."""
        return scope in self.scopes or "admin" in self.scopes

    @property
    def limited(self) -> bool:
        """Whether anything of it is to be counted."""
        return bool(self.requests_per_minute or self.tokens_per_minute or self.concurrency)


class AutoscalerConfig(_Section):
    """How roles and the pools' sizes follow the traffic."""

    enabled: bool = False
    """Whether the supervisor changes roles and pool sizes; docs/autoscaler.md says how."""
    dry_run: bool = False
    """Whether it only logs and counts what it would do."""
    interval_s: float = Field(default=10.0, ge=0.5, le=3600)
    """How often it looks, in seconds."""
    cooldown_s: float = Field(default=60.0, gt=0, le=86400)
    """Nothing that it has done is taken back for this many seconds, and SLOs are judged over so
    many."""
    target_load: float = Field(default=0.8, gt=0, le=1)
    """Share of what a worker can do within the SLOs that it is planned to do."""
    hysteresis: float = Field(default=0.15, ge=0, lt=1)
    """A role gives a worker away only where its load stays below 1 minus this, or where the higher
    load of the two roles falls by this share at least."""
    slo_share: float = Field(default=0.95, gt=0, lt=1)
    """Share of the requests that are to meet each SLO; where fewer do, a role gets one more
    worker."""
    min_prefill: int = Field(default=1, ge=1, le=1024)
    """Fewest workers in the prefill role."""
    max_prefill: int = Field(default=0, ge=0, le=1024)
    """Most workers in the prefill role; 0 is bounded by ``max_workers`` alone."""
    min_decode: int = Field(default=1, ge=1, le=1024)
    """Fewest workers in the decode role."""
    max_decode: int = Field(default=0, ge=0, le=1024)
    """Most workers in the decode role; 0 is bounded by ``max_workers`` alone."""
    min_workers: int = Field(default=0, ge=0, le=2048)
    """Fewest workers in all; 0 takes as many as the pools have: then none is drained."""
    max_workers: int = Field(default=0, ge=0, le=2048)
    """Most workers in all; 0 takes as many as the pools have: then none is started."""

    @model_validator(mode="after")
    def _bounds_leave_something(self) -> AutoscalerConfig:
        for role, least, most in (
            ("prefill", self.min_prefill, self.max_prefill),
            ("decode", self.min_decode, self.max_decode),
            ("workers", self.min_workers, self.max_workers),
        ):
            if 0 < most < least:
                raise ValueError(f"most_{role} must be 0 or at least least_{role}")
        if 0 < self.max_workers < self.min_prefill + self.min_decode:
            raise ValueError("max_workers must be 0 or at least min_prefill + min_decode")
        if 0 < self.max_prefill + self.max_decode < self.min_workers and (
            self.max_prefill and self.max_decode
        ):
            raise ValueError("min_workers must be at most max_prefill + max_decode")
        return self


class TlsConfig(_Section):
    """What travels encrypted, and who proves who it is; docs/security.md."""

    folder: str = ""
    """Folder of certificates that ``baton certs init`` has made: the listeners then serve TLS, and
    the parts of the cluster prove themselves to each other. Listeners then serve TLS alone;
    routers, workers and the supervisor show each other certificates of this cluster."""
    certificate: str = ""
    """Certificate of the listeners that a public CA has signed, a PEM file with the intermediate
    ones; empty takes ``router.pem`` of the folder of certificates."""
    key: str = ""
    """Private key of the listeners' certificate, a PEM file."""
    client_authority: str = ""
    """CA that must have signed the certificates of clients, a PEM file: ``ca.pem`` of the folder of
    certificates, or another; empty requires no certificates of clients."""
    redis_authority: str = ""
    """CA of the certificate of a ``rediss://`` server, a PEM file; empty takes ``ca.pem`` of the
    folder of certificates, or without a folder the system's CAs."""
    clear_kv: bool = False
    """Let KV blocks travel unencrypted between machines although there is a folder of certificates.
    The transports ``gloo``, ``nccl`` and ``nixl`` have no encryption, nor have the ranks of a
    worker among each other; they are refused otherwise."""

    @field_validator("folder", "certificate", "key", "client_authority", "redis_authority")
    @classmethod
    def _whole_path(cls, value: str) -> str:
        # Processes that run elsewhere read it too.
        return str(Path(value).expanduser().absolute()) if value else ""

    @model_validator(mode="after")
    def _goes_together(self) -> TlsConfig:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("certificate and key go together")
        if self.client_authority and not self.folder:
            raise ValueError(
                "client_authority needs a folder: what looks whether routers are healthy shows a"
                " certificate of it"
            )
        return self

    def of(self, role: PeerRole) -> TlsFiles | None:
        """What a role shows within the cluster; None where it is not encrypted."""
        return TlsFiles.in_folder(Path(self.folder), role) if self.folder else None

    @property
    def front_client(self) -> TlsFiles | None:
        """What a command on this machine shows the fronts, and whom it trusts; None without TLS."""
        if self.fronts is None:
            return None
        own = self.of("supervisor")
        trusted = None if own is None or self.certificate else own.authority
        shown = own if self.client_authority else None
        return replace(shown or TlsFiles(), authority=trusted)

    @property
    def fronts(self) -> TlsFiles | None:
        """The fronts' certificate, and whose certificates they ask for; None without TLS."""
        own = self.of("router")
        asked = Path(self.client_authority) if self.client_authority else None
        if self.certificate:
            return TlsFiles(Path(self.certificate), Path(self.key), asked)
        return None if own is None else replace(own, authority=asked)


def _default_classes() -> tuple[ContextClass, ...]:
    return (
        ContextClass(name="short", max_tokens=512),
        ContextClass(name="medium", max_tokens=4096),
        ContextClass(name="long"),
    )


def _default_pools() -> tuple[PoolConfig, ...]:
    return (
        PoolConfig(name="prefill", role="prefill"),
        PoolConfig(name="decode", role="decode"),
    )


class Config(BaseSettings):
    """Everything that an operator can set."""

    model_config = SettingsConfigDict(
        env_prefix="BATON_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    model: str = "smollm2-135m-instruct"
    """Model to serve: a Hugging Face id (``Qwen/Qwen3-0.6B``), a folder of such a model, a .gguf
    file, or a demo model's name. A path that exists wins."""
    revision: str = ""
    """Branch, tag or commit of a Hugging Face model; empty takes the default branch (main)."""
    served_model_name: str = ""
    """Name of the model in the API; empty takes the id, or the name of the folder or file."""
    max_model_len: int = Field(default=0, ge=0)
    """Maximum number of tokens of a request, prompt and answer together; 0 takes the model's own.
    """
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Type of weights that are not quantized, and of the KV cache without ``kv_dtype``."""
    quantization: Literal["auto", "none", "int8", "int4", "fp8"] = "auto"
    """Weights: as the files hold them (auto), unquantized in ``dtype`` (none), or quantized when
    they are loaded (int8, int4, fp8)."""
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """Type of the KV cache: as ``dtype`` (auto), or 8 bits with a scale for each token and head
    (int8, fp8)."""
    deterministic: bool = False
    """Give each request the same tokens whatever else is in the batch. Baton refuses to start where
    it cannot promise that."""
    drafter: Literal["auto", "none", "ngram", "draft", "eagle", "medusa"] = "auto"
    """Speculative method, which changes no answer: text that repeats (ngram), a smaller model
    (draft), trained heads (eagle, medusa), none, or auto. ``auto`` takes ``ngram`` on CPUs and
    ``none`` on GPUs, where it has not been measured. ``ngram`` looks for repetitions in the prompt
    and the answer. ``draft`` runs on CPUs. ``eagle`` is an EAGLE-3 head and ``medusa`` are Medusa
    heads, both trained for the model."""
    draft_model: str = ""
    """The smaller model of ``draft``, or the folder of the heads of ``eagle`` or ``medusa``. A
    smaller model is named as ``model`` is, and must have the same tokens. Its weights stay as its
    files hold them, and its KV takes a share of every block."""
    draft_revision: str = ""
    """Branch, tag or commit of a ``draft_model`` of Hugging Face; empty takes the default branch
    (main)."""
    http: str = "127.0.0.1:8000"
    """Address of the HTTP listener, host:port; port 0 takes a free port."""
    grpc: str = "127.0.0.1:8001"
    """Address of the gRPC listener, host:port; port 0 takes a free port."""
    admin_http: str = ""
    """Serve metrics, console and operators' endpoints at this address only, host:port; empty serves
    them at ``http``."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names by which clients may call the HTTP listeners; ``*`` is any. On loopback, IP
    addresses, ``localhost`` and names without a dot are always allowed, and an empty list allows no
    others, so that no web page can reach the API by a name of its own (DNS rebinding). Elsewhere an
    empty list allows any name."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the API from a browser (CORS), such as
    ``https://chat.example.com``; ``*`` is any. An empty list allows only pages that this server has
    sent."""
    head_deadline_s: float = Field(default=10.0, gt=0)
    """Seconds that a client has to send the head of an HTTP request."""
    connections_per_client: int = Field(default=0, ge=0, le=1_000_000)
    """Maximum number of HTTP connections from one address to one router process; 0 is as many as
    there are files for. Baton answers 503 beyond. A network of /64 counts as one IPv6 address.
    Behind a proxy all connections come from its address: limit them there."""
    routers: int = Field(default=1, ge=0, le=64)
    """Number of router processes behind the HTTP and gRPC ports; 0, with a ``ray_address``, leaves
    them to ``baton router``. The kernel picks a process for each connection."""
    redis_url: str = ""
    """A Redis or Valkey server, ``redis://user:password@host:port/db``, or ``rediss://…`` with TLS;
    empty starts an embedded Valkey."""
    redis_router_url: str = ""
    """URL of that server with the user of the routers (deploy/redis/users.acl); empty takes
    ``redis_url``."""
    redis_worker_url: str = ""
    """URL of that server with the user of the workers; empty takes ``redis_url``."""
    gcs_store: str = ""
    """Where Ray's control store keeps its data: ``embedded`` starts a Valkey for it, or
    ``redis://host:port``; empty keeps it in memory. With one the cluster serves on when the control
    store dies; without one that death ends the cluster. It must be another server than
    ``redis_url``."""
    ray_address: str = ""
    """A running Ray cluster that has ``baton_worker`` resources: ``host:port`` of its control
    store, or ``auto`` for the Ray node on this machine; empty starts a Ray on this machine alone.
    With ``host:port`` this machine joins that Ray without room for workers. Needs ``redis_url``."""
    leave_workers: bool = False
    """With a ``ray_address``, leave the workers running on SIGTERM. The next launcher of this
    ``cluster_id`` takes them over if it comes within a minute."""
    index_mib: int = Field(default=256, ge=1, le=1 << 20)
    """Maximum memory of the prefix index in Redis, in MiB. Beyond it the index forgets the blocks
    that were asked for least recently. A million blocks take about 45 MiB, and 2 MiB more for each
    worker that holds all of them."""
    tls: TlsConfig = Field(default_factory=TlsConfig)
    """Certificates of the listeners, and within the cluster."""
    insecure_listen: bool = False
    """Listen beyond this machine without API keys or TLS, for clusters behind a proxy that has
    both."""
    transport: TransportName = "auto"
    """How KV blocks travel between workers; ``auto`` takes the best that both workers of a pair can
    use."""
    transfer_window_mib: int = Field(default=32, ge=1, le=4096)
    """Maximum KV in flight from one worker to another, and memory of such a pair for bytes between
    blocks and wire, in MiB. Four times as much may be in flight where nothing is buffered in
    between."""
    policy: PolicyName = "predictive"
    """How the router chooses a request's workers: by predicted milliseconds (predictive), or by a
    simple rule."""
    local_prefill: LocalPrefill = "auto"
    """Whether decode workers compute prompts themselves: where that is predicted to be faster
    (auto), always, or never."""
    pools: tuple[PoolConfig, ...] = Field(default_factory=_default_pools)
    """The pools of workers."""
    classes: tuple[ContextClass, ...] = Field(default_factory=_default_classes)
    """The context-length classes, in rising order."""
    block_size: int = Field(default=16, ge=1, le=1024)
    """Tokens in a KV block, where a pool has no other size, and in a block of the prefix index."""
    kv_host_mib: int = Field(default=0, ge=0)
    """Host memory of each worker for KV blocks that its pool evicts, in MiB; 0 keeps none. The
    blocks come back when a request needs them. This is for GPUs: on a CPU a larger ``kv_pool_mib``
    does more."""
    kv_disk_mib: int = Field(default=0, ge=0)
    """Disk space of each worker for KV blocks that its memory evicts, in MiB; 0 keeps none. The
    blocks come back when a request needs them."""
    kv_disk_path: str = ""
    """Folder for KV blocks on disk; empty takes ``kv`` in ``$BATON_CACHE_DIR``, or in
    ``~/.cache/baton``. The file has no name there, and ends with its worker."""
    tool_parser: ToolParserName = "auto"
    """Format of the model's tool calls; ``auto`` looks at its chat template. ``hermes`` is also for
    Qwen and SmolLM3, ``smollm`` for SmolLM2, ``mistral_args`` for Mistral from tokenizer version 11
    on."""
    lease_s: float = Field(default=3.0, gt=0)
    """Seconds without a heartbeat after which a handoff's ticket ends."""
    heartbeat_s: float = Field(default=1.0, gt=0)
    """Seconds between two renewals of a worker's registry entry and of its leases."""
    registry_ttl_s: float = Field(default=4.0, gt=0)
    """Seconds without a renewal after which a worker counts as gone."""
    request_deadline_s: float = Field(default=300.0, gt=0)
    """Seconds after which a request that has not ended gets an error."""
    hang_s: float = Field(default=1.0, ge=0.1)
    """Seconds of silence after which a worker that runs requests counts as hanging. Its requests
    move to other workers, if there are any."""
    engine_hang_s: float = Field(default=10.0, ge=0.1)
    """Seconds without a finished step after which a worker whose engine has work counts as hanging,
    although it is not silent."""
    move_budget_ratio: float = Field(default=0.2, ge=0)
    """Maximum number of migrations after failures, as a fraction of a router process's requests."""
    move_budget_per_s: float = Field(default=4.0, ge=0)
    """Maximum number of further migrations after failures per second of a router process."""
    move_budget_burst: int = Field(default=0, ge=0)
    """Maximum number of migrations after failures at once; 0 takes twice the ``max_sequences``
    of the decode workers."""
    poison_quarantine_s: float = Field(default=300.0, ge=0)
    """Seconds for which a prompt is refused after two workers have failed while they computed
    it."""
    drain_deadline_s: float = Field(default=30.0, ge=0)
    """Seconds that running requests have to end or to move when a worker or router leaves; 0 ends
    them at once. A process leaves by ``baton drain`` or SIGTERM."""
    standby: bool = True
    """Keep a warm standby process on each node with workers, so that a worker that dies is back
    some seconds sooner, for about 200 MiB of memory."""
    slow_client_s: float = Field(default=30.0, gt=0)
    """Seconds after which a client that does not read its answer is cut off, and its request ends.
    It counts once more is there for the client than its connection's buffer holds; over HTTP also
    where the client reads fewer than 4096 bytes in that time."""
    admission: Literal["queue", "slo"] = "queue"
    """How requests are treated under too much load: ``queue`` lets them wait, ``slo`` refuses those
    whose first token would be late. This is for requests without a deadline of their own. ``queue``
    is limited by ``max_queue_s`` and ``max_waiting_requests``; ``slo`` also answers 429 where the
    first token would come after the SLO of the request's class, and sends prompts to the workers
    more slowly while answers miss ``slo_tpot_s``."""
    max_queue_s: float = Field(default=60.0, gt=0)
    """Maximum predicted wait of a request without a deadline of its own, in seconds; it gets 429
    beyond, unless it is accepted as a probe."""
    max_waiting_requests: int = Field(default=256, ge=1)
    """Maximum number of waiting requests in one router process; more get 429."""
    priority_step_s: float = Field(default=1.0, gt=0)
    """Seconds of waiting that make up for one level of priority."""
    tenants: tuple[TenantConfig, ...] = ()
    """Tenants that are known by name; ``default`` always is."""
    keys: tuple[KeyConfig, ...] = ()
    """The API keys that are known."""
    keys_file: str = ""
    """File of API keys that ``baton keys`` writes; clients must then show one. It is read again
    whenever it changes."""
    require_key: bool = False
    """Refuse requests without a known API key, except ``/health`` and ``/live``. With a
    ``keys_file`` a key is required unless this is false."""
    max_body_bytes: int = Field(default=8 * MIB, ge=1024)
    """Maximum size of an HTTP request body, in bytes; uploaded files have ``file_most_bytes``."""
    data_dir: str = ""
    """Folder of uploaded files and batches, which outlive the cluster; empty takes one for the HTTP
    address in ``$XDG_DATA_HOME/baton``, or in ``~/.local/share/baton``."""
    file_most_bytes: int = Field(default=200 * MIB, ge=1024)
    """Maximum size of an uploaded file, in bytes."""
    files_most_bytes: int = Field(default=1024 * MIB, ge=1024)
    """Maximum size of all files together, in bytes, results of batches included; uploads beyond it
    are refused."""
    batch_most_in_flight: int = Field(default=64, ge=1, le=4096)
    """Maximum number of batch requests that one router process runs at once; it runs fewer while
    other traffic needs the workers."""
    slo_ttft_s: float = Field(default=2.0, gt=0)
    """Maximum time to the first token that counts as good, in seconds."""
    slo_tpot_s: float = Field(default=0.1, gt=0)
    """Maximum time per output token that counts as good, in seconds."""
    autoscaler: AutoscalerConfig = Field(default_factory=AutoscalerConfig)
    """How roles and the sizes of the pools follow the traffic."""
    cluster_id: str = ""
    """Name of the cluster, and prefix of its Redis keys; empty takes a random one."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity that is logged."""
    log_format: Literal["text", "json"] = "text"
    """Format of log lines: text, or one JSON object each, with the ids of request and trace."""
    log_requests: bool = False
    """Log a line for each request that has ended: its id, class, tokens, times and outcome."""
    log_prompts: bool = False
    """Add the text of the prompt, which is private to the client, to the lines of
    ``log_requests``."""
    otlp_endpoint: str = ""
    """URL to which traces of requests are sent by OTLP over gRPC, such as http://127.0.0.1:4317;
    empty sends none."""
    trace_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of requests that are traced, of those whose client sends no W3C traceparent."""

    @field_validator("otlp_endpoint")
    @classmethod
    def _otlp(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError("otlp_endpoint must begin with http:// or https://")
        return value

    @field_validator("keys_file")
    @classmethod
    def _whole_path(cls, value: str) -> str:
        # Processes that run elsewhere read it too.
        return str(Path(value).expanduser().absolute()) if value else ""

    @field_validator("http", "grpc", "admin_http")
    @classmethod
    def _host_port(cls, value: str, info: ValidationInfo) -> str:
        if value or info.field_name != "admin_http":
            split_host_port(value)
        return value

    @field_validator("allowed_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is no origin, as in https://chat.example.com")
        return value

    @model_validator(mode="before")
    @classmethod
    def _a_file_of_keys_requires_one(cls, values: dict[str, Any]) -> dict[str, Any]:
        if values.get("keys_file") and "require_key" not in values:
            return {**values, "require_key": True}
        return values

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        roles = {pool.role for pool in self.pools}
        if roles != {"prefill", "decode"}:
            raise ValueError("pools: at least one prefill and one decode pool are needed")
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"pools: names must differ, got {names}")
        bounds = [math.inf if c.max_tokens is None else c.max_tokens for c in self.classes]
        if not bounds or bounds != sorted(set(bounds)) or bounds[-1] != math.inf:
            raise ValueError("classes: max_tokens must rise, and the last class has none")
        self._check_keys()
        if self.heartbeat_s * 2 > min(self.registry_ttl_s, self.lease_s):
            raise ValueError("heartbeat_s must be at most half of registry_ttl_s and of lease_s")
        return self

    def _check_keys(self) -> None:
        for kind, names in (
            ("tenants", [tenant.name for tenant in self.tenants]),
            ("keys", [key.name for key in self.keys]),
        ):
            if len(set(names)) != len(names):
                raise ValueError(f"{kind}: names must differ, got {names}")
        hashes = [key.sha256 for key in self.keys]
        if len(set(hashes)) != len(hashes):
            raise ValueError("keys: no two may have the same sha256")
        if self.require_key and "" in hashes:
            raise ValueError("keys: one without a sha256 contradicts require_key")
        if any(key.allows("admin") and not key.sha256 for key in self.keys):
            raise ValueError("keys: one without a sha256 cannot be an admin's")
        known = {DEFAULT_TENANT, *(tenant.name for tenant in self.tenants)}
        for key in self.keys:
            if key.tenant not in known:
                raise ValueError(f"keys: {key.name} belongs to an unknown tenant, {key.tenant!r}")

    @model_validator(mode="after")
    def _several_machines(self) -> Config:
        if not self.ray_address:
            if not self.routers:
                raise ValueError("routers: 0 needs a ray_address; nobody would serve without")
            if self.leave_workers:
                raise ValueError(
                    "leave_workers: it needs a ray_address; workers end with their Ray"
                )
            return self
        if self.ray_address != "auto":
            split_host_port(self.ray_address)
        if not self.redis_url:
            raise ValueError(
                "ray_address: workers on other machines need a redis_url that they reach, too; the"
                " embedded Valkey listens on loopback"
            )
        if self.gcs_store:
            raise ValueError("gcs_store: with a ray_address it is for whoever starts that Ray")
        if self.leave_workers and not self.cluster_id:
            raise ValueError(
                "leave_workers: it needs a cluster_id, by which the next launcher comes"
            )
        return self

    @model_validator(mode="after")
    def _classes_have_workers(self) -> Config:
        roles = {pool.name: pool.role for pool in self.pools}
        owned = {name for one in self.classes for name in one.pools}
        for one in self.classes:
            unknown = [name for name in one.pools if name not in roles]
            if unknown:
                raise ValueError(f"classes: {one.name} owns {unknown[0]!r}, which is no pool")
            for role in ("prefill", "decode"):
                own = any(roles[name] == role for name in one.pools)
                if not own and not any(r == role for n, r in roles.items() if n not in owned):
                    raise ValueError(
                        f"classes: {one.name} has no {role} pool: others own all of them"
                    )
        return self

    @model_validator(mode="after")
    def _autoscaler_knows_its_pools(self) -> Config:
        if not self.autoscaler.enabled:
            return self
        if len(self.pools) != 2:
            raise ValueError("autoscaler: it knows one prefill pool and one decode pool, no others")
        configured = sum(pool.count for pool in self.pools)
        if configured < self.autoscaler.min_prefill + self.autoscaler.min_decode:
            raise ValueError("autoscaler: the pools have fewer workers than it is to keep")
        return self

    @model_validator(mode="after")
    def _blocks_are_encrypted(self) -> Config:
        clear = self.transport in ("gloo", "nccl", "nixl")
        if self.tls.folder and clear and not self.tls.clear_kv:
            raise ValueError(
                f"transport: {self.transport} sends KV blocks unencrypted: take auto, or say"
                " tls.clear_kv = true where the network between the workers is yours alone"
            )
        several = [one for one in self.pools if one.ranks > 1]
        spread = [one for one in several if one.rank_placement != "strict_pack"]
        if self.tls.folder and spread and not self.tls.clear_kv:
            raise ValueError(
                f"pools: the ranks of {spread[0].name} speak to each other unencrypted, and may lie"
                " on several nodes: take rank_placement = strict_pack, or say tls.clear_kv = true"
            )
        return self

    @model_validator(mode="after")
    def _drafter_has_its_model(self) -> Config:
        if self.drafter not in ("auto", "none", "ngram") and not self.draft_model:
            raise ValueError(f"drafter: {self.drafter} needs a draft_model")
        if self.draft_revision and not self.draft_model:
            raise ValueError("draft_revision: it needs a draft_model")
        return self

    @model_validator(mode="after")
    def _pools_share_kv(self) -> Config:
        for pool in self.pools:
            if pool.block_size % self.block_size:
                raise ValueError(
                    f"pools: {pool.name} has a block_size of {pool.block_size} tokens, and must "
                    f"have a multiple of the cluster's {self.block_size}"
                )
        types = {pool.name: self.kv_dtype_of(pool) for pool in self.pools}
        if self.deterministic and len(set(types.values())) > 1:
            listed = ", ".join(f"{name} {kind}" for name, kind in types.items())
            raise ValueError(
                f"deterministic needs one kv_dtype in all pools, and they have: {listed}"
            )
        return self

    @model_validator(mode="after")
    def _context_holds_a_block(self) -> Config:
        largest = max(self.pools, key=self.block_size_of)
        if 0 < self.max_model_len < (size := self.block_size_of(largest)):
            raise ValueError(
                f"max_model_len: {self.max_model_len} tokens are less than a KV block of the pool"
                f" {largest.name}: set at least its block_size, {size}, or 0 for the model's own"
            )
        return self

    @model_validator(mode="after")
    def _ranks_can_do_it(self) -> Config:
        self.check_ranks()
        return self

    def check_ranks(self) -> None:
        """Raises ValueError for what workers of several ranks do not do."""
        self._check_model_ranks()
        for pool in self.pools:
            if pool.cp > 1:
                self._check_context_ranks(pool)

    def _check_context_ranks(self, pool: PoolConfig) -> None:
        for wanted, name, instead in (
            (pool.tp > 1, "tp above 1", "take tp 1"),
            (pool.role != "prefill", f"role {pool.role}", "give cp to a prefill pool"),
            (self.autoscaler.enabled, "autoscaler, which changes roles", "leave autoscaler out"),
            (self.deterministic, "deterministic", "leave deterministic out"),
            (self.kv_host_mib, "kv_host_mib", "take kv_host_mib 0"),
            (self.kv_disk_mib, "kv_disk_mib", "take kv_disk_mib 0"),
            (self.draft_model, f"drafter {self.drafter}", "take drafter ngram or none"),
        ):
            if wanted:
                raise ValueError(
                    f"pools: {pool.name} has cp above 1, which does not go with {name}: take cp 1,"
                    f" or {instead}"
                )

    def _check_model_ranks(self) -> None:
        divided = next((pool.name for pool in self.pools if pool.tp > 1), None)
        if divided is None:
            return
        for wanted, name, instead in (
            (self.deterministic, "deterministic", "leave deterministic out"),
            (self.kv_host_mib, "kv_host_mib", "take kv_host_mib 0"),
            (self.kv_disk_mib, "kv_disk_mib", "take kv_disk_mib 0"),
            (self.draft_model, f"drafter {self.drafter}", "take drafter ngram or none"),
            (
                self.transport not in _RANKS_TRANSPORTS,
                f"transport {self.transport}",
                f"one of {', '.join(_RANKS_TRANSPORTS)}",
            ),
            (
                len({self.block_size_of(pool) for pool in self.pools}) > 1,
                "pools of unequal block_size",
                "give all pools one",
            ),
            (
                len({self.kv_dtype_of(pool) for pool in self.pools}) > 1,
                "pools of unequal kv_dtype",
                "give all pools one",
            ),
        ):
            if wanted:
                raise ValueError(
                    f"pools: {divided} has tp above 1, which does not go with {name}: take tp 1, or"
                    f" {instead}"
                )

    @property
    def ranks(self) -> int:
        """Of all workers together."""
        return sum(pool.count * pool.ranks for pool in self.pools)

    def block_size_of(self, pool: PoolConfig) -> int:
        """Tokens in a KV block of a pool's workers."""
        return pool.block_size or self.block_size

    def kv_dtype_of(self, pool: PoolConfig) -> KvTypeName:
        """The type of the KV cache of a pool's workers."""
        return pool.kv_dtype or (self.dtype if self.kv_dtype == "auto" else self.kv_dtype)

    @property
    def max_moves(self) -> int:
        """``move_budget_burst``, or what stands for 0."""
        most = max(pool.max_sequences for pool in self.pools if pool.role == "decode")
        return self.move_budget_burst or 2 * most

    @property
    def lossiest_kv_dtype(self) -> KvTypeName:
        """The least precise KV type of all pools: what a value of the cluster's KV is worth."""
        return max(map(self.kv_dtype_of, self.pools), key=_KV_TYPES.index)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # `load_config` reads the others. What another process was told must not change here.
        return (init_settings,)

    def class_of(self, prompt_tokens: int) -> str:
        """The context-length class of a prompt."""
        return next(
            c.name for c in self.classes if c.max_tokens is None or prompt_tokens <= c.max_tokens
        )

    def slo_ttft_of(self, context_class: str) -> float:
        """The time to the first token that counts as good in a class, in seconds."""
        own = next((c.slo_ttft_s for c in self.classes if c.name == context_class), None)
        return self.slo_ttft_s if own is None else own

    @property
    def data_folder(self) -> Path:
        """Where uploaded files and batches are kept."""
        if self.data_dir:
            return Path(self.data_dir).expanduser().absolute()
        shared = os.environ.get("XDG_DATA_HOME")
        parent = Path(shared).expanduser() if shared else Path.home() / ".local" / "share"
        return parent.absolute() / "baton" / re.sub(r"[^A-Za-z0-9.-]", "-", self.http)

    @property
    def tenant_weights(self) -> dict[str, float]:
        """Every tenant's weight, by name."""
        return {DEFAULT_TENANT: 1.0} | {tenant.name: tenant.weight for tenant in self.tenants}


def load_config(file: Path | None = None, flags: Iterable[Flag] = (), **values: Any) -> Config:
    """Read the configuration: flags override the environment, which overrides the file.

    ``values`` are flags by the name of their field; None counts as not given. Raises ConfigError,
    whose message has a line for each fault.
    """
    named = (
        Flag(f"--{name.replace('_', '-')}", (name,), value)
        for name, value in values.items()
        if value is not None
    )
    default_pools = [pool.model_dump(exclude_defaults=True) for pool in _default_pools()]
    sources = Sources.read(Config, file, [*flags, *named], default_pools)
    faults = list(sources.faults)
    try:
        config = Config(**sources.values)
    except ValidationError as error:
        faults.extend(fault_lines(error, Config, sources))
    if faults:
        raise ConfigError("\n".join(faults))
    return config


def split_host_port(address: str) -> tuple[str, int]:
    """``host:port`` → its parts; an IPv6 host stands in brackets. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)
