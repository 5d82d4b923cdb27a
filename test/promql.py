"""Reads PromQL: the metrics, labels and functions of an expression, and the labels of its result.

It knows the grammar that docs/dashboards uses and raises ValueError for anything else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

TOKEN = re.compile(
    r"""\s*(?:
    (?P<string>"(?:[^"\\]|\\.)*")
    |(?P<range>\[(?:\$__rate_interval|(?:\d+[smhdw])+)\])
    |(?P<number>\d+(?:\.\d+)?(?![\w.]))
    |(?P<name>[a-zA-Z_:][\w:]*)
    |(?P<sign>=~|!~|!=|==|<=|>=|[-+*/=<>(){},])
    )""",
    re.VERBOSE,
)
LEVELS = (
    ("or",),
    ("and", "unless"),
    ("==", "!=", "<=", ">=", "<", ">"),
    ("+", "-"),
    ("*", "/"),
)
"""Binary operators, from the weakest to the strongest."""
SET_OPERATORS = ("or", "and", "unless")
AGGREGATIONS = {"sum", "avg", "min", "max", "count"}
MATCHINGS = ("on", "ignoring")
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


def parse(text: str) -> Node:
    """The syntax tree of an expression. Raises ValueError if the expression is not understood."""
    tokens = _Tokens(text)
    node = _binary(tokens, 0)
    tokens.finish()
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


class _Tokens:
    """The tokens of an expression, from left to right."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        at, text = 0, text.rstrip()
        while at < len(text):
            match = TOKEN.match(text, at)
            if match is None or match.lastgroup is None:
                raise ValueError(f"not PromQL: {text[at:]!r}")
            self._tokens.append((match.lastgroup, match[match.lastgroup]))
            at = match.end()

    def peek(self, *texts: str) -> bool:
        """Whether the next token is one of `texts`."""
        return bool(self._tokens) and self._tokens[0][1] in texts

    def take(self, *texts: str) -> str:
        """The next token, which must be one of `texts`."""
        if not self.peek(*texts):
            raise ValueError(f"{' or '.join(texts)} expected before {self._tokens[:3]}")
        return self._tokens.pop(0)[1]

    def maybe(self, *texts: str) -> str:
        """The next token if it is one of `texts`, otherwise an empty string."""
        return self.take(*texts) if self.peek(*texts) else ""

    def kind(self, kind: str) -> str | None:
        """The next token if it is of this kind, otherwise None."""
        if self._tokens and self._tokens[0][0] == kind:
            return self._tokens.pop(0)[1]
        return None

    def name(self) -> str:
        """The next token, which must be a name."""
        name = self.kind("name")
        if name is None:
            raise ValueError(f"a name expected before {self._tokens[:3]}")
        return name

    def names(self) -> tuple[str, ...]:
        """A list of names in parentheses."""
        found: list[str] = []
        self.take("(")
        while not self.maybe(")"):
            found.append(self.name())
            if not self.peek(")"):
                self.take(",")
        return tuple(found)

    def finish(self) -> None:
        """Raise ValueError if there is another token."""
        if self._tokens:
            raise ValueError(f"unexpected {self._tokens[:3]}")


def _binary(tokens: _Tokens, level: int) -> Node:
    if level == len(LEVELS):
        return _operand(tokens)
    left = _binary(tokens, level + 1)
    while operator := tokens.maybe(*LEVELS[level]):
        matching = tokens.maybe(*MATCHINGS)
        labels = tokens.names() if matching else ()
        many_to_one = bool(tokens.maybe("group_left"))
        if many_to_one and tokens.peek("("):
            tokens.names()
        right = _binary(tokens, level + 1)
        left = Binary(operator, left, right, matching, labels, many_to_one)
    return left


def _operand(tokens: _Tokens) -> Node:
    literal = tokens.kind("number") or tokens.kind("string")
    if literal is not None:
        return Literal(literal)
    if tokens.maybe("("):
        inner = _binary(tokens, 0)
        tokens.take(")")
        return inner
    name = tokens.name()
    if name in AGGREGATIONS:
        return _aggregation(tokens, name)
    if tokens.maybe("("):
        arguments = [_binary(tokens, 0)]
        while tokens.maybe(","):
            arguments.append(_binary(tokens, 0))
        tokens.take(")")
        return Call(name, tuple(arguments))
    return Selector(name, tuple(_matchers(tokens)), tokens.kind("range"))


def _aggregation(tokens: _Tokens, operator: str) -> Aggregation:
    grouping = tokens.maybe("by", "without")
    labels = tokens.names() if grouping else ()
    tokens.take("(")
    argument = _binary(tokens, 0)
    tokens.take(")")
    return Aggregation(operator, grouping, labels, argument)


def _matchers(tokens: _Tokens) -> Iterator[tuple[str, str, str]]:
    if not tokens.maybe("{"):
        return
    while not tokens.maybe("}"):
        label, operator = tokens.name(), tokens.take("=", "!=", "=~", "!~")
        value = tokens.kind("string")
        if value is None:
            raise ValueError(f"the value of {label} is not a string")
        yield label, operator, value[1:-1]
        if not tokens.peek("}"):
            tokens.take(",")
