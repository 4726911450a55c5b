"""The configuration: flags override the environment (``BATON_…``), which overrides a TOML file."""

from __future__ import annotations

import math
import os
import re
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from baton.tls import PeerRole, TlsFiles

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
    """The role that its workers start in."""
    count: int = Field(default=1, ge=1, le=1024)
    """How many workers."""
    tp: int = Field(default=1, ge=1, le=64)
    """Tensor parallelism: on how many ranks each worker's model lies, a process and a GPU each."""
    cp: int = Field(default=1, ge=1, le=64)
    """Context parallelism, of prefill workers: over how many ranks, which have all weights and KV
    each, a worker divides the tokens of long prompts. Not together with ``tp``."""
    rank_placement: Literal["strict_pack", "pack", "spread", "strict_spread"] = "strict_pack"
    """Where Ray places a worker's ranks: all on one node (``strict_pack``), on few (``pack``), on
    many (``spread``), each on another one (``strict_spread``)."""
    threads: int = Field(default=0, ge=0, le=1024)
    """Compute threads of a rank on the CPU; 0 shares the machine's cores among the workers, step
    by step, decode first."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; ``auto`` takes a GPU where there is one."""
    kv_pool_mib: int = Field(default=1024, ge=1)
    """Memory for a worker's KV blocks on the CPU, in MiB; its ranks divide it. With ``cp`` each has
    all blocks, and there are so many fewer."""
    gpu_memory_fraction: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that its workers take; workers that share a GPU divide it."""
    max_sequences: int = Field(default=64, ge=1, le=4096)
    """Most sequences in one step."""
    chunk_tokens: int = Field(default=0, ge=0)
    """Most prompt tokens in one step; 0 takes 512 on the CPU and 8192 on a GPU, ``cp`` times as
    many where ranks divide them."""
    block_size: int = Field(default=0, ge=0, le=1024)
    """Tokens in a KV block of its workers, a multiple of the cluster's ``block_size``; 0 takes that
    itself. Blocks between pools of unequal sizes are converted by whoever sends them."""
    kv_dtype: Literal["", "float32", "bfloat16", "float16", "int8", "fp8"] = ""
    """Type of its workers' KV cache; empty takes the cluster's. Converted like unequal sizes. On a
    CPU float32 and float16 caches are computed by torch, which is slow."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Ray resources that each rank of a worker asks for, beside one ``baton_worker``."""
    peak_gflops: float = Field(default=0.0, ge=0)
    """The most that a rank's device computes, in GFLOP/s of the type that the weights are
    multiplied in; ``baton profile`` measures it. With ``peak_gb_per_s`` the metrics tell MFU and
    MBU; 0 is not known."""
    peak_gb_per_s: float = Field(default=0.0, ge=0)
    """The most that its memory moves, in GB per second; the same command measures it."""
    price_per_hour: float = Field(default=0.0, ge=0)
    """What a worker costs an hour, in any currency that all pools share: metrics tell what a
    million tokens cost. 0 is not known."""

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
    least_prefill: int = Field(default=1, ge=1, le=1024)
    """Fewest workers in the prefill role."""
    most_prefill: int = Field(default=0, ge=0, le=1024)
    """Most workers in the prefill role; 0 is bounded by ``most_workers`` alone."""
    least_decode: int = Field(default=1, ge=1, le=1024)
    """Fewest workers in the decode role."""
    most_decode: int = Field(default=0, ge=0, le=1024)
    """Most workers in the decode role; 0 is bounded by ``most_workers`` alone."""
    least_workers: int = Field(default=0, ge=0, le=2048)
    """Fewest workers in all; 0 takes as many as the pools have: then none is drained."""
    most_workers: int = Field(default=0, ge=0, le=2048)
    """Most workers in all; 0 takes as many as the pools have: then none is started."""

    @model_validator(mode="after")
    def _bounds_leave_something(self) -> AutoscalerConfig:
        for role, least, most in (
            ("prefill", self.least_prefill, self.most_prefill),
            ("decode", self.least_decode, self.most_decode),
            ("workers", self.least_workers, self.most_workers),
        ):
            if 0 < most < least:
                raise ValueError(f"most_{role} must be 0 or at least least_{role}")
        if 0 < self.most_workers < self.least_prefill + self.least_decode:
            raise ValueError("most_workers must be 0 or at least least_prefill + least_decode")
        if 0 < self.most_prefill + self.most_decode < self.least_workers and (
            self.most_prefill and self.most_decode
        ):
            raise ValueError("least_workers must be at most most_prefill + most_decode")
        return self


