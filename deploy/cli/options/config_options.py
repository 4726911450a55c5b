"""The options of `baton serve`, made from the configuration's fields.

Importing this imports pydantic: only commands that are to run, or to show their help, do so.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from annotated_types import Ge, Le
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from baton.config.choices import MIB
from baton.config.cluster import Config
from baton.config.pools import PoolConfig
from baton.config.sources import Flag, PoolsOf
from deploy.cli.options.command_line import say
from deploy.cli.options.vllm_aliases import RENAMED, WORDS

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
    "Failure handling",
    "Observability",
)
"""In the order in which help shows them."""
_PANEL_FROM: Mapping[str, str] = MappingProxyType(
    {
        "model": "Model",
        "kv_dtype": "KV cache",
        "deterministic": "Model",
        "drafter": "Speculation",
        "http": "Network",
        "redis_url": "Cluster",
        "tls": "Security",
        "transport": "KV cache",
        "policy": "Routing and admission",
        "pools": "Workers",
        "block_size": "KV cache",
        "tool_parser": "Model",
        "request_deadline_s": "Failure handling",
        "admission": "Routing and admission",
        "tenants": "Security",
        "max_body_bytes": "Limits",
        "slo_ttft_s": "Routing and admission",
        "cluster_id": "Cluster",
        "log_level": "Observability",
    }
)
"""The panel of a field, and of those behind it up to the next one that is named here."""
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
"""Name, field, and whose pools."""
_POOL_HELP: Mapping[str, str] = MappingProxyType(
    {
        "prefill": "Number of prefill workers.",
        "decode": "Number of decode workers.",
        "prefill_tp": "Tensor parallelism of each prefill worker: ranks with a GPU each.",
        "decode_tp": "Tensor parallelism of each decode worker: ranks with a GPU each.",
        "prefill_cp": "Context parallelism of each prefill worker: ranks that divide long prompts."
        " Not with --prefill-tp.",
    }
)
"""What a pool's field means for one role."""
_TLS_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "folder": "certs",
        "certificate": "tls_certificate",
        "key": "tls_key",
        "client_ca": "client_ca",
        "redis_ca": "redis_ca",
        "clear_kv": "clear_kv",
    }
)
"""Field of ``[tls]``, and name of the option."""
_METAVARS: tuple[tuple[str, str], ...] = (
    (r"^(http|grpc|admin_http|ray_address)$", "HOST:PORT"),
    (r"_url$|^gcs_store$|_endpoint$", "URL"),
    (r"^(keys_file|tls_certificate|tls_key|client_ca|redis_ca)$", "FILE"),
    (r"^(certs|data_dir|kv_disk_path)$", "FOLDER"),
    (r"^(model|draft_model)$", "NAME|PATH"),
    (r"_per_s$|_ratio$|_fraction$", "NUMBER"),
    (r"_s$", "SECONDS"),
    (r"_mib$", "MIB"),
    (r"_bytes$", "BYTES"),
    (r"^allowed_hosts$", "HOST"),
    (r"^allowed_origins$", "ORIGIN"),
)
_LONGEST_HELP = 110
"""Characters up to which help has more than one sentence of a field's description."""


