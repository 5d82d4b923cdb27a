"""Reads PromQL: the metrics, labels and functions of an expression, and the labels of its result.

It knows the grammar that docs/dashboards uses and raises ValueError for anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from lark import Lark, Token, Transformer, v_args
from lark.exceptions import LarkError

GRAMMAR = r"""
?start: start OR _match conjunction -> binary | conjunction
?conjunction: conjunction AND _match comparison -> binary | comparison
?comparison: comparison COMPARE _match sum -> binary | sum
?sum: sum ADD _match product -> binary | product
?product: product MULTIPLY _match operand -> binary | operand
?operand: "(" start ")" | literal | selector | call | aggregation

_match: [MATCHING labels [GROUP_LEFT [labels]]]
labels: "(" (NAME ("," NAME)* ","?)? ")"
literal: NUMBER | STRING
selector: NAME [matchers] [RANGE]
matchers: "{" (matcher ("," matcher)* ","?)? "}"
matcher: NAME EQUAL STRING
call: NAME "(" start ("," start)* ")"
aggregation: AGGREGATION [GROUPING labels] "(" start ")"

OR: /or(?![\w:])/
AND: /(and|unless)(?![\w:])/
COMPARE: /[=!<>]=|[<>]/
ADD: /[-+]/
MULTIPLY: /[*\/]/
EQUAL: /=~|!~|!=|=/
MATCHING.2: /(on|ignoring)(?![\w:])/
GROUP_LEFT.2: /group_left(?![\w:])/
AGGREGATION.2: /(sum|avg|min|max|count)(?![\w:])/
GROUPING: /(by|without)(?![\w:])/
NAME: /[a-zA-Z_:][\w:]*/
NUMBER: /\d+(\.\d+)?(?![\w.])/
STRING: /"([^"\\]|\\.)*"/
RANGE: /\[(\$__rate_interval|(\d+[smhdw])+)\]/
%ignore /\s+/
"""
SET_OPERATORS = ("or", "and", "unless")
SCRAPED = frozenset({"instance", "job"})
"""Labels that Prometheus adds to each series."""

Labels = frozenset[str]


@dataclass(frozen=True)
class Literal:
    """A number or a string."""

    text: str


@dataclass(frozen=True)
class Selector:
    """A metric with label matchers; `range` is None for an instant vector."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...]
    """Label, operator and value of each matcher."""
    range: str | None


@dataclass(frozen=True)
class Call:
    """A function with its arguments."""

    function: str
    arguments: tuple[Node, ...]


@dataclass(frozen=True)
class Aggregation:
    """An aggregation; `grouping` is `by`, `without` or empty."""

    operator: str
    grouping: str
    labels: tuple[str, ...]
    argument: Node


@dataclass(frozen=True)
class Binary:
    """A binary operation; `matching` is `on`, `ignoring` or empty."""

    operator: str
    left: Node
    right: Node
    matching: str
    labels: tuple[str, ...]
    many_to_one: bool


Node = Literal | Selector | Call | Aggregation | Binary


@v_args(inline=True)
class _Nodes(Transformer[Token, Node]):
    """Makes nodes of the rules of the grammar; a part that is not there is None."""

    def literal(self, text: Token) -> Node:
        return Literal(str(text))

    def labels(self, *names: Token) -> tuple[str, ...]:
        return tuple(map(str, names))

    def matchers(self, *matchers: tuple[str, str, str]) -> tuple[tuple[str, str, str], ...]:
        return matchers

    def matcher(self, label: Token, operator: Token, value: Token) -> tuple[str, str, str]:
        return str(label), str(operator), value[1:-1]

    def selector(
        self,
        metric: Token,
        matchers: tuple[tuple[str, str, str], ...] | None,
        range_: Token | None,
    ) -> Node:
        return Selector(str(metric), matchers or (), range_ and str(range_))

    def call(self, function: Token, *arguments: Node) -> Node:
        return Call(str(function), arguments)

    def aggregation(
        self,
        operator: Token,
        grouping: Token | None,
        labels: tuple[str, ...] | None,
        argument: Node,
    ) -> Node:
        return Aggregation(str(operator), str(grouping or ""), labels or (), argument)

    def binary(
        self,
        left: Node,
        operator: Token,
        matching: Token | None,
        labels: tuple[str, ...] | None,
        group_left: Token | None,
        _: tuple[str, ...] | None,
        right: Node,
    ) -> Node:
        many_to_one = group_left is not None
        return Binary(str(operator), left, right, str(matching or ""), labels or (), many_to_one)


_parser = Lark(GRAMMAR, parser="lalr", transformer=_Nodes())


def parse(text: str) -> Node:
    """The syntax tree of an expression. Raises ValueError if the expression is not understood."""
    try:
        node: Node = _parser.parse(text)  # type: ignore[assignment]
    except LarkError as error:
        raise ValueError(f"not PromQL: {error}") from None
    return node


def walk(node: Node) -> Iterator[Node]:
    """The node and all nodes below it."""
    yield node
    match node:
        case Call(arguments=below):
            pass
        case Aggregation(argument=argument):
            below = (argument,)
        case Binary(left=left, right=right):
            below = (left, right)
        case _:
            below = ()
    for child in below:
        yield from walk(child)


def result_labels(node: Node, labels_of: Callable[[str], Collection[str]]) -> Labels | None:
    """The labels of the result; None for a number.

    `labels_of` gives the labels that a metric has before Prometheus scrapes it. Raises ValueError
    if an operator groups by a label that is not there, or if no two series could match.
    """
    match node:
        case Literal():
            return None
        case Selector(metric=metric):
            return frozenset(labels_of(metric)) | SCRAPED
        case Call(function=function, arguments=arguments):
            (labels,) = {result_labels(argument, labels_of) for argument in arguments} - {None}
            assert labels is not None
            return labels - {"le"} if function == "histogram_quantile" else labels
        case Aggregation():
            return _grouped(node, result_labels(node.argument, labels_of))
        case Binary():
            left, right = (result_labels(side, labels_of) for side in (node.left, node.right))
            return _matched(node, left, right)


def _grouped(node: Aggregation, labels: Labels | None) -> Labels:
    if labels is None:
        raise ValueError(f"{node.operator} of a number")
    named = frozenset(node.labels)
    if named - labels:
        raise ValueError(f"{node.operator} names {sorted(named - labels)}, of {sorted(labels)}")
    return labels - named if node.grouping == "without" else named


def _matched(node: Binary, left: Labels | None, right: Labels | None) -> Labels | None:
    """The labels of a binary operation on operands with these labels."""
    if left is None or right is None:
        return right if left is None else left
    named = frozenset(node.labels)
    missing = named - (left & right if node.matching == "on" else left | right)
    if missing:
        raise ValueError(f"{node.operator} {node.matching} names {sorted(missing)}")
    keys = [
        side & named if node.matching == "on" else side - named if node.matching else side
        for side in (left, right)
    ]
    if keys[0] != keys[1]:
        raise ValueError(f"{node.operator} of {sorted(keys[0])} and {sorted(keys[1])}")
    one_to_one = not (node.many_to_one or node.operator in SET_OPERATORS)
    return keys[0] if one_to_one and node.matching else left
