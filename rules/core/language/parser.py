"""From an expression's text to its tree, with errors in plain words at the character where they stand."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from lark import Lark, Token, Transformer, UnexpectedCharacters, UnexpectedEOF, UnexpectedToken
from lark.exceptions import LarkError, VisitError
from lark.tree import Meta
from lark.visitors import v_args

from .errors import ExpressionError
from .grammar import GRAMMAR
from .syntax import Binary, By, Call, Matcher, Negative, Not, Number, Option, Selector, Span, Tree, Window

#: Longer expressions are refused: nobody can read one, and the tree is walked recursively.
LONGEST = 4_000
#: Brackets of an expression that may be open at once: what walks its tree goes as deep.
DEEPEST = 100

_WORDS = MappingProxyType(
    {
        "NAME": "a name",
        "NUMBER": "a number",
        "STRING": "a quoted text",
        "LPAR": "(",
        "RPAR": ")",
        "LSQB": "[",
        "RSQB": "]",
        "LBRACE": "{",
        "RBRACE": "}",
        "COMMA": ",",
        "EQUAL": "=",
        "BY": "by",
        "OFFSET": "offset",
        "NOT": "not",
        "MINUS": "-",
    }
)
_OPERATORS = frozenset({"OR", "AND", "UNLESS", "COMPARE", "PLUS", "TIMES", "POWER"})
_OPERAND = frozenset({"NAME", "NUMBER", "LPAR"})


@v_args(meta=True)
class _Build(Transformer[Token, Tree]):
    def number(self, meta: Meta, found: list[Token]) -> Number:
        return Number(float(found[0]), _span(meta))

    def parenthesis(self, meta: Meta, found: list[Any]) -> Tree:
        tree: Tree = found[1]
        return tree

    def matcher(self, meta: Meta, found: list[Token]) -> Matcher:
        name, operator, value = found
        return Matcher(str(name), str(operator), str(value)[1:-1], _span(meta))

    def selector(self, meta: Meta, found: list[Any]) -> Selector:
        matchers = tuple(item for item in found if isinstance(item, Matcher))
        return Selector(str(found[0]), matchers, _span(meta))

    def by(self, meta: Meta, found: list[Any]) -> By:
        return By(found[0], str(found[2]), _span(meta))

    def option(self, meta: Meta, found: list[Any]) -> Option:
        return Option(str(found[0]), found[2], _span(meta))

    def call(self, meta: Meta, found: list[Any]) -> Call:
        arguments = tuple(item for item in found[1:] if item is not None and not isinstance(item, Token))
        return Call(str(found[0]), arguments, _span(meta))

    def window(self, meta: Meta, found: list[Any]) -> Window:
        numbers = [float(item) for item in found[1:] if isinstance(item, Token) and item.type == "NUMBER"]
        return Window(found[0], numbers[0], numbers[1] if len(numbers) > 1 else 0.0, _span(meta))

    def negative(self, meta: Meta, found: list[Any]) -> Negative:
        return Negative(found[1], _span(meta))

    def not_(self, meta: Meta, found: list[Any]) -> Not:
        return Not(found[1], _span(meta))

    def binary(self, meta: Meta, found: list[Any]) -> Binary:
        return Binary(str(found[1]), found[0], found[2], _span(meta))


def _span(meta: Meta) -> Span:
    return Span(meta.start_pos, meta.end_pos)


class Parser:
    """A parser of expressions. Making one takes some milliseconds; keep it for a whole file."""

    def __init__(self) -> None:
        self._lark = Lark(GRAMMAR, parser="lalr", propagate_positions=True, maybe_placeholders=False)

    def parse(self, text: str) -> Tree:
        """Return the tree of ``text``.

        Raises:
            ExpressionError: the text is empty, too long, nested too deeply or no expression.
        """
        if not text.strip():
            raise ExpressionError(0, "the expression is empty")
        if len(text) > LONGEST:
            raise ExpressionError(0, f"the expression has {len(text)} characters, more than {LONGEST}")
        if _brackets(text) > DEEPEST:
            raise ExpressionError(0, "the expression is nested too deeply")
        try:
            tree: Tree = _Build().transform(self._lark.parse(text))
        except UnexpectedCharacters as error:
            offset = error.pos_in_stream or 0
            raise ExpressionError(offset, _strange(text, offset)) from None
        except UnexpectedToken as error:
            raise _misplaced(text, error) from None
        except UnexpectedEOF:
            raise ExpressionError(len(text.rstrip()), "the expression ends too early") from None
        except RecursionError:
            raise ExpressionError(0, "the expression is nested too deeply") from None
        except VisitError as error:
            if isinstance(error.orig_exc, RecursionError):
                raise ExpressionError(0, "the expression is nested too deeply") from None
            raise
        except LarkError as error:
            raise ExpressionError(0, str(error)) from None
        return tree


def _brackets(text: str) -> int:
    """Return how many brackets are open at once at most. What is within quotes counts too: nobody nests brackets there."""
    deepest = depth = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return deepest


def _strange(text: str, offset: int) -> str:
    two, one = text[offset : offset + 2], text[offset]
    said = {"&&": "and", "||": "or", "**": "^"}.get(two)
    if said:
        return f"unexpected {two}; write {said}"
    if one == "!":
        return "unexpected !; write not"
    if one in "\"'":
        return "a text in quotes that does not end in its line, or holds a backslash"
    return f"unexpected character {one!r}"


def _misplaced(text: str, error: UnexpectedToken) -> ExpressionError:
    token = error.token
    ended = token.type == "$END"
    offset = len(text.rstrip()) if ended else token.start_pos or 0
    what = "the expression ends too early" if ended else f"unexpected {token!s}"
    allowed = set(error.accepts or error.expected)
    if token.type == "EQUAL" and "COMPARE" in allowed:
        return ExpressionError(offset, "unexpected =; write == to compare")
    if token.type in ("LSQB", "OFFSET"):
        hint = "only a signal, a call or a parenthesis can have one"
        return ExpressionError(
            offset, f"unexpected {token!s}: a window [N] stands directly behind what it is of; {hint}"
        )
    if token.type == "BY":
        return ExpressionError(
            offset, "`by` makes a vector of a signal, as in spread(loss by rank); nothing else can be split"
        )
    if token.type == "NAME" and allowed == {"RSQB"}:
        return ExpressionError(
            offset, f"unexpected {token!s}: a window counts steps; write a plain number such as [200]"
        )
    if token.type == "TIMES" and "NUMBER" in allowed and str(token) == "*" and text[offset - 1 : offset] == "*":
        return ExpressionError(offset - 1, "unexpected **; write ^ for a power")
    words = []
    if allowed >= _OPERAND:
        words.append("a signal, a number, a call or (")
        allowed -= _OPERAND | {"NOT", "MINUS"}
    if allowed & _OPERATORS:
        words.append("an operator")
        allowed -= _OPERATORS | {"MINUS", "LPAR", "LSQB", "LBRACE", "EQUAL", "BY", "OFFSET"}
    words += sorted(_WORDS[name] for name in allowed if name in _WORDS)
    if "$END" in allowed:
        words.append("the end")
    return ExpressionError(offset, f"{what}; expected {_listed(words)}" if words else what)


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
