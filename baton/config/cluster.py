"""The configuration of a cluster: its fields, and how to read it from flags, environment and file.

Flags override the environment (``BATON_…``), which overrides a TOML file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from baton.config import rules
from baton.config.access import KeyConfig, TenantConfig
from baton.config.advanced import AdvancedConfig
from baton.config.autoscaler import AutoscalerConfig
from baton.config.choices import (
    DEFAULT_TENANT,
    MIB,
    Admission,
    Drafter,
    Dtype,
    GenerationConfig,
    KvDtype,
    KvTypeName,
    LocalPrefill,
    LogFormat,
    LogLevel,
    LogTo,
    PolicyName,
    Quantization,
    ReasoningParserName,
    ToolParserName,
    TransportName,
)
from baton.config.daily_hours import DailyHours, time_zone
from baton.config.errors import fault_lines
from baton.config.fields import AbsolutePath, split_host_port
from baton.config.money import ClassPrices, PricesConfig
from baton.config.pools import ContextClass, PoolConfig, default_classes, default_pools
from baton.config.sources import Flag, Sources
from baton.config.tls import TlsConfig
from baton.errors import ConfigError

MAX_METRICS_PORTS = 64
"""Number of ports that the metrics pages of a machine's workers may take."""
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
_BUCKET = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9!_.*'()-]+)*/?")
_KV_TYPES: tuple[KvTypeName, ...] = ("float32", "bfloat16", "float16", "int8", "fp8")
"""KV types, the most precise first. Neither 16-bit type can hold all values of the other; their
order only has to be the same everywhere."""


