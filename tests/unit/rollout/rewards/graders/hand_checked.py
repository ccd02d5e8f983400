r"""Answers of the kinds that models give, checked by hand: (response, label, place, right).

A place is `last`, `boxed`, `hash`, `tagged` or `line`; with a `!` behind it, strict. `right` is what
a fair teacher says, whatever the grader does: a way to a number is not yet the number.
"""

# ruff: noqa: E501
from __future__ import annotations

Row = tuple[str, str, str, bool]


def rows(label: str, place: str, right: bool, *responses: str) -> list[Row]:
    """Return the row of each response."""
    return [(response, label, place, right) for response in responses]


LAST: list[Row] = [
    # plain numbers
    *rows(
        *("42", "last", True),
        *("42", "The answer is 42", "The answer is 42.", "So we get 6 * 7 = 42", "6*7=42"),
        *("First 12, then 30, so 42 in all.", "The answer is **42**.", "**Answer: 42**"),
        "The final answer is 42. I hope it is correct.",
        *("Final Answer: The final answer is $42$. I hope it is correct.", "The answer is 042"),
        *("The answer is 42.0", "The answer is 42.00", "The answer is +42"),
    ),
    *rows(
        *("42", "last", False),
        *("The answer is 41", "", "I do not know.", "forty-two", "The answer is 42.5"),
    ),
    # negative
    *rows(
        *("-3", "last", True),
        *("The answer is -3", "The answer is $-3$", "x = -3", "The answer is −3"),
    ),
    ("The answer is 3", "-3", "last", False),
    ("The temperature fell to -7 degrees.", "-7", "last", True),
    # thousands
    *rows(
        *("1234", "last", True),
        *("The total is 1,234", "The total is $1{,}234$", "The total is 1 234"),
    ),
    ("The total is 1234", "1,234", "last", True),
    ("The total is 1,234,567.", "1234567", "last", True),
    ("The total is $12,500$.", "12500", "last", True),
    ("The total is 1,234.50", "1234.5", "last", True),
    # money
    *rows(
        *("18", "last", True),
        *("She earns $18 a day.", r"She earns \$18 a day.", r"It costs $\$18$."),
        *("It costs 18 dollars.", "It costs €18.", "It costs £18"),
    ),
    ("It costs $5.50", "5.5", "last", True),
    ("It costs $1,250.", "1250", "last", True),
    ("It costs $18, not $20", "18", "last", False),
    # units
    *rows("12", "last", True, "He ran 12 km.", "He ran 12km"),
    *rows("24", "last", True, "The area is 24 cm^2", r"The area is $24 \text{ cm}^2$"),
    (r"The speed is $60 \text{ km/h}$", "60", "last", True),
    *rows(
        *("45", "last", True),
        *("The angle is 45 degrees", r"The angle is $45^\circ$", r"The angle is $45^{\circ}$"),
        "The angle is 45°",
    ),
    ("There are 7 apples left.", "7", "last", True),
    ("It takes 3 hours and 20 minutes", "3", "last", False),
    # percent
    *rows(
        *("20", "last", True),
        *("The share is 20%", r"The share is $20\%$", "The share is 20 percent"),
    ),
    *rows("20%", "last", True, "The share is 20%", "The share is 0.2"),
    (r"The share is 20\%", r"20\%", "last", True),
    ("The share is 2%", "20%", "last", False),
    # fractions and decimals
    ("The answer is 1/2", r"\frac{1}{2}", "last", True),
    *rows(
        *("1/2", "last", True),
        *("The answer is 0.5", r"The answer is $\frac12$", "The answer is 2/4"),
        "The answer is .5",
    ),
    (r"The answer is $\frac{1}{2}$", "0.5", "last", True),
    *rows("3/4", "last", True, r"The answer is $\dfrac{3}{4}$", r"The answer is $\tfrac{3}{4}$"),
    *rows("-1/3", "last", True, r"The answer is $-\frac{1}{3}$", r"The answer is $\frac{-1}{3}$"),
    ("The answer is 0.333", "1/3", "last", False),
    *rows("3/2", "last", True, r"The answer is $1\frac{1}{2}$", "The answer is 1 1/2"),
    ("The answer is 3:4", "3:4", "last", True),
    # scientific notation
    *rows("1500", "last", True, r"The answer is $1.5 \times 10^3$", "The answer is 1.5e3"),
    (r"The answer is $3 \cdot 10^{-4}$", "0.0003", "last", True),
    *rows("1024", "last", False, "The answer is $2^{10}$", "The answer is 2^10"),
    # roots, pi, expressions
    (r"The answer is $\sqrt{8}$", r"2\sqrt{2}", "last", True),
    (r"The answer is $2\sqrt2$", r"\sqrt{8}", "last", True),
    (r"The answer is $\pi/2$", r"\frac{\pi}{2}", "last", True),
    ("The answer is $3.14$", r"\pi", "last", False),
    ("The answer is $2x+2$", "2(x+1)", "last", True),
    ("The answer is $(x+1)(x-1)$", "x^2-1", "last", True),
    ("The answer is $x^2+1$", "x^2-1", "last", False),
    ("The answer is $5!$", "120", "last", False),
    (r"The answer is $\binom{5}{2}$", "10", "last", False),
    ("The answer is $3+4i$", "3+4i", "last", True),
    (r"The answer is $\log_2 8$", "3", "last", False),
    (r"The answer is $\infty$", r"\infty", "last", True),
    # equations
    ("The answer is $x = 5$", "5", "last", True),
    ("The answer is $5$", "x=5", "last", True),
    ("Therefore $y = 2x + 3$", "y=2x+3", "last", True),
    ("Therefore $y = 2x - 3$", "y=2x+3", "last", False),
    # sets, intervals, tuples, matrices
    (r"The answer is $\{1, 2, 3\}$", r"\{3, 2, 1\}", "last", True),
    (r"The answer is $\{1, 2\}$", r"\{1, 2, 3\}", "last", False),
    ("The answer is $(1, 2)$", "(1,2)", "last", True),
    ("The answer is $(2, 1)$", "(1,2)", "last", False),
    ("The answer is $[0, 1]$", "[0,1]", "last", True),
    ("The answer is $[0, 1)$", "[0,1)", "last", True),
    ("The answer is $(0, 1]$", "[0,1]", "last", False),
    (r"The answer is $(-\infty, 2) \cup (3, \infty)$", r"(-\infty,2)\cup(3,\infty)", "last", True),
    *rows("[1,2]", "last", True, r"The answer is $x \in [1, 2]$", r"The answer is $1 \le x \le 2$"),
    ("The answer is $x > 3$", "x > 3", "last", True),
    ("The answer is $x < 3$", "x > 3", "last", False),
    (
        r"The answer is $\begin{pmatrix} 1 \\ 2 \end{pmatrix}$",
        r"\begin{pmatrix}1\\2\end{pmatrix}",
        "last",
        True,
    ),
    *rows(
        *("1,2", "last", True),
        *("The answers are $1, 2$", "The answers are $2$ and $1$"),
        "The solutions are $x = 1$ or $x = 2$",
    ),
    (r"The answer is $\pm 3$", r"\pm 3", "last", True),
    (r"The answer is $\emptyset$", r"\emptyset", "last", True),
    # boxed, read by default
    *rows(
        *("42", "last", True),
        *(r"\boxed{42}", r"Hence $\boxed{42}$.", r"Hence \[\boxed{42}\]"),
        *(r"Hence \(\boxed{42}\).", r"\boxed{42} and so there are 7 days in a week."),
        *(r"First \boxed{41}. Wait, I made an error. \boxed{42}", r"\boxed{42 \text{ apples}}"),
        *(r"\boxed{\$42}", r"\boxed{42\%}", r"$$\boxed{x = 42}$$", r"\boxed{ 42 }", r"\fbox{42}"),
    ),
    (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{\sqrt{2}}{2}", "last", True),
    # thinking
    *rows(
        *("42", "last", True),
        *("<think>Maybe 41?</think>The answer is 42", "Maybe 41?</think>\n\n\\boxed{42}"),
    ),
    *rows(
        *("42", "last", False),
        *(r"<think>It is \boxed{42}</think>The answer is 41", "<think>It is 42, I think"),
    ),
    # several candidates: the last one counts
    *rows(
        *("34", "last", True),
        *("maybe 12 or 34", "Answer: 34", "The answer is 34, since 12 are gone."),
    ),
    ("34 maybe 12", "34", "last", False),
    # Chinese
    *rows(
        "42",
        "last",
        True,
        "答案是42。",
        "答案是 42。",
        "所以答案是$42$。",
        r"因此，$\boxed{42}$。",
        "答案：４２",
    ),
    ("共有1，234个", "1234", "last", True),
    # GSM8K as it is
    (
        "She has 12 + 60 = 72 clips. #### 72",
        "Natalia sold 48/2 = <<48/2=24>>24 clips.\n#### 72",
        "last",
        True,
    ),
    ("#### 71", "Natalia sold clips.\n#### 72", "last", False),
    (
        "She makes 9 * 2 = $18.\n#### 18",
        "Janet makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18",
        "last",
        True,
    ),
    ("The total is 1,250.", "... so $1,250.\n#### 1,250", "last", True),
]

BOXED: list[Row] = [
    *rows(
        *("42", "boxed!", True),
        *(r"\boxed{42}", r"The answer is $\boxed{42}$.", r"\boxed{\text{42}}"),
        *(r"\boxed{\mathbf{42}}", r"\boxed{42.}", r"\boxed{$42$}", r"\boxed{\$42}"),
        *(r"\boxed{$42}", r"\boxed{42^\circ}", r"\boxed{42°}", r"\boxed{42\text{ km/h}}"),
        *(r"\boxed{42 km}", r"\boxed {42}", r"**\boxed{42}**"),
        *(r"<think>\boxed{41}</think>\boxed{42}", r"答案是\boxed{４２}。"),
    ),
    *rows(
        *("42", "boxed!", False),
        *("The answer is 42", r"\boxed{42", r"\boxed{}", r"<think>\boxed{42}</think>It is 42"),
    ),
    ("The answer is 42", "42", "boxed", True),
    (r"\boxed{42", "42", "boxed", False),
    *rows(
        *("34", "boxed!", False),
        *(r"\boxed{12} or \boxed{34}", r"\boxed{34} or \boxed{12}", "maybe 12 or 34"),
        *(r"\boxed{12 or 34}", r"\boxed{12, 34}"),
    ),
    *rows(
        *("1,-2", "boxed!", True),
        r"\[ \boxed{-2} \quad \text{and} \quad \boxed{1} \]",
        r"The roots are $\boxed{1}$ and $\boxed{-2}$.",
    ),
    *rows(
        *("34", "boxed!", True),
        *(r"\boxed{12}. Let me check: \boxed{34}", r"\boxed{34}, let me check: \boxed{12"),
    ),
    (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt3}{2}", "boxed!", True),
    *rows(r"\{1,2\}", "boxed!", True, r"\boxed{\left\{1, 2\right\}}", r"\boxed{\{1, 2\}}"),
    *rows("1234", "boxed!", True, r"\boxed{1,234}", r"\boxed{1{,}234}", r"\boxed{1\,234}"),
    (r"\boxed{12,345,678}", "12345678", "boxed!", True),
    (r"\boxed{20\%}", "20", "boxed!", True),
    (r"\boxed{20\%}", "0.2", "boxed!", True),
    (r"\boxed{x=3}", "3", "boxed!", True),
    (r"\boxed{x = 1, y = 2}", "(1,2)", "boxed!", True),
    (r"\boxed{(1,2),(3,4)}", "(3,4),(1,2)", "boxed!", True),
    (r"\boxed{[2,5)}", "[2,5)", "boxed!", True),
    (r"\boxed{2 \times 10^5}", "200000", "boxed!", True),
    (r"\boxed{-\frac{5}{7}}", "-5/7", "boxed!", True),
    (r"\boxed{-5/7}", r"\frac{-5}{7}", "boxed!", True),
    (r"\boxed{0.3333}", "1/3", "boxed!", False),
    (r"\boxed{\text{no solution}}", r"\text{no solution}", "boxed!", True),
    (r"\boxed{\text{yes}}", r"\text{no}", "boxed!", False),
    (r"\boxed{a+b}", "b+a", "boxed!", True),
    (r"\boxed{n(n+1)/2}", r"\frac{n^2+n}{2}", "boxed!", True),
]

HASH: list[Row] = [
    *rows(
        *("72", "hash!", True),
        *("6 * 12 = 72\n#### 72", "#### 72", "####72", "#### 72.", "#### $72", "#### 72 dollars"),
        *("#### 72\nThat was 5 steps.", "#### 71\n#### 72", "#### 72%", "#### **72**"),
        "#### Answer: 72",
    ),
    ("#### 1,234", "1234", "hash!", True),
    ("#### -72", "-72", "hash!", True),
    *rows(
        *("72", "hash!", False),
        *("#### 72\n#### 71", "#### maybe 12 or 72", "#### ", "The answer is 72", r"\boxed{72}"),
        "### 72",
    ),
    ("The answer is 72", "72", "hash", True),
    ("#### 72", "6 * 12 = 72\n#### 72", "hash!", True),
    ("#### 7.50", "7.5", "hash!", True),
    (r"#### \frac{1}{2}", "1/2", "hash!", True),
]

TAGGED: list[Row] = [
    *rows(
        *("42", "tagged!", True),
        *("<answer>42</answer>", "<think>40 + 2</think><answer>42</answer>"),
        "<think>40 + 2</think>\n<answer>\n42\n</answer>",
        *("<answer>41</answer><answer>42</answer>", "<answer>$42$</answer>"),
        *(r"<answer>\boxed{42}</answer>", "<answer>The answer is 42.</answer>"),
        *("<answer>42 apples</answer>", "<answer>x = 42</answer>", "<Answer>42</Answer>"),
    ),
    *rows(
        *("42", "tagged!", False),
        *("<answer>42", "42", "<answer></answer> 42", "<answer>42</answer><answer>41</answer>"),
        "<answer>12 or 42</answer>",
    ),
    ("<answer>42", "42", "tagged", False),
    ("42", "42", "tagged", True),
    *rows(
        *("0.5", "tagged!", True),
        *(r"<answer>\(\frac{1}{2}\)</answer>", r"<answer> \frac{1}{2} </answer>"),
    ),
    ("<answer>(1, 2)</answer>", "(1,2)", "tagged!", True),
    ("<answer>$18</answer>", "18", "tagged!", True),
]

LINE: list[Row] = [
    *rows(
        *("34", "line!", True),
        *("We add them.\nAnswer: 34", "Answer: $34$", r"Answer: \boxed{34}"),
        *(r"Answer: $\boxed{34}$", "Answer: 34.", "**Answer:** 34", "**Answer: 34**"),
        *("answer: 34", "Final Answer: 34", "Answer: 12\nAnswer: 34", "答案：34", "答案：34。"),
        *("Answer: 34 degrees", "My answer: 12 is wrong.\nAnswer: 34"),
    ),
    *rows(
        *("34", "line!", False),
        *("The answer is 34", "Answer: 34\nAnswer: 12", "Answer: maybe 12 or 34", "Answer:"),
    ),
    ("The answer is 34", "34", "line", True),
    ("Answer: -34", "-34", "line!", True),
    (r"Answer: \frac{3}{4}", "3/4", "line!", True),
    ("Answer: 3/4", "0.75", "line!", True),
    (r"Answer: 2\sqrt{3}", r"\sqrt{12}", "line!", True),
]

ROWS = [*LAST, *BOXED, *HASH, *TAGGED, *LINE]
