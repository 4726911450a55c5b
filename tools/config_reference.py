"""Makes docs/configuration.md from the configuration's own fields."""

from __future__ import annotations

import sys
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from baton.config.access import KeyConfig, TenantConfig
from baton.config.advanced import AdvancedConfig
from baton.config.autoscaler import AutoscalerConfig
from baton.config.cluster import Config
from baton.config.pools import ContextClass, PoolConfig
from baton.config.tls import TlsConfig

_HEAD = """# Configuration

Flags override the environment (`BATON_` and the field's name in capitals, with `__` before a field
of a table: `BATON_TLS__FOLDER`), which overrides the TOML file of `baton serve --config FILE`.
`baton serve` has a flag for each field of the cluster that is not a table, `--kv-dtype` for
`kv_dtype`. An error names the flag, the variable, or the file and line at fault.

This page is made from `baton/config/cluster.py` by `python -m tools.config_reference`; a test
keeps the two equal.
"""
_SECTIONS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("The cluster", "At the top of the file.", Config),
    ("A pool of workers", "A `[[pools]]` table each.", PoolConfig),
    ("A context-length class", "A `[[classes]]` table each.", ContextClass),
    ("TLS", "The `[tls]` table.", TlsConfig),
    ("The autoscaler", "The `[autoscaler]` table.", AutoscalerConfig),
    ("Advanced", "The `[advanced]` table: for tests and unusual networks.", AdvancedConfig),
    ("A tenant", "A `[[tenants]]` table each.", TenantConfig),
    (
        "An API key",
        "A `[[keys]]` table each; `printf %s KEY | sha256sum` makes its hash.",
        KeyConfig,
    ),
)
_TABLE_HEAD = "| field | type | default | meaning |\n|---|---|---|---|"
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
    for title, where, model in _SECTIONS:
        parts.append(f"\n## {title}\n\n{where}\n\n{_TABLE_HEAD}")
        parts.extend(_row(name, field) for name, field in model.model_fields.items())
        parts.append("")
    return "\n".join(parts) + _EXAMPLE


def _row(name: str, field: Any) -> str:
    kind = str(getattr(field.annotation, "__name__", field.annotation))
    if kind in ("Literal", "tuple", "dict", "Union"):
        kind = str(field.annotation)
    for long, short in (("typing.", ""), ("baton.config.cluster.", ""), ("NoneType", "None")):
        kind = kind.replace(long, short)
    text = " ".join((field.description or "").split())
    return f"| `{name}` | {kind.replace('|', 'or')} | {_default(field)} | {text} |"


def _default(field: Any) -> str:
    if field.default_factory is not None:
        value = field.default_factory()
        return "see below" if value else "none"
    if field.default is PydanticUndefined:
        return "must be given"
    return f"`{field.default}`" if field.default not in ("", None) else "none"


if __name__ == "__main__":
    sys.stdout.write(reference())
