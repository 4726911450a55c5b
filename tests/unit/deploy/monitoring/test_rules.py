"""Rules ask for series that there are, and every alert is described and tested."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import yaml

from baton.errors import BatonError, RateLimitExceeded, classes_by_code
from baton.telemetry.page import PAGE_LABELS
from tests.support.deploy.watched import (
    MONITORING,
    RULES,
    checker,
    checker_with_rules,
    rules,
)
from tests.support.programs import promtool

ROOT = Path(__file__).parents[4]
GUIDE = ROOT / "docs/how-to/operate/runbooks.md"
ALERTS = [rule for rule in rules() if "alert" in rule]
_LABEL = re.compile(r"\$labels\.(\w+)")
_PART = r"^\| ([A-Z][a-z ]+) \|"
_PARTS = ("Meaning", "Clients notice", "First command", "Causes and actions", "Escalate")


def _section(alert: str) -> str:
    """The section of an alert in the guide."""
    _, found, rest = GUIDE.read_text().partition(f"\n### {alert}\n")
    assert found, alert
    return re.split(r"^##", rest, maxsplit=1, flags=re.MULTILINE)[0]


def test_every_rule_asks_for_what_there_is() -> None:
    checker_with_rules()


def test_every_rule_keeps_the_cluster() -> None:
    """One sum over several clusters would hide a small one that fails."""
    known = checker_with_rules()
    without = {
        rule.get("alert", rule.get("record"))
        for rule in rules()
        if not known.check(rule["expr"]) >= set(PAGE_LABELS)
    }
    # A target is no series of a cluster, and what is absent has no labels.
    assert without == {"BatonPartDown", "BatonNothingScraped"}


def test_names_of_rules() -> None:
    records = [rule["record"] for rule in rules() if "record" in rule]
    for name in records:
        assert re.fullmatch(r"baton:[a-z0-9_]+(:[a-z0-9_]+)+", name), name
    names = Counter(records + [rule["alert"] for rule in ALERTS])
    assert [name for name, times in names.items() if times > 1] == []


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: str(rule["alert"]))
def test_each_alert_has_a_summary_and_a_runbook(rule: dict[str, object]) -> None:
    assert rule["labels"] in ({"severity": "critical"}, {"severity": "warning"})
    annotations = rule["annotations"]
    assert isinstance(annotations, dict)
    labels = checker_with_rules().check(str(rule["expr"]))
    assert set(_LABEL.findall(annotations["summary"])) <= labels
    name = str(rule["alert"])
    assert annotations["runbook_url"] == f"{GUIDE.relative_to(ROOT)}#{name.lower()}"
    assert set(_PARTS) == set(re.findall(_PART, _section(name), re.MULTILINE))


def test_the_guide_has_no_alert_that_there_is_not() -> None:
    described = set(re.findall(r"^### (Baton\w+)$", GUIDE.read_text(), re.MULTILINE))
    assert described == {rule["alert"] for rule in ALERTS}


def test_every_alert_is_tested() -> None:
    tests = yaml.safe_load((MONITORING / "rules_test.yaml").read_text())["tests"]
    fires: set[str] = set()
    stays: set[str] = set()
    for test in tests:
        for one in test.get("alert_rule_test", ()):
            (fires if one.get("exp_alerts") else stays).add(one["alertname"])
    assert fires == stays == {rule["alert"] for rule in ALERTS}


def test_a_client_fault_is_no_due_request() -> None:
    """The codes of the expressions are those of the errors that are their client's own."""
    own = {code for code, kind in classes_by_code().items() if _is_client_fault(kind)}
    found = re.findall(r'code!~"([^"]*)"', RULES.read_text())
    assert found
    for codes in found:
        assert set(codes.split("|")) == own


def _is_client_fault(kind: type[BatonError]) -> bool:
    return kind.http_status in (400, 401, 403, 404, 413) or issubclass(kind, RateLimitExceeded)


def test_the_example_names_the_jobs_that_alerts_ask_for() -> None:
    example = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
    jobs = [job["job_name"] for job in example["scrape_configs"]]
    assert all(re.fullmatch("baton-.*", job) for job in jobs)
    assert example["rule_files"] == [RULES.name]
    assert checker().check('up{job=~"baton-.*"} == 0')


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "rules.yaml"),
        pytest.param(("test", "rules", "rules_test.yaml"), marks=pytest.mark.long),
        ("check", "config", "prometheus.yaml"),
    ],
    ids=" ".join,
)
def test_promtool_takes_them(arguments: tuple[str, ...]) -> None:
    told = subprocess.run(
        [promtool(), *arguments],
        cwd=MONITORING,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr
