r"""Finds the operations that a written answer leaves to be computed.

`59+63`, `244/2`, `\binom{5}{2}` and `\int_0^3 1\,dx` are computations; `122`, `\frac{3}{4}`,
`20\%`, `1.5\times 10^3`, `3+2\sqrt{2}` and `\frac{1+\sqrt{5}}{2}` are numbers. `pending` names the
operations: an answer may contain only those that its label contains.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import gcd

SYMBOL = "symbol"
UNREDUCED = "unreduced fraction"
# limits recursion; deeper nesting is no sensible answer
MAX_DEPTH = 40
# below Python's own limit of 4300 digits
MAX_DIGITS = 1000
# a power of whole numbers with more digits counts as a number
MAX_WRITTEN_DIGITS = 15

_TOKEN = re.compile(
    r"\s+|\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+"
    r"|\*\*|<=|>=|\\[A-Za-z]+|\\.|.",
    re.DOTALL,
)
# a command with a doubled backslash
_DOUBLED = re.compile(r"\\(?=\\[A-Za-z]{2})")
_DROPPED = re.compile(
    r"\\(?:left|right|q?quad|text|mathbf|degree)(?![a-z])|\\[,!;: ()]|~|\$"
    r"|\^\s*\{?\\circ\}?|°|_\{?10\}?(?!\d)"
)
_WORDS = re.compile(r"\\(?:text|mbox)\s*\{\s*,?\s*(?:and|or)\s*\}|\b(?:and|or)\b|\\\\|&|;|\\cup|∪")
_ENVIRONMENT = re.compile(
    r"\\(begin|end)\s*\{[a-z]*matrix\}|\\(begin|end)\s*\{array\}(?:\{[lcr|]*\})?"
)
_RELATION = {*"=<>≤≥∈", "<=", ">=", "\\le", "\\leq", "\\leqslant", "\\ge", "\\geq", "\\geqslant"}
_RELATION |= {"\\lt", "\\gt", "\\in", "\\ne", "\\neq", "\\to"}
_ABOUT = {"\\approx", "≈", "\\sim", "\\simeq"}
_TIMES = {"*", "\\cdot", "\\times", "×", "·"}
_OVER = {"/", "\\div", "÷", ":"}
_SIGNS = {"+", "-", "\\pm", "±", "\\mp"}
_OPEN = {"(", "[", "{", "\\{", "\\lbrace", "\\begin"}
_CLOSE = {")", "]", "}", "\\}", "\\rbrace", "\\end"}
_ENDS = {",", "|", "\\mid", *_CLOSE, *_SIGNS, *_RELATION, *_ABOUT}
# symbols that stand for themselves, and the operation that they count as, if any
_CONSTANTS = {"e": "e", "i": "i", "\\imath": "i", "\\pi": "pi", "π": "pi"}
_CONSTANTS |= dict.fromkeys(("\\infty", "∞", "\\emptyset", "\\varnothing", "\\mathbb", "\\R"), "")
_FUNCTION_NAMES = "ln log lg exp sin cos tan cot sec csc arcsin arccos arctan"
_FUNCTIONS = {f"\\{name}" for name in _FUNCTION_NAMES.split()}
_NAME = re.compile(r"\\?[A-Za-z]+(?:_(?:\w|\{\w+\}))?'*(?:\([^()=]*\))?|\([a-z](?:,[a-z])+\)")


@dataclass(frozen=True)
class _Value:
    """A parsed value: a number, or a number times the term that `key` names."""

    # None: no number was written
    number: Fraction | None = None
    # notation of the number: whole, decimal, fraction, ten (a power of ten)
    form: str = ""
    # terms with the same key can be added; empty for plain numbers
    key: str = ""


def pending(text: str, *, every_side: bool) -> frozenset[str]:
    """The operations that `text` leaves to be computed; variables are `SYMBOL`.

    Args:
        every_side: read all sides of equations, rather than the last one.
    """
    text = _ENVIRONMENT.sub(r"\\\1\2", _DOUBLED.sub("", text)).replace("{,}", ",")
    text = _DROPPED.sub(" ", _WORDS.sub(",", text))
    tokens = [token for token in _TOKEN.findall(text) if not token.isspace()]
    found: set[str] = set()
    for statement in _split(tokens, {","}):
        # math-verify reads the part before the sign
        exact, *rough = _split(statement, _ABOUT)
        sides = _split(rough[0] if rough and (not exact or _is_name(exact)) else exact, _RELATION)
        if "=" in statement:
            sides = [sides[0], sides[-1]] if every_side and len(sides) > 1 else sides[-1:]
        for side in sides:
            if side and (len(sides) == 1 or not _is_name(side)):
                found |= _Reader(side).pending()
    return frozenset(found)


def _is_name(tokens: Sequence[str]) -> bool:
    text = "".join(tokens)
    return text not in _CONSTANTS and _NAME.fullmatch(text) is not None


def _split(tokens: Sequence[str], separators: set[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token in _OPEN) - (token in _CLOSE)
        if token in separators and depth <= 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _is_mixed(whole: _Value, factor: _Value) -> bool:
    proper = factor.form == "fraction" and factor.number is not None and factor.number < 1
    return proper and not factor.key and whole.form == "whole" and not whole.key


class _Reader:
    """Reads one expression by recursive descent."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = [*tokens, ""]
        self._at = 0
        self._depth = 0
        self._found: set[str] = set()

    def pending(self) -> set[str]:
        """The operations of the whole expression."""
        self._sum()
        while self._next():
            # unknown syntax counts as an operation
            self._found.add(self._take())
            self._sum()
        return self._found

    def _next(self) -> str:
        return self._tokens[self._at]

    def _take(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1]

    def _sum(self) -> _Value:
        terms = [self._product()]
        while self._next() in _SIGNS:
            self._take()
            terms.append(self._product())
        if len({term.key for term in terms}) < len(terms):
            self._found.add("sum")
        return terms[0] if len(terms) == 1 else _Value(key="a sum")

    def _product(self) -> _Value:
        signs = 0
        while self._next() in _SIGNS:
            self._take()
            signs += 1
        # --3 and -(-3)
        if signs > 1 or (signs and self._next() == "(" and self._tokens[self._at + 1] in _SIGNS):
            self._found.add("sign")
        above = [self._power()]
        below: list[_Value] = []
        while True:
            token = self._next()
            if token in _TIMES:
                self._take()
                above.append(self._power())
            elif token in _OVER:
                self._take()
                below.append(self._power())
            elif token and token not in _ENDS:
                at = self._at
                factor = self._power()
                if self._at == at:
                    return self._quotient(above, below)
                if not below and _is_mixed(above[-1], factor):
                    above.pop()
                    factor = replace(factor, number=Fraction(1))
                above.append(factor)
            else:
                return self._quotient(above, below)

    def _quotient(self, above: list[_Value], below: list[_Value]) -> _Value:
        upper = self._multiplied(above)
        if not below:
            return upper
        lower = self._multiplied(below)
        key = f"{upper.key}/{lower.key}" if lower.key else upper.key
        if lower.number is None:
            return replace(upper, key=key)
        number, form = self._fraction(upper, lower.number, lower.form)
        return _Value(number, form, key)

    def _multiplied(self, factors: list[_Value]) -> _Value:
        numbers = [one for one in factors if one.number is not None]
        plain = [one for one in numbers if one.form != "ten"]
        keys = sorted(one.key for one in factors if one.key)
        roots = sum(key.startswith("\\sqrt") for key in keys)
        if (
            len(plain) > 1
            or len(numbers) > len(plain) + 1
            or len(set(keys)) < len(keys)
            or roots > 1
        ):
            self._found.add("product")
        if not numbers:
            return _Value(key=" ".join(keys))
        # 1.5 * 10^3 is a decimal number
        form = "decimal" if len(numbers) > 1 else numbers[0].form
        return _Value(numbers[0].number, form, " ".join(keys))

    def _fraction(self, above: _Value, below: Fraction, form: str) -> tuple[Fraction | None, str]:
        """The number that a quotient is, if it is a fraction of whole numbers."""
        number = above.number
        if number is None:
            # for \pi/2; \pi/1 counts as a computation
            number = Fraction(1)
        elif above.form not in {"whole", "ten"} or not below or number % below == 0:
            self._found.add("division")
            return number, "decimal"
        if form != "whole" or below in {0, 1}:
            self._found.add("division")
            return number, "decimal"
        if gcd(int(number), int(below)) > 1:
            self._found.add(UNREDUCED)
        return number / below, "fraction"

    def _power(self) -> _Value:
        base = self._base()
        while self._next() in {"^", "**", "!", "\\%", "%", "_", "'"}:
            token = self._take()
            if token in {"%", "\\%"}:
                # a percentage is a literal
                base = replace(base, form="decimal") if base.number is not None else base
            elif token in {"^", "**"}:
                base = self._raised(base)
            elif token == "_":
                self._base()
                self._found.add("subscript")
            else:
                self._found.add(token)
        return base

    def _raised(self, base: _Value) -> _Value:
        negative = self._next() == "-" and bool(self._take())
        exponent = self._base()
        key = f"{base.number}{base.key}^{exponent.number}{exponent.key}"
        if base.key or base.number is None:
            if base.key not in {"e", "pi"} or base.number is not None:
                self._found.add("power")
            return _Value(key=key)
        if exponent.key or exponent.number is None:
            self._found.add("power")
            return _Value(key=key)
        if exponent.form == "fraction":
            self._found.add("root")
            return _Value(key=f"\\sqrt {key}")
        if base.form == exponent.form == "whole" and base.number == 10:
            return _Value(Fraction(10), "ten")
        digits = len(str(abs(base.number.numerator))) * min(int(abs(exponent.number)), 99)
        if base.form != "whole" or negative or digits < MAX_WRITTEN_DIGITS:
            self._found.add("power")
        return base

    def _base(self) -> _Value:
        self._depth += 1
        try:
            if self._depth > MAX_DEPTH:
                self._at = len(self._tokens) - 1
                self._found.add("nesting")
                return _Value()
            return self._read()
        finally:
            self._depth -= 1

    def _read(self) -> _Value:
        token = self._next()
        if not token or token in _CLOSE:
            return _Value()
        self._take()
        if len(token) > MAX_DIGITS:
            self._found.add("digits")
            return _Value(key=token)
        if token[0].isdecimal() or (token[0] == "." and len(token) > 1):
            plain = token.replace(",", "").rstrip(".")
            return _Value(Fraction(plain), "decimal" if "." in plain else "whole")
        if token in _OPEN:
            return self._group()
        if token == "\\frac":
            above = self._base()
            below = self._base()
            return self._quotient([above], [below])
        if token == "\\sqrt":
            return self._root()
        if token in _FUNCTIONS:
            while self._next() in {"_", "^"}:
                self._take()
                self._base()
            argument = self._power()
            self._found.add(token)
            return _Value(key=f"{token} {argument.number}{argument.key}")
        if token in _CONSTANTS:
            if token == "\\mathbb":
                self._at = min(self._at + (3 if self._next() == "{" else 1), len(self._tokens) - 1)
            elif _CONSTANTS[token]:
                self._found.add(_CONSTANTS[token])
            return _Value(key=_CONSTANTS[token] or token)
        if token.isalpha():
            self._found.add(SYMBOL)
        elif token != "\\setminus":
            self._found.add(token)
        return _Value(key=token)

    def _group(self) -> _Value:
        parts = [self._sum()]
        while self._next() and self._next() not in _CLOSE:
            token = self._take()
            if token not in {",", "|", "\\mid", *_RELATION}:
                self._found.add(token)
            parts.append(self._sum())
        if self._next():
            self._take()
        return parts[0] if len(parts) == 1 else _Value(key="a tuple")

    def _root(self) -> _Value:
        degree = _Value()
        if self._next() == "[":
            self._take()
            degree = self._group()
        before = set(self._found)
        inner = self._base()
        if "root" in self._found - before:
            self._found.add("nested root")
        self._found.add("root")
        return _Value(key=f"\\sqrt[{degree.number}]{inner.number}{inner.key}")


# --- comparison with the prompt -------------------------------------------------------------------

_MATH = re.compile(r"\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_PLAIN = re.compile(r"(?<!\S)\(*-?[\w.\\{}]+(?:\s*(?:[-+*/^=×÷·!<>]|\*\*|\)|\()+\s*[\w.\\{}]*)+")
_IN_PROMPT = re.compile(r"[=<>,;:?]|\\[lg]eq?(?![a-z])")
_LITERAL = re.compile(r"[\d.,%-]*")
_SLASHED = re.compile(r"\\[dtc]?frac\{([^{}]*)\}\{([^{}]*)\}")
# parts without effect on the value: +0, *1, /1, ^1
_PADDING = re.compile(r"[+-]0(?![\d.])|[/^]1(?![\d.])|(?<![\d.^/+-])1(?=[a-zA-Z\\])")
_ATOM = re.compile(r"\d[\d.,]*|\\[A-Za-z]+|.")
_LEADING_WORDS = re.compile(r"\A(?:[A-Za-z]{2,}\s+)+")
_NEUTRAL = re.compile(r"\\left|\\right|\\cdot|\\times|\\[,!;: ]|\\q?quad|\\text|[\s$*×·(){}\[\]]")


def repeats(prompt: str, answer: str, label: str) -> bool:
    """Whether an answer is an expression of the prompt, in any order, and the label is not."""
    if "=" not in label:
        answer = answer.rpartition("=")[2]
    written = _normal(answer)
    if _LITERAL.fullmatch(answer.strip()) or written == _normal(label):
        return False
    return written in _expressions(prompt)


@lru_cache(maxsize=64)
def _expressions(prompt: str) -> frozenset[tuple[str, ...]]:
    found = ["".join(groups) for groups in _MATH.findall(prompt)]
    found += [
        _LEADING_WORDS.sub("", run).rstrip(".") for run in _PLAIN.findall(_MATH.sub(" ", prompt))
    ]
    return frozenset(_normal(part) for one in found for part in (one, *_IN_PROMPT.split(one)))


def _normal(text: str) -> tuple[str, ...]:
    """The sorted tokens: the order of terms and factors, and brackets, do not matter."""
    text = _SLASHED.sub(r"\1/\2", text.replace("÷", "/").replace("**", "^"))
    return tuple(sorted(_ATOM.findall(_PADDING.sub("", _NEUTRAL.sub("", text)))))
