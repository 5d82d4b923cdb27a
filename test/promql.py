"""The parts of PromQL expressions, and the labels of their results.

promql_parser reads them. It follows Prometheus's own parser, and checks names and types.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

import promql_parser
from promql_parser import (
    AggModifierType,
    AggregateExpr,
    BinaryExpr,
    Call,
    Expr,
    LabelModifierType,
    MatrixSelector,
    NumberLiteral,
    ParenExpr,
    VectorMatchCardinality,
    VectorSelector,
)

SCRAPED = frozenset({"instance", "job"})
"""Labels that Prometheus adds to each series."""

Labels = frozenset[str]
Part = TypeVar("Part", bound=Expr)


def parse(text: str) -> Expr:
    """The syntax tree of an expression, with a minute for Grafana's `$__rate_interval`.

    Raises ValueError.
    """
    return promql_parser.parse(text.replace("$__rate_interval", "1m"))


def parts(node: Expr, kind: type[Part]) -> list[Part]:
    """The parts of an expression that are of this kind."""
    found: list[Part] = []

    def visit(part: Expr) -> None:
        if isinstance(part, kind):
            found.append(part)

    promql_parser.walk(node, visit)
    return found


def result_labels(node: Expr, labels_of: Callable[[str], Collection[str]]) -> Labels | None:
    """The labels of the result; None for a number.

    `labels_of` gives the labels that a metric has before Prometheus scrapes it. Raises ValueError
    if an operator groups by a label that is not there, or if no two series could match.
    """
    match node:
        case NumberLiteral():
            return None
        case ParenExpr():
            return result_labels(node.expr, labels_of)
        case MatrixSelector():
            return result_labels(node.vector_selector, labels_of)
        case VectorSelector():
            return frozenset(labels_of(node.name or "")) | SCRAPED
        case Call():
            (labels,) = {result_labels(argument, labels_of) for argument in node.args} - {None}
            assert labels is not None
            return labels - {"le"} if node.func.name == "histogram_quantile" else labels
        case AggregateExpr():
            return _grouped(node, result_labels(node.expr, labels_of))
        case BinaryExpr():
            left, right = (result_labels(side, labels_of) for side in (node.lhs, node.rhs))
            return _matched(node, left, right)
    raise ValueError(f"nobody has checked expressions such as {node}")


def _grouped(node: AggregateExpr, labels: Labels | None) -> Labels:
    assert labels is not None
    modifier = node.modifier
    named = frozenset(modifier.labels if modifier else ())
    if named - labels:
        raise ValueError(f"{node.op} names {sorted(named - labels)}, of {sorted(labels)}")
    return labels - named if modifier and modifier.type == AggModifierType.Without else named


def _matched(node: BinaryExpr, left: Labels | None, right: Labels | None) -> Labels | None:
    """The labels of a binary operation on operands with these labels."""
    if left is None or right is None:
        return right if left is None else left
    modifier = node.modifier
    matching = modifier.matching if modifier else None
    named = frozenset(matching.labels if matching else ())
    is_on = matching is not None and matching.type == LabelModifierType.Include
    missing = named - (left & right if is_on else left | right)
    if missing:
        raise ValueError(f"{node.op} names {sorted(missing)}")
    keys = [side & named if is_on else side - named for side in (left, right)]
    if keys[0] != keys[1]:
        raise ValueError(f"{node.op} of {sorted(keys[0])} and {sorted(keys[1])}")
    one_to_one = modifier is None or modifier.card == VectorMatchCardinality.OneToOne
    return keys[0] if one_to_one and matching else left
