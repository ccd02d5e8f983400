r"""Answers that are ways to a number, signs, and marks around numbers, checked by hand.

Rows are as in `hand_checked`. The prompt of `COMPUTED` is "What is 59+63?", of others "1+1=".
"""

# ruff: noqa: E501
from __future__ import annotations

from hand_checked import Row, rows


def ways(label: str, *responses: str) -> list[tuple[str, str]]:
    """Return the row of each response."""
    return [(response, label) for response in responses]


# what is still to be computed: as `X`, `The answer is X`, `\boxed{X}`, `#### X`, `<answer>X</answer>`, `Answer: X`
COMPUTED: list[tuple[str, str]] = [
    *ways(
        *("122",),
        *("59+63", "59 + 63", "63+59", "(59+63)", "((59)+(63))", "59 plus 63", "59＋63", "59➕63"),
        *("59 ➕ 63", "$59+63$", "$59 + 63$", r"\(59+63\)", "x=59+63", "$x = 59 + 63$"),
        *("122=59+63", "59+63=61+61", r"$59+63\approx 122$", r"$59\text{ plus }63$"),
        *(r"$\text{59+63}$", r"$\mathrm{59+63}$", r"$\{59+63\}$", r"$\left(59+63\right)$"),
        *("$59{+}63$", "$59--63$", "$--122$", "$-(-122)$", "122*1", "1*122", r"$122\cdot 1$"),
        *("2*61", "2 × 61", "2(61)", "122/1", "122.0/1", "244/2", "244÷2", "244 ÷ 2", "244:2"),
        *(r"$\frac{244}{2}$", r"$\frac{118+126}{2}$", r"$\dfrac{122}{1}$", "122 - 0", "122+0"),
        *("1.22e2*1", "122^1", "$122^{1}$", r"$\sqrt{14884}$", "$|-122|$", "$|122|$"),
        *(r"$\lfloor 122.5\rfloor$", r"$\lceil 121.5\rceil$", "$5!+2$", r"$\binom{122}{1}$"),
        *(r"$\gcd(122,244)$", r"$\max(121,122)$", r"$\sum_{i=1}^{122} 1$"),
        *(r"$\prod_{i=1}^{1} 122$", r"$\int_0^{122} 1 dx$", r"$\lim_{x\to 122} x$"),
        *(r"$\frac{d}{dx} 122x$", r"$\log_2 2^{122}$", r"$\ln e^{122}$"),
        *(r"$\det\begin{pmatrix}122&0\\0&1\end{pmatrix}$", "$1111010_2$", "100 percent of 122"),
        *("100% of 122", r"$100\%\cdot 122$", r"$12200\%\cdot 1$", "$11^2+1$", "$12200/100$"),
        *(r"$121\frac{2}{2}$", r"$61\frac{61}{1}$", r"$122\pm 0$", r"$12.2\times 10^1\cdot 1$"),
        r"$\overline{122}+0$",
    ),
    *ways("122 apples", "(59+63) apples", "59+63 apples"),
    ("$6^2$", "36"),
    *ways("1024", "$2^{10}$", "2^10", "2**10"),
    ("$5!$", "120"),
    (r"$\binom{5}{2}$", "10"),
    (r"$\log_2 8$", "3"),
    *ways("1/2", r"$\cos 60^\circ$", r"$\frac{3}{4}-\frac14$", r"$1-\frac12$", r"$\frac{1/2}{1}$"),
    *ways("2.5", "10/4", r"$\frac{10}{4}$"),
    ("5/1", "5"),
    ("$(1+1,2)$", "(2,2)"),
    ("$[0,1+1]$", "[0,2]"),
    (r"$\{1+1,3\}$", r"\{2,3\}"),
    ("$1+1, 3$", "2,3"),
    (r"$(-\infty, 1+1)\cup(3,\infty)$", r"(-\infty,2)\cup(3,\infty)"),
    *ways("x > 3", "$x > 1+2$", "$2x > 6$"),
    (r"$(x-1)(x-2)\le 0$", "[1,2]"),
    ("$2x = 10$", "x=5"),
    *ways(
        *(r"\begin{pmatrix}2\\2\end{pmatrix}",),
        r"$\begin{pmatrix}1+1\\2\end{pmatrix}$",
        r"$\begin{pmatrix}1\\1\end{pmatrix}+\begin{pmatrix}1\\1\end{pmatrix}$",
    ),
    *ways(r"\sqrt{34}", r"$\sqrt{9+25}$", r"$\sqrt{3^2+5^2}$", r"$\sqrt{2}\cdot\sqrt{17}$"),
    (r"$1+1+2\sqrt2$", r"2+2\sqrt2"),
    (r"$\sqrt{3+2\sqrt2}$", r"1+\sqrt2"),
    *ways(r"3+2\sqrt2", r"$(1+\sqrt2)^2$", r"$(1+\sqrt2)(1+\sqrt2)$"),
    (r"$\frac{\sqrt8}{\sqrt2}$", "2"),
    (r"$\pi+\pi$", r"2\pi"),
    (r"$\pi\cdot 3^2$", r"9\pi"),
    *ways("5i", "$(2+1i)(1+2i)$", "$2i+3i$"),
    ("$i^2$", "-1"),
    ("$(2i)(3)$", "6i"),
    (r"$(2\sqrt3)\cdot 3$", r"6\sqrt3"),
    (r"$\frac{6\sqrt2}{3}$", r"2\sqrt2"),
    (r"$20\%+30\%$", "50%"),
    # not that number, though it stands there
    *ways(
        *("122",),
        *(r"$\{121, 122\}$", "$121, 122$", "$[121,123]$", r"$121 \le x \le 123$"),
        *(r"$x\in\{121,122\}$", r"$x \ge 122$", r"$\pm 122$"),
    ),
]

