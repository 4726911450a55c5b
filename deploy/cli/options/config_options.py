"""The options of `baton serve`, made from the configuration's fields.

Every field has one: a field of a table is ``--TABLE-FIELD``, and an entry of a list of tables is
``--pool FIELD=VALUE,…``. Only API keys and the cluster's secret have no option, since every user of
the machine can read a command line; ``--keys-file`` and ``--api-key-file`` name files of keys.
Importing this module imports pydantic: only commands that run, or show their help, do so.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from annotated_types import Ge, Le
from pydantic.fields import FieldInfo

from baton.config.cluster import Config
from baton.config.fields import REMOVED, RENAMED, FieldPath
from baton.config.pools import PoolConfig
from baton.config.sources import Flag, PoolsOf
from deploy.cli.options import vllm_aliases
from deploy.cli.options.command_line import say
from deploy.cli.options.field_text import default_text, placeholder, summary
from deploy.cli.options.vllm_aliases import WORDS, Refused

PANELS = (
    "Model",
    "Network",
    "Workers",
    "KV cache",
    "Speculation",
    "Routing and admission",
    "Security",
    "Cluster",
    "Limits",
    "Prices",
    "Failure handling",
    "Autoscaling",
    "Observability",
    "Advanced",
)
"""Names of the panels in the help of `baton serve`, in order."""
_PANEL_FROM: Mapping[str, str] = MappingProxyType(
    {
        "model": "Model",
        "kv_dtype": "KV cache",
        "deterministic": "Model",
        "drafter": "Speculation",
        "http": "Network",
        "routers": "Cluster",
        "tls": "Security",
        "transport": "KV cache",
        "policy": "Routing and admission",
        "pools": "Workers",
        "classes": "Routing and admission",
        "block_size": "KV cache",
        "tool_parser": "Model",
        "request_deadline_s": "Failure handling",
        "admission": "Routing and admission",
        "tenants": "Security",
        "max_body_bytes": "Limits",
        "slo_ttft_s": "Routing and admission",
        "prices": "Prices",
        "autoscaler": "Autoscaling",
        "cluster_id": "Cluster",
        "log_level": "Observability",
        "advanced": "Advanced",
    }
)
"""Help panel by field. Fields that are not listed have the panel of the last listed field before
them."""
_COMMON = frozenset(
    (
        *("revision", "served_model_name", "max_model_len", "dtype", "quantization"),
        "generation_config",
        *("tool_parser", "reasoning_parser", "http", "grpc", "admin_http"),
        *("prefill", "decode", "prefill_tp", "decode_tp", "device"),
        *("max_sequences", "chunk_tokens", "gpu_memory_fraction"),
        *("kv_pool_mib", "kv_dtype", "kv_host_mib", "transport", "drafter", "draft_model"),
        *("policy", "local_prefill", "admission", "max_queue_s", "max_waiting_requests"),
        *("slo_ttft_s", "slo_tpot_s", "request_deadline_s", "drain_deadline_s"),
        "start_deadline_s",
        *("certs", "tls_certificate", "tls_key", "keys_file", "insecure_listen"),
        *("routers", "redis_url", "insecure_redis", "ray_address", "cluster_id", "autoscaler"),
        *("log_level", "log_format", "log_to", "log_requests", "otlp_endpoint"),
    )
)
"""Names of the options that `baton serve --help` shows; --help-all shows all options."""
_LISTS: Mapping[str, str] = MappingProxyType(
    {
        "pools": "pool",
        "classes": "context_class",
        "tenants": "tenant",
        "class_prices": "class_price",
    }
)
"""Name of the option that adds one entry to a list of tables, by the field that has the list."""
_MANY_CHOICES = 10
_NO_OPTION = frozenset({"keys", "cluster_secret"})
_SHORT: Mapping[FieldPath, str] = MappingProxyType(
    {
        ("tls", "folder"): "certs",
        ("tls", "client_ca"): "client_ca",
        ("tls", "redis_ca"): "redis_ca",
        ("tls", "clear_kv"): "clear_kv",
        ("autoscaler", "enabled"): "autoscaler",
    }
)
"""Names of options that set fields of tables and omit the table's name, by the path of the
field."""
_POOL_OPTIONS: tuple[tuple[str, str, PoolsOf], ...] = (
    ("prefill", "count", "prefill"),
    ("decode", "count", "decode"),
    ("prefill_tp", "tp", "prefill"),
    ("decode_tp", "tp", "decode"),
    ("prefill_cp", "cp", "prefill"),
    ("device", "device", "all"),
    ("threads", "threads", "all"),
    ("max_sequences", "max_sequences", "all"),
    ("chunk_tokens", "chunk_tokens", "all"),
    ("kv_pool_mib", "kv_pool_mib", "all"),
    ("gpu_memory_fraction", "gpu_memory_fraction", "all"),
)
"""Name of an option, the field that it sets, and the pools for which it sets the field. `--pool`
sets all other fields of pools."""
_HELP: Mapping[str, str] = MappingProxyType(
    {
        "prefill": "Number of prefill workers; with 0, decode workers compute all prompts.",
        "decode": "Number of decode workers; at least 1.",
        "prefill_tp": "Tensor parallelism of each prefill worker: ranks with a GPU each.",
        "decode_tp": "Tensor parallelism of each decode worker: ranks with a GPU each.",
        "prefill_cp": "Context parallelism of each prefill worker: ranks that divide long prompts."
        " Not with --prefill-tp.",
        "pool": "A pool of workers, such as name=long,role=prefill,count=2, or a JSON object. It"
        " replaces the pools of the file.",
        "context_class": "A context-length class, such as name=short,max_tokens=512, or a JSON"
        " object. It replaces the classes of the file.",
        "tenant": "A tenant, such as name=team,weight=2, or a JSON object. It replaces the tenants"
        " of the file.",
        "class_price": "Prices of a context-length class or of batches, such as"
        " name=batch,input=0.07,output=0.3. It replaces the class prices of the file.",
    }
)
"""Help texts of options for which the field's description is not suitable."""


