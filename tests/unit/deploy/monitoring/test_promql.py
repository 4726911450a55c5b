"""The checker finds what is wrong with an expression."""

from __future__ import annotations

import pytest

from tests.support.deploy.promql import Checker, WrongExpression

CHECKER = Checker(
    {
        "a_total": frozenset({"class", "code"}),
        "b_total": frozenset({"class"}),
        "h_bucket": frozenset({"class", "le"}),
        "g": frozenset({"role"}),
    },
    frozenset({"a_total", "b_total", "h_bucket"}),
)


@pytest.mark.parametrize(
    ("expression", "labels"),
    [
        ("sum by (class) (rate(a_total[5m]))", {"class"}),
        ("sum by (class) (rate(a_total[5m])) / sum by (class) (rate(b_total[5m]))", {"class"}),
        ("sum without (code, job, instance, part) (rate(a_total[5m]))", {"class"}),
        ("histogram_quantile(0.9, sum by (class, le) (rate(h_bucket[5m])))", {"class"}),
        ("(sum(rate(a_total[5m])) or vector(0)) * 2 > 1", set()),
        ("min_over_time(max by (role) (g)[5m:1m])", {"role"}),
        ("topk(3, sum by (class) (rate(a_total[5m])))", {"class"}),
        ("-sum(g) > 1 and sum(g) < 2", set()),
    ],
)
def test_what_is_right(expression: str, labels: set[str]) -> None:
    assert CHECKER.check(expression) == labels


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("rate(c_total[5m])", "nobody exports c_total"),
        ('g{class="x"}', "no label class"),
        ("sum by (code) (b_total)", "no label code"),
        ("sum(sum by (class) (a_total) * on (class) g)", "no label class"),
        ("a_total / b_total", "never match"),
        ("rate(g[5m])", "no counter"),
        ("histogram_quantile(0.9, sum by (class) (rate(h_bucket[5m])))", "no label le"),
    ],
)
def test_what_is_wrong(expression: str, says: str) -> None:
    with pytest.raises(WrongExpression, match=says):
        CHECKER.check(expression)


def test_what_is_no_promql() -> None:
    with pytest.raises(ValueError, match="unclosed"):
        CHECKER.check("sum by (class (g)")