FORMS: list[Row] = [
    # what is written out
    *rows("122", "last", True, "The answer is 122.", "59+63=122", "$59+63=122$", "~122"),
    *rows(
        *("122", "boxed!", True),
        *(r"\boxed{59+63=122}", r"\boxed{x=122}", r"\boxed{x+y=122}", r"\boxed{\approx 122}"),
        *(r"\boxed{122.}", r"\boxed{(122)}", r"\boxed{\{122\}}"),
    ),
    ("x ≈ 3.14", "3.14", "last", True),
    (r"$\pi\approx 3.14$", r"\pi", "last", True),
    (r"\boxed{3+2\sqrt{2}}", r"2\sqrt2+3", "boxed!", True),
    (r"\boxed{\frac{1+\sqrt5}{2}}", r"\frac12+\frac{\sqrt5}{2}", "boxed!", True),
    (r"\boxed{2(1+\sqrt3)}", r"2+2\sqrt3", "boxed!", True),
    (r"\boxed{\frac{4}{\sqrt2}}", r"2\sqrt2", "boxed!", True),
    *rows(r"2\pi/3", "boxed!", True, r"\boxed{\frac{2\pi}{3}}", r"\boxed{\frac{2}{3}\pi}"),
    (r"\boxed{\frac{1}{e}}", "e^{-1}", "boxed!", True),
    (r"\boxed{\frac12\ln 4}", r"\ln 2", "boxed!", True),
    (r"\boxed{2^{100}}", "1267650600228229401496703205376", "boxed!", True),
    *rows("2^{10}", "boxed!", True, r"\boxed{2^{10}}", r"\boxed{1024}"),
    (r"\boxed{2^{100}-1}", "2^{100}-1", "boxed!", True),
    (r"\boxed{10^5}", "100000", "boxed!", True),
    (r"\boxed{4i+3}", "3+4i", "boxed!", True),
    (r"\boxed{2\frac{3}{4}}", "11/4", "boxed!", True),
    *rows("11/4", "last", True, "The answer is 2 3/4", "The answer is 2¾"),
    ("The answer is ½", "1/2", "last", True),
    ("The answer is 6/8", "3/4", "last", True),
    ("The answer is 5/2", "2.5", "last", True),
    (r"\boxed{(\frac12, 3)}", "(0.5,3)", "boxed!", True),
    (r"\boxed{(-\infty, -2]\cup[3,\infty)}", r"(-\infty,-2]\cup[3,\infty)", "boxed!", True),
    (r"\boxed{\mathbb{R}\setminus\{1\}}", r"\mathbb{R}\setminus\{1\}", "boxed!", True),
    (r"\boxed{3.0\times 10^8}", "300000000", "boxed!", True),
    *rows("300000000", "last", True, "The speed is 3 × 10^8", "The speed is 3·10⁸"),
    (r"The speed is 1.5 \times 10^3", "1500", "last", True),
    (r"\boxed{12.5\%}", "12.5%", "boxed!", True),
    ("The answer is 2√3", r"2\sqrt3", "last", True),
    ("The answer is 2π", r"2\pi", "last", True),
    # small numbers are compared by their digits
    *rows(r"6.63\times10^{-34}", "boxed!", False, r"\boxed{0.0}", r"\boxed{6.64\times10^{-34}}"),
    *rows("0.0000003", "boxed!", False, r"\boxed{0}", r"\boxed{0.0000004}"),
    *rows(
        *(r"6.63\times10^{-34}", "boxed!", True),
        *(r"\boxed{6.63\times10^{-34}}", r"\boxed{6.63e-34}"),
    ),
    # only behind the thought
    ("<think>It is 122", "122", "last", False),
    *rows("122", "boxed!", False, r"<think>\boxed{122}", r"\boxed{121}<think>\boxed{122}"),
    # symbols
    ("The answer is $2(x+1)$", "2x+2", "last", True),
    (r"\boxed{(x+1)(x-1)}", "x^2-1", "boxed!", True),
]