@dataclass(frozen=True, slots=True)
class ConfigOption:
    """An option, and the field that it sets."""

    flags: tuple[str, ...]
    """As they are typed, the usual one first."""
    path: tuple[str, ...]
    """The field, within a pool where there are ``pools``."""
    panel: str
    """The panel of help in which it stands; empty: help does not show it."""
    pools: PoolsOf = ""
    help: str = ""
    """Empty takes the field's description."""
    constant: Any = None
    """What the flag stands for; None where it takes a value."""

    @property
    def name(self) -> str:
        """As an identifier."""
        return self.flags[0].lstrip("-").replace("-", "_")

    @property
    def field(self) -> FieldInfo:
        """The configuration's."""
        table: Any = PoolConfig if self.pools else Config
        for part in self.path[:-1]:
            table = table.model_fields[part].annotation
        found: FieldInfo = table.model_fields[self.path[-1]]
        return found

    def given(self, value: Any) -> Flag:
        """It, with a value from the command line."""
        set_to = value if self.constant is None else self.constant
        return Flag(self.flags[0], self.path, set_to, self.pools)

    def parameter(self) -> inspect.Parameter:
        """As typer reads parameters of commands. It is None where the user has not given it."""
        kind = bool if self.constant is not None else option_type(self.field)
        flags = self.flags
        if kind is bool and self.constant is None:
            flags = tuple(f"{flag}/--no-{flag[2:]}" for flag in flags)
        settings: dict[str, Any] = {"metavar": self._metavar(kind)}
        if get_origin(kind) is Literal:
            choices = get_args(kind)
            kind = str
            settings = {
                "metavar": "|".join(choices),
                "autocompletion": lambda: list(choices),
                "callback": lambda value: self._chosen(value, choices),
            }
        for bound in self.field.metadata if kind in (int, float) else ():
            if isinstance(bound, Ge):
                settings["min"] = bound.ge
            elif isinstance(bound, Le):
                settings["max"] = bound.le
        repeatable = " Repeatable." if get_origin(kind) is list else ""
        option = typer.Option(
            *flags,
            help=f"{self.help or _help(self.field)}{_default(self.field)}{repeatable}",
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

    def _metavar(self, kind: Any) -> str | None:
        if kind is bool:
            return None
        named = (shown for pattern, shown in _METAVARS if re.search(pattern, self.name))
        return next(named, "N" if kind is int else "NUMBER" if kind is float else "TEXT")

    def _chosen(self, value: str | None, choices: Sequence[str]) -> str | None:
        """Baton's word for ``value``, which may be vLLM's."""
        if value is None or value in choices:
            return value
        word = WORDS.get(self.path[-1], {}).get(value)
        if word is None:
            *others, last = choices
            raise typer.BadParameter(f"must be {', '.join(others)} or {last}, not `{value}`")
        say(f"note: {self.flags[0]} {value}: Baton takes {word}")
        return word


def config_options() -> tuple[ConfigOption, ...]:
    """All of them: those that help shows in its order, and behind these vLLM's names."""
    own = [*_cluster_options(), *_tls_options(), *_pool_options()]
    own.sort(key=lambda option: PANELS.index(option.panel or PANELS[0]))
    renamed = (
        ConfigOption(one.flags, one.field, "", one.pools, constant=one.constant) for one in RENAMED
    )
    return (*own, *renamed)


def option_type(field: FieldInfo) -> Any:
    """The type of an option for a field; None where it is a table, or a list of tables."""
    kind = field.annotation
    if kind in (str, int, float, bool) or get_origin(kind) is Literal:
        return kind
    return list[str] if kind == tuple[str, ...] else None


def _cluster_options() -> Iterator[ConfigOption]:
    panel = PANELS[0]
    for name, field in Config.model_fields.items():
        panel = _PANEL_FROM.get(name, panel)
        if option_type(field) is not None:
            # The model is the command's argument, too, and shown as that.
            yield ConfigOption((_flag(name),), (name,), "" if name == "model" else panel)


def _tls_options() -> Iterator[ConfigOption]:
    for name, option in _TLS_OPTIONS.items():
        yield ConfigOption((_flag(option),), ("tls", name), "Security")


def _pool_options() -> Iterator[ConfigOption]:
    for option, name, pools in _POOL_OPTIONS:
        panel = "KV cache" if name == "kv_pool_mib" else "Workers"
        yield ConfigOption((_flag(option),), (name,), panel, pools, _POOL_HELP.get(option, ""))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _help(field: FieldInfo) -> str:
    """The first sentences of its description, with flags in place of fields."""
    first, *others = re.split(r"(?<=\.) (?=[A-Z`])", " ".join((field.description or "").split()))
    shown = first
    for sentence in others:
        if len(shown) + len(sentence) >= _LONGEST_HELP:
            break
        shown = f"{shown} {sentence}"
    return re.sub("``(.*?)``", lambda found: _flag_of(found[1]), shown)


def _flag_of(name: str) -> str:
    """The flag of a field; anything else stays as it is, a command in quotes."""
    if " " in name:
        return f"`{name}`"
    field = Config.model_fields.get(name)
    has_flag = field is not None and option_type(field) is not None
    return _flag(name) if has_flag or any(name == one for one, _, _ in _POOL_OPTIONS) else name


def _default(field: FieldInfo) -> str:
    value = field.default
    if value in (PydanticUndefined, None, "", ()):
        return ""
    if isinstance(value, bool):
        return f" Default: {'on' if value else 'off'}."
    if isinstance(value, float):
        return f" Default: {value:g}."
    size = f" ({value // MIB} MiB)" if isinstance(value, int) and value >= MIB else ""
    return f" Default: {value}{size}."