class TlsConfig(_Section):
    """What travels encrypted, and who proves who it is; docs/security.md."""

    folder: str = ""
    """Folder of certificates that `baton certs init` has made. With it the fronts serve TLS alone,
    and routers, workers and the supervisor prove to each other that they are of this cluster."""
    certificate: str = ""
    """The fronts' certificate, a PEM file with intermediate ones behind it; empty takes
    ``router.pem`` of the folder. For one that a public authority has signed."""
    key: str = ""
    """Its key, a PEM file."""
    client_authority: str = ""
    """A PEM file: the fronts' clients must show a certificate that this authority signed;
    ``ca.pem`` of the folder is one. Empty asks for none."""
    redis_authority: str = ""
    """A PEM file: the authority of the certificate of a ``rediss://`` server; empty takes
    ``ca.pem`` of the folder, or without a folder what the system trusts."""
    clear_kv: bool = False
    """Says that KV blocks may travel unencrypted: the transports ``gloo``, ``nccl`` and ``nixl``
    have no encryption, nor have the ranks of a worker among each other, and what would
    take these to other machines is refused with a folder otherwise."""

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
    """A name that ``baton model list`` shows, a Hugging Face folder, or a .gguf file."""
    served_model_name: str = ""
    """The model's id in the API; empty takes the name, or the folder's name of a path."""
    max_model_len: int = Field(default=0, ge=0)
    """Maximum number of tokens of a request, prompt and answer together; 0 takes the model's own.
    """
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Type of weights that are not quantised, and of the KV cache without ``kv_dtype``."""
    quantization: Literal["auto", "none", "int8", "int4", "fp8"] = "auto"
    """Weights: as the files hold them (``auto``), as ``dtype`` (``none``), or quantised at load."""
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """Type of the KV cache: ``dtype`` (``auto``), or 8 bits with a scale per token and head."""
    deterministic: bool = False
    """Same bits whatever else is in the batch; refused where they cannot be promised."""
    drafter: Literal["auto", "none", "ngram", "draft", "eagle", "medusa"] = "auto"
    """What guesses tokens that a decode step then checks, which changes no answer: the prompt and
    the answer themselves, where they repeat (``ngram``), on CPUs a smaller model (``draft``), an
    EAGLE-3 head or Medusa heads trained for the model (``eagle``, ``medusa``), or nothing
    (``none``). ``auto``: ``ngram`` on CPUs, and ``none`` on GPUs, where it was not measured yet."""
    draft_model: str = ""
    """The smaller model of the drafter ``draft``, named as ``model`` is: it must have the same
    tokens. Its weights stay as its files hold them, and its KV takes its share of every block. Of
    ``eagle`` and ``medusa`` the heads' folder."""
    http: str = "127.0.0.1:8000"
    """host:port of the HTTP front."""
    grpc: str = "127.0.0.1:8001"
    """host:port of the gRPC front."""
    admin_http: str = ""
    """host:port of a second HTTP front for metrics, console and the operators' endpoints, which the
    first one then has no more; empty: they share the first one."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in the Host header by which the HTTP fronts may be called; ``*`` is any. On loopback IP
    addresses, ``localhost`` and names without a dot always are, and where this is empty no others,
    so that no web page comes by a name of its own (DNS rebinding); elsewhere empty is any."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the API from a browser (CORS), as in
    ``https://chat.example.com``; ``*`` is any. Empty: none but those that this server has sent."""
    head_deadline_s: float = Field(default=10.0, gt=0)
    """The head of an HTTP request must have arrived after this many seconds."""
    connections_per_client: int = Field(default=0, ge=0, le=1_000_000)
    """Most HTTP connections at a time from one address to one router process; 503 beyond. Of IPv6 a
    network of /64 counts as one. 0: as many as there are files for. Behind a proxy all come from
    its address: bound them there."""
    routers: int = Field(default=1, ge=0, le=64)
    """Router processes behind the HTTP and gRPC ports; the kernel picks one for each connection. 0,
    with a ``ray_address``, leaves them to ``baton router``."""
    redis_url: str = ""
    """A Redis or Valkey server, ``redis://user:password@host:port/db``, or ``rediss://…`` with TLS;
    empty starts an embedded Valkey."""
    redis_router_url: str = ""
    """The same server by the routers' user (deploy/redis/users.acl); empty takes ``redis_url``."""
    redis_worker_url: str = ""
    """The same server by the workers' user; empty takes ``redis_url``."""
    gcs_store: str = ""
    """Where Ray's control store keeps what it knows: ``embedded`` starts a Valkey for it; or a
    Redis or Valkey server, ``redis://host:port``, other than ``redis_url``. With one the cluster
    serves on when the control store dies; empty has none, and that death ends the cluster."""
    ray_address: str = ""
    """A Ray cluster that others have started, whose nodes have ``baton_worker`` places:
    ``host:port`` of its control store, which this machine joins without a place; or ``auto``, of
    the Ray node that runs on this machine. Needs ``redis_url``; empty starts a Ray on this machine
    alone."""
    leave_workers: bool = False
    """Whether ``baton up`` with a ``ray_address`` leaves its workers running on SIGTERM: the next
    launcher of this ``cluster_id``, which has a minute to come, takes them over."""
    index_mib: int = Field(default=256, ge=1, le=1 << 20)
    """Most memory of the prefix index in Redis, in MiB; beyond it the index forgets blocks that
    nobody asks for. A million blocks take some 45 MiB, and 2 more for each worker that holds all of
    them."""
    tls: TlsConfig = Field(default_factory=TlsConfig)
    """Certificates: of the fronts, and within the cluster."""
    insecure_listen: bool = False
    """Says that the fronts may listen beyond this machine without keys, or without TLS. For those
    behind a proxy that has both."""
    transport: TransportName = "auto"
    """How KV blocks travel between workers; ``auto``: the best that both ends of a pair can use."""
    transfer_window_mib: int = Field(default=32, ge=1, le=4096)
    """Most KV on its way from one worker to another at a time, and most memory of such a pair for
    bytes between blocks and wire, in MiB; four times as much where nothing lies between them."""
    policy: PolicyName = "predictive"
    """How a request's workers are chosen: by predicted milliseconds, or by a simple rule."""
    local_prefill: LocalPrefill = "auto"
    """Whether decode workers compute prompts themselves: where that is predicted to be faster
    (``auto``), always, or never, which hands every request off."""
    pools: tuple[PoolConfig, ...] = Field(default_factory=_default_pools)
    """The pools of workers."""
    classes: tuple[ContextClass, ...] = Field(default_factory=_default_classes)
    """The context-length classes, in rising order."""
    block_size: int = Field(default=16, ge=1, le=1024)
    """Tokens in a KV block, where a pool has no other size, and in a block of the prefix index."""
    kv_host_mib: int = Field(default=0, ge=0)
    """Memory of the host for a worker's KV blocks that its pool evicts, in MiB; they come back when
    they are asked for. 0 keeps none. For GPUs: on a CPU a larger ``kv_pool_mib`` does more."""
    kv_disk_mib: int = Field(default=0, ge=0)
    """Room on disk for a worker's KV blocks that memory evicts, in MiB; they come back when they
    are asked for. 0 keeps none."""
    kv_disk_path: str = ""
    """Folder of the file for them, which has no name and ends with its worker; empty takes ``kv``
    in ``$BATON_CACHE_DIR``, or in ``~/.cache/baton``."""
    tool_parser: ToolParserName = "auto"
    """How the model writes tool calls: ``hermes`` (also Qwen, SmolLM3), ``llama3``, ``smollm``
    (SmolLM2), ``mistral``, ``mistral_args`` (Mistral from tokenizer version 11 on); ``auto`` tells
    by its chat template."""
    lease_s: float = Field(default=3.0, gt=0)
    """A handoff's ticket ends after this many seconds without a heartbeat."""
    heartbeat_s: float = Field(default=1.0, gt=0)
    """A worker renews its registry entry and its leases this often, in seconds."""
    registry_ttl_s: float = Field(default=4.0, gt=0)
    """A worker that is silent for this many seconds is gone."""
    request_deadline_s: float = Field(default=300.0, gt=0)
    """A request that has not ended after this many seconds gets an error."""
    hang_s: float = Field(default=1.0, ge=0.1)
    """A worker that runs requests of a router and says nothing to it for this many seconds is taken
    to hang: its requests move to others, if there are any."""
    engine_hang_s: float = Field(default=10.0, ge=0.1)
    """The same of a worker that says that it lives, and whose engine has ended no step for this
    many seconds while it was given one."""
    move_budget_ratio: float = Field(default=0.2, ge=0)
    """Moves because of failures that each request allows a router process, as a fraction."""
    move_budget_per_s: float = Field(default=4.0, ge=0)
    """The same of each second."""
    move_budget_burst: int = Field(default=0, ge=0)
    """Most moves that are allowed at once; 0 takes twice the most sequences of a decode worker."""
    poison_quarantine_s: float = Field(default=300.0, ge=0)
    """A prompt under which two workers have failed is refused for this many seconds."""
    drain_deadline_s: float = Field(default=30.0, ge=0)
    """A worker or router that is told to leave, by ``baton drain`` or SIGTERM, gives what runs
    there this many seconds to end or to move; 0 ends it at once."""
    standby: bool = True
    """Whether a process on each node with workers has imported what a worker needs, for the next
    life of one that dies: it is back some seconds sooner, for some 200 MiB of memory."""
    slow_client_s: float = Field(default=30.0, gt=0)
    """A client that has not read for this many seconds, while more is there for it than its
    connection's buffer holds, is cut off, and its request ends; over HTTP also one that reads fewer
    than 4096 bytes in that time."""
    admission: Literal["queue", "slo"] = "queue"
    """How a request without a deadline of its own is treated when there is more work than can be
    done at once: ``queue`` lets it wait for its turn, within ``max_queue_s`` and
    ``max_waiting_requests``; ``slo`` also refuses it with 429 where its first token would come
    after its class's SLO, and sends prompts to the workers more slowly while answers miss
    ``slo_tpot_s``."""
    max_queue_s: float = Field(default=60.0, gt=0)
    """A request without a deadline of its own is refused with 429 where its predicted wait for its
    turn is longer than this many seconds."""
    max_waiting_requests: int = Field(default=256, ge=1)
    """Requests that may wait for their turn, in one router process; more are refused with 429."""
    priority_step_s: float = Field(default=1.0, gt=0)
    """A request that has waited this many seconds longer has overtaken one level of priority."""
    tenants: tuple[TenantConfig, ...] = ()
    """Tenants that are known by name; ``default`` always is."""
    keys: tuple[KeyConfig, ...] = ()
    """The API keys that are known."""
    keys_file: str = ""
    """A file of more keys, which ``baton keys`` writes; it is read again whenever it changes."""
    require_key: bool = False
    """Whether requests without a known API key are refused with 401, but for ``/health`` and
    ``/live``. Where there is a ``keys_file``, they are unless this says otherwise."""
    max_body_bytes: int = Field(default=8 * MIB, ge=1024)
    """Largest HTTP body that is read, in bytes; of an uploaded file ``file_most_bytes``."""
    data_dir: str = ""
    """Folder of uploaded files and batches, which outlive the cluster; empty takes one for the HTTP
    address in ``$XDG_DATA_HOME/baton``, or in ``~/.local/share/baton``."""
    file_most_bytes: int = Field(default=200 * MIB, ge=1024)
    """Largest file that may be uploaded, in bytes."""
    files_most_bytes: int = Field(default=1024 * MIB, ge=1024)
    """No file is taken in beyond this many bytes of all files together, results of batches
    included."""
    batch_most_in_flight: int = Field(default=64, ge=1, le=4096)
    """Most requests of batches that one router process runs at a time; how many there are adapts to
    what other traffic leaves."""
    slo_ttft_s: float = Field(default=2.0, gt=0)
    """The time to the first token that counts as good, in seconds."""
    slo_tpot_s: float = Field(default=0.1, gt=0)
    """The time per output token that counts as good, in seconds."""
    autoscaler: AutoscalerConfig = Field(default_factory=AutoscalerConfig)
    """How roles and the pools' sizes follow the traffic."""
    cluster_id: str = ""
    """Name of the cluster: prefix of its Redis keys; empty draws one."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged."""
    log_format: Literal["text", "json"] = "text"
    """How log lines look: text, or a JSON object each, with the ids of request and trace."""
    log_requests: bool = False
    """Whether a router logs a line for each request that has ended: its id, class, tokens, times
    and outcome."""
    log_prompts: bool = False
    """Whether these lines are written and have the prompt's text too, which is nobody's business
    but the client's."""
    otlp_endpoint: str = ""
    """Where spans of requests are sent, by OTLP over gRPC: http://127.0.0.1:4317, or https; empty
    traces nothing."""
    trace_ratio: float = Field(default=1.0, ge=0, le=1)
    """The share of requests that are traced, of those whose client says nothing of it (by a W3C
    traceparent)."""

    @field_validator("otlp_endpoint")
    @classmethod
    def _otlp(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError("otlp_endpoint must begin with http:// or https://")
        return value

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
        if configured < self.autoscaler.least_prefill + self.autoscaler.least_decode:
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
    def most_moves(self) -> int:
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
        toml = TomlConfigSettingsSource(settings_cls, _toml_file.get())
        return init_settings, env_settings, toml

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


_toml_file: ContextVar[Path | None] = ContextVar("toml_file", default=None)


def load_config(file: Path | None = None, **flags: Any) -> Config:
    """Read the configuration; ``flags`` that are None count as not given.

    Raises ``pydantic.ValidationError`` with every field at fault, and ``FileNotFoundError``.
    """
    if file is not None and not file.is_file():
        raise FileNotFoundError(f"no configuration file at {file}")
    token = _toml_file.set(file)
    try:
        return Config(**{name: value for name, value in flags.items() if value is not None})
    finally:
        _toml_file.reset(token)


def split_host_port(address: str) -> tuple[str, int]:
    """``host:port`` → its parts; an IPv6 host stands in brackets. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)