SIGNS: list[Row] = [
    *((f"The answer is {dash}3", "-3", "last", True) for dash in "-−–—‐‑‒―－﹣➖"),
    *((f"The answer is {dash} 3", "-3", "last", True) for dash in "-−–—‐‑‒―－﹣➖"),
    *((f"The answer is {dash} 3", "3", "last", False) for dash in "-−–—"),
    *(
        (f"So we get {written}", label, "last", right)
        for written in (
            *("-$3$", "- $3$", "−$3$", "$-3$", "$- 3$", r"-\(3\)", r"– \(3\)", "minus 3"),
            *("Minus $3$", "negative 3", "negative $3$", "**-3**", "-**3**", "**- 3**", "(-3)"),
            *("`-3`", "-`3`", r"-\boxed{3}", r"− \boxed{3}", r"$-\boxed{3}$", r"\boxed{-3}"),
            *(r"\boxed{- 3}", r"\boxed{−3}", r"\boxed{–3}", r"\boxed{minus 3}"),
            *(r"\boxed{\text{negative }3}", r"\boxed{-$3$}", r"minus \boxed{3}"),
            r"x = -\boxed{3}",
        )
        for label, right in (("-3", True), ("3", False))
    ),
    *(
        (written, label, f"{place}!", right)
        for place, written in (
            ("hash", "#### - 3"),
            ("hash", "#### −3"),
            ("hash", "#### minus 3"),
            ("hash", "#### -$3"),
            ("hash", "#### $-3"),
            ("tagged", "<answer>- 3</answer>"),
            ("tagged", "<answer>–3</answer>"),
            ("tagged", "<answer>negative 3</answer>"),
            ("tagged", "<answer>-$3$</answer>"),
            ("line", "Answer: - 3"),
            ("line", "Answer: −3"),
            ("line", "Answer: minus 3"),
            ("line", "Answer: -$3$"),
            ("line", r"Answer: -\boxed{3}"),
        )
        for label, right in (("-3", True), ("3", False))
    ),
    *rows("-5", "last", True, "She lost -$5", "The balance is -€5"),
    (r"The balance is -\$5.50", "-5.5", "last", True),
    ("The answer is -.5", "-0.5", "last", True),
    ("The answer is -.5", "0.5", "last", False),
    *rows(
        *("-1/2", "last", True),
        *(r"The answer is - \frac{1}{2}", r"The answer is -$\frac{1}{2}$", "The answer is - 1/2"),
        "The answer is −½",
    ),
    ("The answer is -1 1/2", "-3/2", "last", True),
    ("The answer is - 1,234", "-1234", "last", True),
    (r"-\boxed{\frac{1}{2}}", "-1/2", "boxed!", True),
    (r"$x = -\boxed{2\sqrt{3}}$", r"-2\sqrt3", "boxed!", True),
    *rows("-3", "last", True, "- 3", "−3"),
    ("The limits are $-1$ and -$2$", "-1,-2", "last", True),
    # no signs
    *rows(
        *("-3", "last", False),
        *("It lies in a range of 2 - 3", "It lies in a range of 2–3", "The answer - 3 - is right"),
        *("So we have\n- 2\n- 3", "5 minus 3"),
    ),
    ("It lies in a range of 2 - 3", "-1", "last", False),
    *rows(
        *("3", "last", True),
        *("The answer - 3 - is right", "The answer — 3 — is right", "The answer is - 3 - right"),
        *("The answer—3", "The answer - 3", "So we have\n- 2\n- 3", "In all:\n– 3"),
        *("5 minus 2 is 3", "8 - $5$ = $3$", "A non-negative 3"),
    ),
    *rows("3", "boxed!", True, r"$5-\boxed{3}$", r"$x = 5 - 2 = \boxed{3}$"),
    (r"$5 - \boxed{3}$", "-3", "boxed!", False),
    ("5 minus 3", "2", "last", False),
    ("From 5 to -3 it is", "-3", "last", True),
]

