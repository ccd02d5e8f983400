r"""Which operations a written answer leaves to be computed.

`59+63`, `244/2`, `\binom{5}{2}` and `\int_0^3 1\,dx` are ways to a number; `122`, `\frac{3}{4}`,
`20\%`, `1.5\times 10^3`, `3+2\sqrt{2}` and `\frac{1+\sqrt{5}}{2}` are numbers. `pending` names the
operations: an answer may leave only those that its label leaves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd

SYMBOL = "symbol"
UNREDUCED = "unreduced fraction"
# deeper nesting is no answer, and Python's stack is finite
MAX_DEPTH = 40
# a power of whole numbers with more digits is its own shortest form
MAX_WRITTEN_DIGITS = 15

_TOKEN = re.compile(
    r"\s+|\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+|\*\*|<=|>=|\\[A-Za-z]+|\\.|.", re.DOTALL
)
# a command whose backslash was escaped once too often
_DOUBLED = re.compile(r"\\(?=\\[A-Za-z]{2})")
_DROPPED = re.compile(
    r"\\(?:left|right)(?![a-z])|\\[,!;: ()]|\\(?:q?quad|text|mathbf)(?![a-z])|~|\$|\^\s*\{?\\circ\}?|°|\\degree|_\{?10\}?(?!\d)"
)
_WORDS = re.compile(r"\\(?:text|mbox)\s*\{\s*,?\s*(?:and|or)\s*\}|\b(?:and|or)\b|\\\\|&|;|\\cup|∪")
_ENVIRONMENT = re.compile(r"\\(begin|end)\s*\{[a-z]*matrix\}|\\(begin|end)\s*\{array\}(?:\{[lcr|]*\})?")
_RELATION = {"=", "<", ">", "<=", ">=", "\\le", "\\leq", "\\ge", "\\geq", "\\lt", "\\gt", "\\in", "\\neq"}
_RELATION |= {"\\ne", "\\to", "\\leqslant", "\\geqslant", "≤", "≥", "∈"}
_ABOUT = {"\\approx", "≈", "\\sim", "\\simeq"}
_TIMES = {"*", "\\cdot", "\\times", "×", "·"}
_OVER = {"/", "\\div", "÷", ":"}
_SIGNS = {"+", "-", "\\pm", "±", "\\mp"}
_OPEN = {"(": ")", "[": ")", "{": "}", "\\{": "\\}", "\\lbrace": "\\}", "\\begin": "\\end"}
_CLOSE = {")", "]", "}", "\\}", "\\rbrace", "\\end"}
_ENDS = {",", "|", "\\mid", *_CLOSE, *_SIGNS, *_RELATION, *_ABOUT}
_CONSTANTS = {"e": "e", "i": "i", "\\pi": "pi", "π": "pi", "\\infty": "", "∞": "", "\\imath": "i"}
_CONSTANTS |= {"\\emptyset": "", "\\varnothing": "", "\\mathbb": "", "\\R": ""}
_FUNCTIONS = {f"\\{name}" for name in "ln log lg exp sin cos tan cot sec csc arcsin arccos arctan".split()}
_NAME = re.compile(r"\\?[A-Za-z]+(?:_(?:\w|\{\w+\}))?'*(?:\([^()=]*\))?|\([a-z](?:,[a-z])+\)")


@dataclass(frozen=True)
class _Value:
    """What was read: a rational number, or something named by its text."""

    number: Fraction | None = None
    form: str = ""  # of a number: whole, decimal, fraction, ten (a power of ten)
    key: str = ""  # of others; terms with the same one can be added


def pending(text: str, *, every_side: bool) -> frozenset[str]:
    """The operations that `text` leaves to be computed; variables are `SYMBOL`.

    Args:
        every_side: of equations, read all sides; else the last one.
    """
    text = _ENVIRONMENT.sub(r"\\\1\2", _DOUBLED.sub("", text)).replace("{,}", ",")
    text = _DROPPED.sub(" ", _WORDS.sub(",", text))
    tokens = [token for token in _TOKEN.findall(text) if not token.isspace()]
    found: set[str] = set()
    for statement in _split(tokens, {","}):
        # math-verify reads what stands before the sign
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
            # what the grammar does not know is an operation of its own
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
                last = above[-1]
                if last.form == "whole" and factor.form == "fraction" and not below and factor.number < 1:
                    above[-1] = _Value(last.number + factor.number, "fraction")
                else:
                    above.append(factor)
            else:
                return self._quotient(above, below)

    def _quotient(self, above: list[_Value], below: list[_Value]) -> _Value:
        number, key = self._multiplied(above)
        if not below:
            return _Value(key=key) if key else number or _Value()
        divisor, key_below = self._multiplied(below)
        if divisor is not None:
            number = self._fraction(number, divisor)
        key += f"/{key_below}" if key_below else ""
        return _Value(key=key) if key else number

    def _multiplied(self, factors: list[_Value]) -> tuple[_Value | None, str]:
        """The number among the factors, and the others by their text."""
        numbers = [one for one in factors if one.number is not None]
        plain = [one for one in numbers if one.form != "ten"]
        keys = sorted(one.key for one in factors if one.number is None)
        if len(plain) > 1 or len(numbers) > len(plain) + 1 or len(set(keys)) < len(keys):
            self._found.add("product")
        if sum(key.startswith("\\sqrt") for key in keys) > 1:
            self._found.add("product")
        if len(numbers) == 2 and len(plain) == 1:
            return _Value(numbers[0].number, "decimal"), " ".join(keys)
        return (plain or numbers or [None])[0], " ".join(keys)

    def _fraction(self, above: _Value | None, below: _Value) -> _Value:
        if above is None:
            # \pi/2; \pi/1 is to be computed
            if below.form != "whole" or below.number == 1:
                self._found.add("division")
            return below
        forms = {above.form, below.form}
        if not forms <= {"whole", "ten"} or not below.number or above.number % below.number == 0:
            self._found.add("division")
            return _Value(above.number, "decimal")
        if gcd(int(above.number), int(below.number)) > 1:
            self._found.add(UNREDUCED)
        return _Value(above.number / below.number, "fraction")

    def _power(self) -> _Value:
        base = self._base()
        while self._next() in {"^", "**", "!", "\\%", "%", "_", "'"}:
            token = self._take()
            if token in {"%", "\\%"}:
                # a percentage is a literal
                base = _Value(base.number, "decimal", base.key) if base.number is not None else base
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
        number = exponent.number
        if base.number is None:
            if base.key not in {"e", "pi"}:
                self._found.add("power")
            return _Value(key=f"{base.key}^{exponent.key or number}")
        if number is None:
            self._found.add("power")
            return _Value(key=f"{base.number}^{exponent.key}")
        if exponent.form == "fraction":
            self._found.add("root")
            return _Value(key=f"\\sqrt{base.number}")
        if base.form == "whole" and base.number == 10 and exponent.form == "whole":
            return _Value(Fraction(10), "ten")
        digits = len(str(abs(base.number.numerator))) * min(abs(number), 99)
        if base.form != "whole" or negative or digits < MAX_WRITTEN_DIGITS:
            self._found.add("power")
        return _Value(base.number, "whole")

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
            return _Value(key=f"{token} {argument.key or argument.number}")
        if token in _CONSTANTS:
            if token == "\\mathbb":
                self._base()
                self._found.discard(SYMBOL)
            elif _CONSTANTS[token]:
                self._found.add(_CONSTANTS[token])
            return _Value(key=_CONSTANTS[token] or token)
        if token.isalpha():
            self._found.add(SYMBOL)
        elif token not in {"\\setminus"}:
            self._found.add(token)
        return _Value(key=token)

    def _group(self) -> _Value:
        parts = [self._sum()]
        while self._next() and self._next() not in _CLOSE:
            token = self._take()
            if token != "," and token not in {"|", "\\mid"} and token not in _RELATION:
                self._found.add(token)
            parts.append(self._sum())
        if self._next():
            self._take()
        return parts[0] if len(parts) == 1 else _Value(key="a tuple")

    def _root(self) -> _Value:
        degree = 2
        if self._next() == "[":
            self._take()
            index = self._group()
            degree = int(index.number) if index.number is not None and index.form == "whole" else 2
        before = set(self._found)
        inner = self._base()
        if "root" in self._found - before:
            self._found.add("nested root")
        self._found.add("root")
        return _Value(key=f"\\sqrt[{degree}]{inner.key or inner.number}")


# --- the prompt -----------------------------------------------------------------------------------

_MATH = re.compile(r"\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_PLAIN = re.compile(
    r"(?<!\S)\(*-?[\w.\\{}]+(?:\s*(?:[-+*/^=×÷·!<>]|\*\*|\)|\()+\s*[\w.\\{}]*)+"
)
_IN_PROMPT = re.compile(r"[=<>,;:?]|\\[lg]eq?(?![a-z])")
_LITERAL = re.compile(r"[\d.,%-]*")
_SLASHED = re.compile(r"\\[dtc]?frac\{([^{}]*)\}\{([^{}]*)\}")
_NEUTRAL = re.compile(r"\\left|\\right|\\cdot|\\times|\\[,!;: ]|\\q?quad|\\text|[\s$*×·(){}\[\]]")


def repeats(prompt: str, answer: str, label: str) -> bool:
    """Whether an answer is an expression of the prompt, in any order, and the label is not."""
    written = _normal(answer)
    if _LITERAL.fullmatch(written) or written == _normal(label):
        return False
    return written in _expressions(prompt)


@lru_cache(maxsize=64)
def _expressions(prompt: str) -> frozenset[str]:
    found = ["".join(groups) for groups in _MATH.findall(prompt)]
    found += [run.rstrip(".") for run in _PLAIN.findall(_MATH.sub(" ", prompt))]
    return frozenset(
        _normal(part) for one in found for part in (one, *_IN_PROMPT.split(one))
    )


def _normal(text: str) -> str:
    """Characters in order: the order of terms and factors does not matter, nor do brackets."""
    text = _SLASHED.sub(r"\1/\2", text.replace("÷", "/").replace("**", "^"))
    return "".join(sorted(_NEUTRAL.sub("", text)))
