"""Checks PromQL expressions against the series that there are: names, labels, kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import promql_parser as promql

Labels = frozenset[str]
TARGET: Labels = frozenset({"job", "instance", "part"})
"""What scraping adds to every series."""
_RATES = ("rate", "increase", "irate")
_SETS = ("and", "or", "unless")
_CHOICES = ("topk", "bottomk")
"""Aggregations whose result has the labels of their argument."""


class WrongExpression(AssertionError):
    """An expression asks for what is not there."""


class Checker:
    """Knows the labels of every series by its name."""

    def __init__(self, series: Mapping[str, Labels], counters: frozenset[str]) -> None:
        """``counters`` are the names of those that only rise."""
        self._series = dict(series)
        self._counters = counters

    def add(self, name: str, labels: Labels) -> None:
        """A rule records another one."""
        self._series[name] = labels

    def check(self, expression: str) -> Labels:
        """The labels of what it gives. Raises WrongExpression; ValueError if it is no PromQL."""
        return self._labels(promql.parse(expression)) or frozenset()

    def _labels(self, node: Any) -> Labels | None:
        """None for a number, or a string."""
        visit: dict[type, Callable[[Any], Labels | None]] = {
            promql.NumberLiteral: lambda _: None,
            promql.StringLiteral: lambda _: None,
            promql.ParenExpr: lambda one: self._labels(one.expr),
            promql.UnaryExpr: lambda one: self._labels(one.expr),
            promql.SubqueryExpr: lambda one: self._labels(one.expr),
            promql.VectorSelector: self._selector,
            promql.MatrixSelector: lambda one: self._selector(one.vector_selector),
            promql.AggregateExpr: self._aggregate,
            promql.BinaryExpr: self._binary,
            promql.Call: self._call,
        }
        return visit[type(node)](node)

    def _selector(self, node: Any) -> Labels:
        if node.name not in self._series:
            raise WrongExpression(f"nobody exports {node.name}")
        labels = self._series[node.name] | TARGET
        self._has(labels, [matcher.name for matcher in node.matchers.matchers], node.name)
        return labels

    def _aggregate(self, node: Any) -> Labels:
        inner = self._labels(node.expr) or frozenset()
        if str(node.op) in _CHOICES:
            return inner
        if node.modifier is None:
            return frozenset()
        named = list(node.modifier.labels)
        self._has(inner, named, str(node.expr))
        if node.modifier.type == promql.AggModifierType.By:
            return frozenset(named)
        return inner - frozenset(named)

    def _binary(self, node: Any) -> Labels | None:
        left, right = self._labels(node.lhs), self._labels(node.rhs)
        if left is None or right is None:
            return right if left is None else left
        matching = node.modifier.matching if node.modifier is not None else None
        if matching is not None:
            self._has(left, matching.labels, str(node.lhs))
            self._has(right, matching.labels, str(node.rhs))
        elif left - TARGET != right - TARGET and str(node.op) not in _SETS:
            raise WrongExpression(f"{node}: {sorted(left)} never match {sorted(right)}")
        return left

    def _call(self, node: Any) -> Labels | None:
        found = [self._labels(argument) for argument in node.args]
        vectors = [labels for labels in found if labels is not None]
        if node.func.name in _RATES:
            name = node.args[0].vector_selector.name
            if name not in self._counters:
                raise WrongExpression(f"{name} is no counter: it has no {node.func.name}")
        if node.func.name in ("vector", "absent"):
            return frozenset()
        if node.func.name == "histogram_quantile":
            self._has(vectors[0], ["le"], str(node.args[1]))
            return vectors[0] - {"le"}
        return vectors[0] if vectors else None

    @staticmethod
    def _has(labels: Labels, wanted: list[str], where: str) -> None:
        absent = set(wanted) - labels
        if absent:
            raise WrongExpression(f"{where} has no label {', '.join(sorted(absent))}")