@dataclass(frozen=True, slots=True)
class ConfigOption:
    """An option, and the field that it sets."""

    flags: tuple[str, ...]
    """Flags as the user types them, the usual one first."""
    path: FieldPath
    """The path of the field in the configuration, or within a pool if there are ``pools``."""
    panel: str
    """The panel of the option in the help; empty: no help shows it."""
    pools: PoolsOf = ""
    constant: Any = None
    """The value that the flag sets; None if the flag takes a value."""

    @property
    def name(self) -> str:
        """Return the option's name as a Python identifier."""
        return self.flags[0].lstrip("-").replace("-", "_")

    @property
    def is_common(self) -> bool:
        """Whether `baton serve --help` shows the option."""
        return self.name in _COMMON

    @property
    def is_entry(self) -> bool:
        """Whether the option's value is an entry of a list of tables."""
        return not self.pools and self.path[-1] in _LISTS

    @property
    def field(self) -> FieldInfo:
        """Return the configuration's field that the option sets."""
        table: Any = PoolConfig if self.pools else Config
        for part in self.path[:-1]:
            table = table.model_fields[part].annotation
        found: FieldInfo = table.model_fields[self.path[-1]]
        return found

    def given(self, value: Any) -> Flag:
        """Return the option's flag together with the value from the command line. Raises
        typer.BadParameter."""
        if self.is_entry:
            value = [_entry_in(text, self.flags[0]) for text in value]
        set_to = value if self.constant is None else self.constant
        return Flag(self.flags[0], self.path, set_to, self.pools)

    def parameter(self) -> inspect.Parameter:
        """Return the option in the form in which typer reads parameters.

        Its value is None if the user has not given the option.
        """
        kind: Any = list[str] if self.is_entry else option_type(self.field)
        kind = bool if self.constant is not None else kind
        flags = self.flags
        if kind is bool and self.constant is None:
            flags = tuple(f"{flag}/--no-{flag[2:]}" for flag in flags)
        shown = "FIELD=VALUE,…" if self.is_entry else placeholder(self.path[-1], kind)
        settings: dict[str, Any] = {"metavar": shown}
        if get_origin(kind) is Literal:
            choices = get_args(kind)
            kind = str
            settings = {
                # A long list can be wrapped between choices, but not within one.
                "metavar": ("|" if len(choices) < _MANY_CHOICES else " | ").join(choices),
                "autocompletion": lambda: list(choices),
                "callback": lambda value: self._chosen(value, choices),
            }
        for bound in self.field.metadata if kind in (int, float) else ():
            if isinstance(bound, Ge):
                settings["min"] = bound.ge
            elif isinstance(bound, Le):
                settings["max"] = bound.le
        option = typer.Option(
            *flags,
            help=self._help(repeatable=get_origin(kind) is list),
            rich_help_panel=self.panel,
            hidden=not self.panel,
            **settings,
        )
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[kind | None, option],
        )

    def _help(self, *, repeatable: bool) -> str:
        text = _HELP.get(self.name) or summary(self.field, self._flag_of)
        default = default_text(self.field)
        text += f" Default: {default}." if default else ""
        return f"{text} Repeatable." if repeatable else text

    def _flag_of(self, name: str) -> str:
        """Return the text for ``name`` in a help text. For a field of the same table or of the
        cluster, it is the field's flag; for a command, the command in backticks.

        Other names stay as they are.
        """
        if " " in name:
            return f"`{name}`"
        for path in ((*self.path[:-1], name), (name,)):
            if path in _OPTION_PATHS:
                return option_flag(path)
        return flag_name(name) if pool_flags(name) == [flag_name(name)] else name

    def _chosen(self, value: str | None, choices: Sequence[str]) -> str | None:
        """Return Baton's name for a choice. ``value`` may be vLLM's name for the same choice."""
        if value is None or value in choices:
            return value
        word = WORDS.get(self.path[-1], {}).get(value)
        if word is None:
            *others, last = choices
            raise typer.BadParameter(f"must be {', '.join(others)} or {last}, not `{value}`")
        say(f"note: {self.flags[0]} {value}: Baton uses {word}")
        return word


