"""Makes docs/reference/configuration.md from the configuration's fields and the options of `baton
serve`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from baton.config.access import KeyConfig, TenantConfig
from baton.config.advanced import AdvancedConfig
from baton.config.autoscaler import AutoscalerConfig
from baton.config.cluster import Config
from baton.config.money import ClassPrices, PricesConfig
from baton.config.pools import ContextClass, PoolConfig
from baton.config.sources import variable_of
from baton.config.tls import TlsConfig
from deploy.cli.options.config_options import option_flag, pool_flags
from deploy.cli.options.field_text import default_text, type_text, unit_of

_HEAD = """# Configuration

A field comes from a flag of `baton serve`, from an environment variable, or from the TOML file of
`baton serve --config FILE`. Flags take precedence over the environment, and the environment over
the file. An error names the flag, the variable, or the file and line at fault.

`baton serve --help` shows the options that most clusters need, `--help-all` all of them. The flag
of a boolean field has a form that turns it off: `--no-log-requests` for `log_requests`. A flag
whose field is a list can be repeated. In the environment a list, and a list of tables, is JSON.

This page is made from `baton/config` by `python -m tools.config_reference`; a test keeps the two
equal.
"""
_SECTIONS: tuple[tuple[str, str, type[BaseModel], tuple[str, ...]], ...] = (
    ("The cluster", "At the top of the file.", Config, ()),
    (
        "A pool of workers",
        "A `[[pools]]` table each, or `--pool name=long,role=prefill,count=2`. `--pool` replaces"
        " all pools of the file and takes every field below; lists and tables need its JSON form,"
        ' `--pool \'{"name": "long", …}\'`. In the environment, `BATON_POOLS` is JSON.'
        " The flags in the table set a field in all pools, or in the only pool of a role.",
        PoolConfig,
        ("pools",),
    ),
    (
        "A context-length class",
        "A `[[classes]]` table each, or `--context-class name=short,max_tokens=512`, which replaces"
        " all classes of the file. In the environment, `BATON_CLASSES` is JSON.",
        ContextClass,
        ("classes",),
    ),
    ("TLS", "The `[tls]` table.", TlsConfig, ("tls",)),
    ("The autoscaler", "The `[autoscaler]` table.", AutoscalerConfig, ("autoscaler",)),
    (
        "Prices",
        "The `[prices]` table: docs/how-to/use/costs.md.",
        PricesConfig,
        ("prices",),
    ),
    (
        "Prices of a class",
        "A `[[class_prices]]` table each, or `--class-price name=batch,input=0.07`, which replaces"
        " all of the file. In the environment, `BATON_CLASS_PRICES` is JSON.",
        ClassPrices,
        ("class_prices",),
    ),
    (
        "A tenant",
        "A `[[tenants]]` table each, or `--tenant name=team,weight=2`, which replaces all tenants"
        " of the file. In the environment, `BATON_TENANTS` is JSON.",
        TenantConfig,
        ("tenants",),
    ),
    (
        "An API key",
        "A `[[keys]]` table each; `printf %s KEY | sha256sum` makes its hash. In the environment,"
        " `BATON_KEYS` is JSON. Keys have no flag, because every user of a machine can read the"
        " command lines of its processes: `--keys-file` and `--api-key-file` name files of keys.",
        KeyConfig,
        ("keys",),
    ),
    (
        "Advanced",
        "The `[advanced]` table: for tests and unusual networks. The defaults suit almost every"
        " cluster.",
        AdvancedConfig,
        ("advanced",),
    ),
)
_LISTS = ("pools", "classes", "class_prices", "tenants", "keys")
_EXAMPLE = """
## Example

```toml
model = "/models/SmolLM2-135M-Instruct"
served_model_name = "smollm2"
dtype = "bfloat16"

[[pools]]
name = "prefill"
role = "prefill"
count = 2

[[pools]]
name = "decode"
role = "decode"
kv_pool_mib = 2048
```
"""


def reference() -> str:
    """The page's text."""
    parts = [_HEAD]
    for title, where, model, path in _SECTIONS:
        parts.append(f"\n## {title}\n\n{where}\n\n{_table_head(path)}")
        parts.extend(_row((*path, name), field) for name, field in model.model_fields.items())
        parts.append("")
    return "\n".join(parts) + _EXAMPLE


def _columns(path: tuple[str, ...]) -> tuple[str, ...]:
    """Fields of entries have no variable of their own, and only those of pools have a flag."""
    sources: tuple[str, ...] = ("flag", "variable")
    if path and path[0] in _LISTS:
        sources = ("flag",) if path[0] == "pools" else ()
    return ("field", *sources, "type", "unit", "default", "meaning")


def _table_head(path: tuple[str, ...]) -> str:
    columns = _columns(path)
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def _row(path: tuple[str, ...], field: Any) -> str:
    cells = {
        "field": f"`{path[-1]}`",
        "flag": ", ".join(f"`{flag}`" for flag in _flags(path)),
        "variable": f"`{variable_of(path)}`",
        "type": type_text(field.annotation),
        "unit": unit_of(path[-1]),
        "default": _default(field),
        "meaning": " ".join((field.description or "").split()),
    }
    row = " | ".join(cells[column].replace("|", "\\|") for column in _columns(path[:-1]))
    return f"| {row} |".replace("|  |", "| |").replace("|  |", "| |")


def _flags(path: tuple[str, ...]) -> Iterator[str]:
    if len(path) == 2 and path[0] == "pools":
        yield from pool_flags(path[1])
    elif path == ("model",):
        yield from ("MODEL", option_flag(path))
    elif path[0] not in ("tls", "autoscaler", "prices", "advanced") or len(path) > 1:
        yield from filter(None, [option_flag(path)])


def _default(field: Any) -> str:
    if field.default_factory is not None:
        return "see below" if field.default_factory() else "none"
    if field.default is PydanticUndefined:
        return "must be given"
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    if isinstance(field.default, tuple) and field.default:
        return ", ".join(f"`{one}`" for one in field.default)
    text = default_text(field)
    return f"`{text}`" if text else "none"


if __name__ == "__main__":
    sys.stdout.write(reference())