class Config(BaseSettings):
    """All settings of a cluster."""

    model_config = SettingsConfigDict(
        env_prefix="BATON_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    model: str = "smollm2-135m-instruct"
    """Model to serve: a Hugging Face id (``Qwen/Qwen3-0.6B``), a folder of such a model, a .gguf
    file, or the name of a demo model. A path that exists takes precedence."""
    revision: str = ""
    """Branch, tag or commit of a Hugging Face model; empty takes the default branch (main)."""
    served_model_name: str = ""
    """Name of the model in the API; empty takes the id, or the name of the folder or file."""
    max_model_len: int = Field(default=0, ge=0)
    """Maximum number of tokens of a request, prompt and answer together; 0 takes the model's own.
    """
    generation_config: GenerationConfig = "auto"
    """Where sampling parameters that a request does not set come from: the model's
    ``generation_config.json`` (auto), or the API's own defaults (none)."""
    dtype: Dtype = "bfloat16"
    """Type of weights that are not quantized, and of the KV cache unless ``kv_dtype`` is set."""
    quantization: Quantization = "auto"
    """Quantization of the weights: as in the model's files (auto), none, or applied when the model
    loads (int8, int4, fp8)."""
    kv_dtype: KvDtype = "auto"
    """Type of the KV cache: that of ``dtype`` (auto), or 8 bits with a scale for each token and
    head (int8, fp8)."""
    deterministic: bool = False
    """Compute the same tokens for a request whatever else is in the batch. Baton refuses to start
    where it cannot promise that."""
    drafter: Drafter = "auto"
    """Speculative method, which does not change answers: repeated text (ngram), a smaller model
    (draft), trained heads (eagle, medusa), or none. ``auto`` takes ``ngram`` on CPUs and ``none``
    on GPUs. ``ngram`` looks for repetitions in the prompt and the answer. ``draft`` runs on CPUs
    only. ``eagle`` is an EAGLE-3 head and ``medusa`` are Medusa heads, both trained for the
    model."""
    draft_model: str = ""
    """Smaller model of ``draft``, or folder with the heads of ``eagle`` or ``medusa``. A smaller
    model is named as in ``model``, and must have the same tokens. Its weights are used as in its
    files, and its KV takes a share of every block."""
    draft_revision: str = ""
    """Branch, tag or commit of a Hugging Face ``draft_model``; empty takes the default branch
    (main)."""
    http: str = "127.0.0.1:8000"
    """Address of the HTTP listener, host:port; port 0 takes a free port."""
    grpc: str = "127.0.0.1:8001"
    """Address of the gRPC listener, host:port; port 0 takes a free port."""
    admin_http: str = ""
    """Address that alone serves metrics, console and operators' endpoints, host:port; empty serves
    them at ``http``. With an address, gRPC has no operators' calls."""
    metrics_port: int = Field(default=0, ge=0, le=65000)
    """First port of the metrics pages of a machine's workers and supervisor. The supervisor listens
    on it, and each worker on the first free one after it; 0 takes any free ports."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names by which clients may call the HTTP listeners; ``*`` is any. Loopback listeners
    always allow IP addresses, ``localhost`` and names without a dot, and with an empty list nothing
    else, so that no web page reaches the API by a name of its own (DNS rebinding). With an empty
    list, other listeners allow any name."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the API from a browser (CORS), such as
    ``https://chat.example.com``; ``*`` is any. An empty list allows only pages that this server has
    sent."""
    routers: int = Field(default=1, ge=0, le=64)
    """Number of router processes behind the HTTP and gRPC ports; 0, with a ``ray_address``, leaves
    routers to ``baton router``. The kernel picks a process for each connection."""
    redis_url: str = ""
    """A Redis or Valkey server, ``redis://user:password@host:port/db``, or ``rediss://…`` with TLS;
    empty starts an embedded Valkey. With ``redis://user@host:port/db?password_file=/path`` each new
    connection reads the password in that file, which must exist on every machine."""
    redis_router_url: str = ""
    """URL of that server with the user of the routers (deploy/redis/users.acl); empty takes
    ``redis_url``."""
    redis_worker_url: str = ""
    """URL of that server with the user of the workers; empty takes ``redis_url``."""
    gcs_store: str = ""
    """Where Ray's control store keeps its data: ``embedded`` starts a Valkey for it, or
    ``redis://host:port``; empty keeps it in memory. With a store the cluster survives the death of
    Ray's control store; without one it ends. It must be another server than ``redis_url``."""
    ray_address: str = ""
    """A running Ray cluster that has ``baton_worker`` resources: ``host:port`` of its control
    store, or ``auto`` for the Ray node on this machine; empty starts a Ray on this machine alone.
    With ``host:port`` this machine joins that Ray and runs no workers. It needs ``redis_url``."""
    leave_workers: bool = False
    """With a ``ray_address``, leave the workers running when this launcher gets SIGTERM, as they
    are when it fails. They serve until another launcher of this ``cluster_id`` takes them over,
    however long that takes. Ctrl-C ends them."""
    scale_command: str = ""
    """Command that changes the size of a pool where something else than Baton places the workers,
    such as ``kubectl scale deployment/{pool} --replicas={count}``. `baton scale` shows it and
    changes nothing. Empty: the supervisor places the workers."""
    tls: TlsConfig = Field(default_factory=TlsConfig)
    """Certificates of the listeners, and within the cluster."""
    insecure_listen: bool = False
    """Allow listeners beyond this machine without API keys or TLS. Use it only behind a proxy that
    has both."""
    insecure_redis: bool = False
    """Allow ``redis://`` addresses of other machines: passwords, the cluster's secret and the names
    of cached blocks then travel in clear. Use it only where the network between is yours alone."""
    transport: TransportName = "auto"
    """How KV blocks travel between workers; ``auto`` takes the best that both workers of a pair can
    use."""
    shm_folder: AbsolutePath = ""
    """Folder that workers in different containers of one machine share, such as a hostPath volume.
    Through sockets in it they map each other's KV blocks (transport ``shm``). Empty: only workers
    in one process namespace do."""
    data_network: str = ""
    """Network in which the transports ``gloo``, ``nccl`` and ``nixl`` send KV blocks: the name of
    an interface (``eth1``), or a CIDR that has an address of each worker's machine
    (``10.1.0.0/16``). They listen on that address. With certificates these transports need it:
    blocks are encrypted, but their libraries check no certificate, so only workers should be in
    that network.
    Empty: they use the worker's own address."""
    policy: PolicyName = "predictive"
    """How the router chooses the workers of a request: by predicted time (predictive), or by a
    simple rule."""
    local_prefill: LocalPrefill = "auto"
    """Whether decode workers compute prompts: when the router predicts that it is faster (auto),
    never, or always. ``never`` needs a prefill worker. With ``auto`` and ``policy = "predictive"``,
    decode workers that share CPU cores or a GPU with prefill workers compute all prompts of
    theirs."""
    pools: tuple[PoolConfig, ...] = Field(default_factory=default_pools)
    """The pools of workers; at least one decode pool. Without prefill workers, decode workers
    compute all prompts."""
    classes: tuple[ContextClass, ...] = Field(default_factory=default_classes)
    """The context-length classes, in rising order of ``max_tokens``."""
    block_size: int = Field(default=16, ge=1, le=1024)
    """Tokens in a block of the prefix index, and in a KV block unless a pool sets another size."""
    kv_host_mib: int = Field(default=0, ge=0)
    """Host memory of each worker for KV blocks that its pool evicts, in MiB; 0 keeps none. Requests
    load the blocks back. This is for GPUs: on a CPU a larger ``kv_pool_mib`` does more."""
    kv_disk_mib: int = Field(default=0, ge=0)
    """Disk space of each worker for KV blocks that its memory evicts, in MiB; 0 keeps none.
    Requests load the blocks back."""
    kv_disk_path: str = ""
    """Folder for KV blocks on disk; empty takes ``kv`` in ``$BATON_CACHE_DIR``, or in
    ``~/.cache/baton``. The file has no name in it, and ends with its worker."""
    max_pinned_fraction: float = Field(default=0.5, ge=0, le=0.9)
    """Maximum fraction of each worker's KV blocks that the pinned prefixes and retentions of all
    tenants together keep. Such blocks are evicted last."""
    tool_parser: ToolParserName = "auto"
    """Format of the model's tool calls; ``auto`` derives it from the chat template.
    docs/how-to/use/tool-calls.md
    lists the models of each."""
    reasoning_parser: ReasoningParserName = "auto"
    """Format of the model's reasoning, which answers give separately from their content; ``auto``
    derives it from the chat template, ``none`` leaves reasoning in the content. ``think`` is
    ``<think>…</think>``, ``mistral`` is ``[THINK]…[/THINK]``, ``harmony`` is gpt-oss's."""
    request_deadline_s: float = Field(default=300.0, gt=0)
    """Maximum time of a request, in seconds; it then gets an error."""
    drain_deadline_s: float = Field(default=30.0, ge=0)
    """Time for running requests to end or move when a worker or router leaves, in seconds; 0 ends
    them at once. Processes leave on ``baton drain`` and SIGTERM."""
    start_deadline_s: float = Field(default=600.0, gt=0)
    """Time in which a worker that starts must serve or make progress, in seconds; then it is
    replaced. Each 64 MiB that it reads, such as weights, start the time again. Waiting for a node
    does not count."""
    admission: Admission = "queue"
    """What happens to requests under overload: ``queue`` lets them wait, ``slo`` refuses those
    whose first token would be late. Requests with a deadline of their own are refused when it
    cannot be met. ``queue`` is limited by ``max_queue_s`` and ``max_waiting_requests``; ``slo``
    also answers 429 where the first token would miss the SLO of the request's class, and sends
    prompts to workers more slowly while answers miss ``slo_tpot_s``."""
    max_queue_s: float = Field(default=60.0, gt=0)
    """Maximum predicted wait of a request without a deadline of its own, in seconds. Beyond it
    requests get 429, except for a few probes."""
    max_waiting_requests: int = Field(default=256, ge=1)
    """Maximum number of waiting requests in one router process; more get 429."""
    tenants: tuple[TenantConfig, ...] = ()
    """The known tenants, in addition to ``default``."""
    keys: tuple[KeyConfig, ...] = ()
    """The known API keys."""
    keys_file: AbsolutePath = ""
    """File of API keys that ``baton keys`` writes; clients must then show a key. Baton reads it
    again whenever it changes."""
    require_key: bool = False
    """Refuse requests without a known API key, except ``/health`` and ``/live``. With a
    ``keys_file`` a key is required unless this is false."""
    max_body_bytes: int = Field(default=4 * MIB, ge=1024)
    """Maximum size of an HTTP request body, in bytes. Uploads have ``max_file_bytes`` instead."""
    strict_fields: bool = False
    """Refuse every unknown field of a request. Otherwise one that is close to a known name is
    refused, and others are ignored and named in the header ``x-baton-ignored``."""
    data_dir: str = ""
    """Folder of uploaded files and batches, which outlive the cluster; empty takes a folder for the
    HTTP address in ``$XDG_DATA_HOME/baton``, or in ``~/.local/share/baton``."""
    batch_store: str = ""
    """Place of files and batches for routers on several hosts: a folder on a volume that all of
    them share, or ``s3://bucket/prefix``; ``local`` keeps them in ``data_dir``, for routers that
    share one host. Empty is ``local``, except that ``baton router`` then answers 501 for files and
    batches. Of several hosts, Redis has their state: that needs ``redis_url`` and ``cluster_id``,
    and no other cluster may use the same place. S3's endpoint and credentials are in the
    environment (``AWS_ENDPOINT_URL_S3``, ``AWS_REGION``, ``AWS_ACCESS_KEY_ID`` …)."""
    max_file_bytes: int = Field(default=200 * MIB, ge=1024)
    """Maximum size of an uploaded file, in bytes."""
    max_tenant_file_bytes: int = Field(default=1024 * MIB, ge=1024)
    """Maximum total size of the uploaded files and batch results of one tenant, in bytes. Further
    uploads are refused, and a batch whose results find no room fails."""
    max_total_file_bytes: int = Field(default=4096 * MIB, ge=1024)
    """Maximum total size of the files and batch results of all tenants together, in bytes."""
    max_batch_in_flight: int = Field(default=64, ge=1, le=4096)
    """Maximum number of batch requests that one router process runs at once. It runs fewer while
    other traffic needs the workers."""
    batch_hours: str = ""
    """Hours of the day in which batches run, ``HH:MM-HH:MM``, such as ``22:00-06:00``; empty is the
    whole day. Outside of them a batch runs only as far as its completion window needs it."""
    batch_time_zone: str = "UTC"
    """IANA name of the time zone of ``batch_hours``, such as ``Europe/Berlin``."""
    slo_ttft_s: float = Field(default=2.0, gt=0)
    """Maximum time to the first token that counts as good, in seconds."""
    slo_tpot_s: float = Field(default=0.1, gt=0)
    """Maximum time per output token that counts as good, in seconds."""
    prices: PricesConfig = Field(default_factory=PricesConfig)
    """What tokens cost, for bills and budgets."""
    class_prices: tuple[ClassPrices, ...] = ()
    """Other prices for context-length classes, and for the lines of batches."""
    autoscaler: AutoscalerConfig = Field(default_factory=AutoscalerConfig)
    """How roles and pool sizes follow the traffic."""
    cluster_id: str = ""
    """Name of the cluster, and prefix of its Redis keys; empty takes a random name."""
    cluster_secret: str = Field(default="", pattern="^([!-~]{32,})?$", repr=False)
    """Secret that launchers, routers and workers of a cluster share: without certificates they show
    it to each other, and it is part of the names of cached blocks. Empty draws one at the start;
    with a ``redis_url`` it is kept there."""
    log_level: LogLevel = "info"
    """Lowest severity that is logged."""
    log_format: LogFormat = "text"
    """Format of log lines: text, or JSON objects with the ids of request, answer and trace."""
    log_to: LogTo = "files"
    """Where processes write their logs: to files of the run directory, or to standard output, as
    containers do. Routers of ``baton router`` write to standard error instead of files."""
    log_requests: bool = False
    """Log a line for each request that has ended: its id, class, tokens, times and outcome."""
    log_prompts: bool = False
    """Add prompt text to the lines of ``log_requests``. Prompts may hold personal data."""
    vllm_metrics: bool = False
    """Add the metrics that dashboards for vLLM and gateways read, under vLLM's names."""
    otlp_endpoint: str = ""
    """URL that receives traces and metrics of requests by OTLP over gRPC, such as
    ``http://127.0.0.1:4317``; empty sends none."""
    trace_ratio: float = Field(default=1.0, ge=0, le=1)
    """Fraction of requests that are traced, of those whose client sends no W3C traceparent."""
    client_trace_rate: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    """Maximum number of requests per second and router process that are traced because their
    client's traceparent is sampled. Of further ones, the fraction ``trace_ratio`` is traced."""
    advanced: AdvancedConfig = Field(default_factory=AdvancedConfig)
    """Settings for tests and unusual networks."""

    @field_validator("otlp_endpoint")
    @classmethod
    def _otlp(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError("otlp_endpoint must begin with http:// or https://")
        return value

    @field_validator("batch_hours")
    @classmethod
    def _hours(cls, value: str) -> str:
        if value:
            DailyHours.parse(value, "UTC")
        return value

    @field_validator("batch_time_zone")
    @classmethod
    def _zone(cls, value: str) -> str:
        time_zone(value)
        return value

    @field_validator("batch_store")
    @classmethod
    def _batch_store(cls, value: str) -> str:
        if value in ("", "local") or value.startswith("/") or _BUCKET.fullmatch(value):
            return value
        raise ValueError(f"{value!r} is neither an absolute path nor s3://bucket/prefix, nor local")

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
    def _keys_file_requires_a_key(cls, values: dict[str, Any]) -> dict[str, Any]:
        if values.get("keys_file") and "require_key" not in values:
            return {**values, "require_key": True}
        return values

    @model_validator(mode="after")
    def _rules(self) -> Config:
        rules.check(self)
        return self

    @property
    def ranks(self) -> int:
        """Number of ranks of all workers together."""
        return sum(pool.count * pool.ranks for pool in self.pools)

    @property
    def worker_metrics_ports(self) -> range:
        """Ports for the metrics page of a worker, which takes the first free one; 0 is any."""
        first = self.metrics_port
        return range(first + 1, first + 1 + MAX_METRICS_PORTS) if first else range(1)

    @property
    def supervisor_metrics_ports(self) -> range:
        """The port of the supervisor's metrics page; 0 is any."""
        return range(self.metrics_port, self.metrics_port + 1)

    def block_size_of(self, pool: PoolConfig) -> int:
        """Tokens in a KV block of a pool's workers."""
        return pool.block_size or self.block_size

    def kv_dtype_of(self, pool: PoolConfig) -> KvTypeName:
        """The type of the KV cache of a pool's workers."""
        return pool.kv_dtype or (self.dtype if self.kv_dtype == "auto" else self.kv_dtype)

    def local_prefill_of(self, context_class: ContextClass) -> LocalPrefill:
        """Whether decode workers compute the prompts of a class."""
        return context_class.local_prefill or self.local_prefill

    @property
    def computes_locally(self) -> bool:
        """Whether decode workers may compute the prompts of some class."""
        return any(self.local_prefill_of(one) != "never" for one in self.classes)

    @property
    def needs_prefill(self) -> bool:
        """Whether only prefill workers compute the prompts of some class."""
        return any(self.local_prefill_of(one) == "never" for one in self.classes)

    @property
    def lossiest_kv_dtype(self) -> KvTypeName:
        """Return the least precise KV type of all pools.

        It sets the precision of KV in the cluster.
        """
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
        # `load_config` reads the other sources. Values that another process passes on must not
        # change.
        return (init_settings,)

    def class_of(self, prompt_tokens: int) -> str:
        """Return the context-length class of a prompt."""
        return next(
            c.name for c in self.classes if c.max_tokens is None or prompt_tokens <= c.max_tokens
        )

    def slo_ttft_of(self, context_class: str) -> float:
        """The maximum time to the first token that counts as good in a class, in seconds."""
        own = next((c.slo_ttft_s for c in self.classes if c.name == context_class), None)
        return self.slo_ttft_s if own is None else own

    @property
    def daily_batch_hours(self) -> DailyHours | None:
        """The hours of batches; None: the whole day."""
        if not self.batch_hours:
            return None
        return DailyHours.parse(self.batch_hours, self.batch_time_zone)

    @property
    def data_folder(self) -> Path:
        """The folder of uploaded files and batches."""
        if self.data_dir:
            return Path(self.data_dir).expanduser().absolute()
        shared = os.environ.get("XDG_DATA_HOME")
        parent = Path(shared).expanduser() if shared else Path.home() / ".local" / "share"
        return parent.absolute() / "baton" / re.sub(r"[^A-Za-z0-9.-]", "-", self.http)

    def tenant(self, name: str) -> TenantConfig:
        """Return a tenant's settings; the defaults for a tenant that is not configured."""
        known = (tenant for tenant in self.tenants if tenant.name == name)
        return next(known, TenantConfig(name=name))

    @property
    def tenant_weights(self) -> dict[str, float]:
        """Every tenant's weight, by name."""
        return {DEFAULT_TENANT: 1.0} | {tenant.name: tenant.weight for tenant in self.tenants}


def load_config(file: Path | None = None, flags: Iterable[Flag] = (), **values: Any) -> Config:
    """Read the configuration: flags override the environment, which overrides the file. ``values``
    are flags by the name of their field; None counts as not given. Raises ConfigError, whose
    message has a line for each fault."""
    named = (
        Flag(f"--{name.replace('_', '-')}", (name,), value)
        for name, value in values.items()
        if value is not None
    )
    pools = [pool.model_dump(exclude_defaults=True) for pool in default_pools()]
    sources = Sources.read(Config, file, [*flags, *named], pools)
    faults = list(sources.faults)
    try:
        config = Config(**sources.values)
    except ValidationError as error:
        faults.extend(fault_lines(error, Config, sources))
    if faults:
        raise ConfigError("\n".join(faults))
    return config