UNREAD: list[Row] = [
    (text, label, "last", right)
    for text in (
        *("`3`", "(3)", "[3]", "*3*", "**3**", "***3***", "_3_", "__3__", "~~~3~~~", '"3"', "'3'"),
        *("“3”", "3.", "3!", "3,", "3;", "3\n", "=3", "= 3.", "≈3", "→3", "-> 3", "$3$."),
        *(r"\(3\)", r"\[3\]", "\\[\n3\n\\]", "$$3$$", "```\n3\n```", "> 3", "# 3"),
        *("The answer is `3`", "The answer is (3)", "The answer is (3).", "The answer is *3*."),
        *("The answer is **3**.", "The answer is '3'.", "The answer is “3”.", "The answer is:3"),
        *("The answer is: **3**", "**Answer**: 3", "**Answer: 3**", "*Answer:* `3`", "Answer:3"),
        *("Answer = 3", "Answer → 3", "Final answer: (3)", "Thus x=3", "Thus x = `3`"),
        *("Thus, there are **3** apples.", "So it's 3", "3 apples", "$3", "3 (three)"),
        *("Result: `3`", "So the total is *3* apples."),
    )
    for label, right in (("3", True), ("5", False))
] + [
    ("`3/4`", "3/4", "last", True),
    ("`1,234`", "1234", "last", True),
    ("**20%**", "20%", "last", True),
    ("(1, 2)", "(1,2)", "last", True),
    ("From equation (3) we get x = 5", "5", "last", True),
    ("We get 5, by equation (3).", "5", "last", True),
    ("f(3) = 5", "5", "last", True),
    ("2*3*4 = 24", "24", "last", True),
    ("We have *two* apples and **5** pears", "5", "last", True),
    ("x_1 = 5", "5", "last", True),
]

NUMBERS = [*FORMS, *SIGNS, *UNREAD]
PLACES = {
    "last": ("{}", "The answer is {}", "The answer is {}.", "To find {}, we need to perform the"),
    "boxed!": (r"\boxed{{{}}}", r"so $\boxed{{{}}}$"),
    "hash!": ("#### {}",),
    "tagged!": ("<answer>{}</answer>",),
    "line!": ("Answer: {}", "**Answer:** {}"),
}
COMPUTED_ROWS: list[Row] = [
    (form.format(text), label, place, False)
    for text, label in COMPUTED
    for place, forms in PLACES.items()
    for form in forms
]