def config_options() -> tuple[ConfigOption, ...]:
    """Return all options of `baton serve`. The ones that the help shows come first, in its order;
    options with vLLM's names follow."""
    own = [*_field_options(), *_pool_options()]
    own.sort(key=lambda option: PANELS.index(option.panel or PANELS[0]))
    renamed = (
        ConfigOption(one.flags, one.field, "", one.pools, constant=one.constant)
        for one in vllm_aliases.RENAMED
    )
    return (*own, *renamed)


def old_options() -> Iterator[Refused]:
    """Yield former flags of `baton serve`, for fields that were renamed or removed."""
    for old in (*RENAMED, *REMOVED):
        new = RENAMED.get(old)
        reason = (
            (f"it was removed: {REMOVED[old]}") if new is None else f"it is now {option_flag(new)}"
        )
        flag = flag_name(old[-1] if old[0] == "tls" else "_".join(old))
        yield Refused((flag,), reason, takes_value=old != ("standby",))
    yield Refused(("--no-standby",), "it is now --no-advanced-standby", takes_value=False)


def option_type(field: FieldInfo) -> Any:
    """Return the type of an option for a field; None for a table, or a list of tables."""
    kind = field.annotation
    if kind in (str, int, float, bool) or get_origin(kind) is Literal:
        return kind
    given = [one for one in get_args(kind) if one is not type(None)]
    if given == [float]:
        return float
    return list[str] if kind == tuple[str, ...] else None


def option_flag(path: FieldPath) -> str:
    """Return the flag that sets a field, or that adds one entry to a list of tables; empty for
    secrets."""
    if path[0] in _NO_OPTION:
        return ""
    if path[0] in _LISTS:
        return flag_name(_LISTS[path[0]])
    return flag_name(_SHORT.get(path) or "_".join(path))


def pool_flags(name: str) -> list[str]:
    """Return the flags, other than ``--pool``, that set this field of pools."""
    return [flag_name(option) for option, field, _ in _POOL_OPTIONS if field == name]


def flag_name(name: str) -> str:
    """Return the flag for a field's name, such as ``--max-queue-s`` for ``max_queue_s``."""
    return f"--{name.replace('_', '-')}"


def _entry_in(text: str, flag: str) -> dict[str, Any]:
    """Parse an entry of a list of tables: ``FIELD=VALUE,…``, or a JSON object, which also allows
    lists and tables as values.

    Raises typer.BadParameter. Values of the first form are strings, which the configuration parses
    like environment variables.
    """
    if text.lstrip().startswith("{"):
        try:
            table: dict[str, Any] = json.loads(text)
        except json.JSONDecodeError as error:
            raise typer.BadParameter(f"{flag}: not a JSON object: {error}") from None
        return table
    table = {}
    for part in text.split(","):
        name, equals, value = (one.strip() for one in part.partition("="))
        if not equals or not name:
            raise typer.BadParameter(
                f"{flag}: expected FIELD=VALUE,… or a JSON object, not `{part}`"
            )
        if name in table:
            raise typer.BadParameter(f"{flag}: `{name}` is given twice in `{text}`")
        table[name.replace("-", "_")] = value
    return table


def _field_options() -> Iterator[ConfigOption]:
    panel = PANELS[0]
    for name, field in Config.model_fields.items():
        panel = _PANEL_FROM.get(name, panel)
        if name in _NO_OPTION:
            continue
        table: Any = field.annotation
        if hasattr(table, "model_fields"):
            for inner in table.model_fields:
                yield ConfigOption((option_flag((name, inner)),), (name, inner), panel)
        else:
            # The model is also the command's argument, and is shown there.
            shown = "" if name == "model" else panel
            yield ConfigOption((option_flag((name,)),), (name,), shown)


def _pool_options() -> Iterator[ConfigOption]:
    for option, name, pools in _POOL_OPTIONS:
        panel = "KV cache" if name == "kv_pool_mib" else "Workers"
        yield ConfigOption((flag_name(option),), (name,), panel, pools)


_OPTION_PATHS = frozenset(option.path for option in _field_options())
