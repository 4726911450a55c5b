"""Makes docs/reference/configuration.md from the configuration's fields and the options of `baton
serve`."""

from __future__ import annotations

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
from tools.reference.markdown import anchor, cell, code, made_from, option_place, table, text

_EXAMPLES = (
    ("`max_queue_s`", "`--max-queue-s 5`", "`BATON_MAX_QUEUE_S=5`", "`max_queue_s = 5`"),
    (
        "`log_requests`, a boolean",
        "`--log-requests` or `--no-log-requests`",
        "`BATON_LOG_REQUESTS=true`",
        "`log_requests = true`",
    ),
    (
        "`allowed_hosts`, a list",
        "`--allowed-hosts a --allowed-hosts b`",
        '`BATON_ALLOWED_HOSTS=["a", "b"]`',
        '`allowed_hosts = ["a", "b"]`',
    ),
    (
        "`folder` of the table `tls`",
        "`--certs certs`",
        "`BATON_TLS__FOLDER=certs`",
        '`folder = "certs"` below `[tls]`',
    ),
    (
        "`max_decode` of the table `autoscaler`",
        "`--autoscaler-max-decode 4`",
        "`BATON_AUTOSCALER__MAX_DECODE=4`",
        "`max_decode = 4` below `[autoscaler]`",
    ),
    (
        "an entry of the list `pools`",
        "`--pool name=long,role=prefill,count=2`, repeatable",
        '`BATON_POOLS=[{"name": "long", …}]` with all entries',
        "a `[[pools]]` table",
    ),
)
"""Example fields, one of each type. For each, how it is set: by an option, by an environment
variable, and in the file."""
_HEAD = f"""# Configuration

A field comes from an option of [`baton serve`](cli.md#baton-serve), from an environment variable,
or from the TOML file of `baton serve --config FILE`. Options take precedence over the
environment, and the environment over the file. An error names the option, the variable, or the
file and line at fault.

{table(("field", "option", "variable", "in the file"), _EXAMPLES)}

- **Variables** begin with `BATON_`. The variable of a field in a table has the name of the table
  and the name of the field, with two underscores between them. Lists, and lists of tables, are
  JSON.
- **Options** have hyphens instead of underscores, and the name of the table comes first; the
  tables below show the exceptions. `baton serve --help` shows the options that most clusters
  need, `--help-all` all of them.
- **Old names** of a field or an option are refused with the new one.
- **Secrets** have no option, because every user of a machine can read the command lines of its
  processes.

The first column of each table has the field, its options and its variable.

{made_from("`baton/config`")}
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
        "The `[prices]` table. docs/how-to/use/costs.md describes what it is for.",
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
_COLUMNS = ("field, option, variable", "type", "default", "meaning")
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
    """Return the Markdown text of the page on configuration fields."""
    parts = [_HEAD]
    for title, where, model, path in _SECTIONS:
        rows = (_row((*path, name), field) for name, field in model.model_fields.items())
        parts.append(f"\n## {title}\n\n{text(where)}\n\n{table(_COLUMNS, rows)}\n")
    return "".join(parts) + _EXAMPLE


def place_of(path: tuple[str, ...]) -> str:
    """Return the anchor of a field on the configuration page."""
    return ".".join(path)


def _row(path: tuple[str, ...], field: Any) -> tuple[str, ...]:
    names = [f"{anchor(place_of(path))}`{path[-1]}`", *map(_option, _flags(path))]
    # An entry of a list has no variable of its own.
    if len(path) == 1 or path[0] not in _LISTS:
        names.append(code(variable_of(path)))
    kind, unit = type_text(field.annotation), unit_of(path[-1])
    return (
        "<br>".join(names),
        cell(f"{kind}, {unit}" if unit else kind),
        _default(path, field),
        cell(field.description or ""),
    )


def _option(flag: str) -> str:
    """Return an option as Markdown, with a link to its place on the page of commands."""
    if flag in ("MODEL", "--model"):
        # The page of commands has the argument.
        return code(flag)
    return f"[{code(flag)}](cli.md#{option_place('baton serve', flag)})"


def _flags(path: tuple[str, ...]) -> Iterator[str]:
    if len(path) == 2 and path[0] == "pools":
        yield from pool_flags(path[1])
    elif path == ("model",):
        yield from ("MODEL", option_flag(path))
    elif path[0] not in ("tls", "autoscaler", "prices", "advanced") or len(path) > 1:
        yield from filter(None, [option_flag(path)])


def _default(path: tuple[str, ...], field: Any) -> str:
    if field.default_factory is not None:
        title = next((title for title, _, _, where in _SECTIONS if where == path), "")
        place = title.lower().replace(" ", "-")
        return f"[below](#{place})" if field.default_factory() else "none"
    if field.default is PydanticUndefined:
        return "must be given"
    if isinstance(field.default, bool):
        return code(str(field.default).lower())
    if isinstance(field.default, tuple) and field.default:
        return ", ".join(map(code, field.default))
    shown = default_text(field)
    return code(shown) if shown else "none"
