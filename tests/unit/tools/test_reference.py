"""The reference pages are what the code says."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import yaml

from baton.errors import classes_by_code
from deploy.cli.options.config_options import config_options
from deploy.cli.options.exit_codes import ExitCode
from router.access.access import scope_of_path
from tools import prose
from tools.reference import cli, errors, grpc_api, helm, http
from tools.reference.markdown import ROOT, cell, table, text
from tools.reference.pages import PAGES


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_what_the_code_says(page: str) -> None:
    assert (ROOT / page).read_text() == PAGES[page](), "run: make reference"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_keeps_the_rules_of_style(page: str) -> None:
    assert list(map(str, prose.check(page, (ROOT / page).read_text()))) == []


def test_every_command_has_a_section_with_all_of_its_options() -> None:
    page = cli.reference()
    found = cli.commands()
    assert {"baton serve", "baton keys create", "baton bench serve"} <= {one.path for one in found}
    for one in found:
        section = page.split(f"\n## {one.path}\n", 1)[1].split("\n## ")[0]
        assert f"```\n{one.path} " in section
        for parameter in one.parameters:
            shown = parameter.opts if parameter.param_type_name == "option" else []
            assert all(f"`{name}`" in section for name in shown), (one.path, parameter.name)
            assert parameter.help, (one.path, parameter.name)


def test_options_of_fields_link_to_their_fields() -> None:
    page = cli.reference()
    for option in config_options():
        if option.panel:
            place = ".".join((*(("pools",) if option.pools else ()), *option.path))
            assert f"configuration.md#{place})" in page, option.flags


def test_every_exit_code_has_a_meaning() -> None:
    meanings = cli.exit_code_meanings()
    assert set(meanings) == set(ExitCode)
    assert all(meaning.endswith(".") for meaning in meanings.values())


def test_the_page_of_commands_needs_no_torch_and_no_ray() -> None:
    program = (
        "import sys; from tools.reference import cli; cli.reference();"
        " sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)


def test_every_error_says_what_it_means_and_what_to_do() -> None:
    page = errors.reference()
    for code, kind in classes_by_code().items():
        meaning, what_to_do = errors.advice(kind)
        assert meaning.endswith("."), kind
        assert what_to_do.startswith(("Retry ", "Do not retry")), kind
        assert what_to_do.endswith("."), kind
        statuses = f"{kind.http_status}<br>`{kind.grpc_status}`<br>`{kind.error_type}`"
        assert f'<a id="{code}"></a>`{code}` | {statuses} |' in page


def test_every_endpoint_has_its_scope() -> None:
    page = http.reference()
    found = re.findall(r"^### `(\w+) (\S+)`$(.*?)(?=^##)", page, re.DOTALL | re.MULTILINE)
    assert ("POST", "/v1/chat/completions") in {(method, path) for method, path, _ in found}
    for _, path, section in found:
        scope = scope_of_path(path)
        assert f"Scope of the key: {f'`{scope}`' if scope else 'open'}." in section, path
        assert "Answer: " in section, path
    assert "['" not in page


def test_every_method_and_field_of_public_services_is_described() -> None:
    page = grpc_api.reference()
    for method in ("Generate", "Tokenize", "GetCacheStats", "DrainWorker"):
        assert f"| `{method}` |" in page
    assert '<a id="GenerateRequest.priority"></a>`priority` | optional int32 |' in page
    assert "| `PrefillService` | `Prefills` |" in page
    rows = re.findall(r"^\| `\w+` \| \[`\w+Request`\].*$", page, re.MULTILINE)
    assert rows
    assert [row for row in rows if row.endswith("| |")] == []


def test_every_value_of_the_chart_has_a_type_and_a_meaning() -> None:
    page = helm.reference()
    values = yaml.safe_load((ROOT / helm.CHART / "values.yaml").read_text())
    rows = dict(re.findall(r'^\| <a id="([\w.]+)"></a>(.*)$', page, re.MULTILINE))
    assert set(values) <= {name.partition(".")[0] for name in rows}
    for name, row in rows.items():
        _, kind, default, meaning = (part.strip() for part in row.removesuffix("|").split("|"))
        assert kind not in ("", "any"), name
        assert default, name
        assert meaning.endswith("."), name
    assert f"`{json.dumps(values['image']['repository'])}`" in rows["image.repository"]


def test_text_of_the_code_becomes_markdown() -> None:
    assert text("a ``b <c>``\n  <d>") == "a `b <c>` &lt;d>"
    assert text("see docs/explanation/security.md#keys") == (
        "see [Security](../explanation/security.md#keys)"
    )
    assert text("see docs/how-to/deploy/index.md.") == "see [Deploy](../how-to/deploy/index.md)."
    assert text("with --kv-dtype or `--http`") == "with `--kv-dtype` or `--http`"
    assert cell("`a|b` or c|d") == "<code>a&#124;b</code> or c&#124;d"


def test_a_table_leaves_out_empty_columns() -> None:
    assert table(("a", "b", "c"), [("1", "", "2"), ("3", "", "")]) == (
        "| a | c |\n| --- | --- |\n| 1 | 2 |\n| 3 | |"
    )
