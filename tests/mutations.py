"""Every small defect that could be put into a source file, found in its syntax tree.

A mutant changes one node: an operator, a condition, a constant, a default, a statement that is
left out, two arguments that change places. Annotations, decorators, docstrings, texts of errors and
logs, `__repr__` and what only type checkers read are left alone.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("rlcore", "rollout", "backends/megatron")
ID_LENGTH = 8
_OPPOSITE: tuple[tuple[type[ast.cmpop], type[ast.cmpop]], ...] = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq)),
    *((ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
)
COMPARISONS = {**dict(_OPPOSITE), **{other: one for one, other in _OPPOSITE}}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
SAYS = ("log", "logger", "logging", "print", "warn", "warnings")
SPOKEN = ("__repr__", "__str__")
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.With, ast.AsyncWith)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutation:
    """One change of one file.

    Args:
        id: of the change within its function, so that lines added elsewhere leave it as it is.
        kind: the operator that made it.
        lines: first and last line that a test must run to notice it.
        span: first and last byte of what is replaced.
        new: what stands there instead.
    """

    id: str
    file: str
    kind: str
    lines: tuple[int, int]
    span: tuple[int, int]
    old: str
    new: str

    def apply(self, text: str) -> str:
        """Return the text of the file with the defect."""
        raw = text.encode()
        return (raw[: self.span[0]] + self.new.encode() + raw[self.span[1] :]).decode()

    @property
    def where(self) -> str:
        """File and line."""
        return f"{self.file}:{self.lines[0]}"

    @property
    def diff(self) -> str:
        """The change in one line."""
        return f"{' '.join(self.old.split())}  ->  {' '.join(self.new.split())}"


def mutations_of(root: Path, packages: Sequence[str] = PACKAGES) -> dict[str, Mutation]:
    """Return every mutation of the product's files, by id."""
    found: dict[str, Mutation] = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            file = str(path.relative_to(root))
            found.update({one.id: one for one in Finder(file, path.read_text()).find()})
    return found


def draw(mutations: dict[str, Mutation], root: Path, seed: int, count: int) -> Iterator[Mutation]:
    """Yield `count` mutations that compile, in an order that depends on the seed and their ids."""

    def place(one: Mutation) -> str:
        return hashlib.sha256(f"{seed}:{one.id}".encode()).hexdigest()

    for one in sorted(mutations.values(), key=place):
        if count == 0:
            return
        if compiles(one, root):
            count -= 1
            yield one


def compiles(mutation: Mutation, root: Path) -> bool:
    """Whether the mutated file is Python, and another program than before."""
    text = (root / mutation.file).read_text()
    try:
        changed = ast.parse(mutation.apply(text))
        compile(changed, mutation.file, "exec")
    except SyntaxError:
        return False
    return ast.dump(changed) != ast.dump(ast.parse(text))


class Finder(ast.NodeVisitor):
    """Walks over a file and collects its mutations."""

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.raw = text.encode()
        self.tree = ast.parse(text)
        starts = [0]
        for line in self.raw.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self.starts = starts
        self.names: list[str] = []
        self.lines = (1, 1)
        self.found: list[Mutation] = []
        self.seen: Counter[str] = Counter()

    def find(self) -> list[Mutation]:
        """Return the mutations in the order of the file."""
        self.visit(self.tree)
        return self.found

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        last = node.end_lineno or node.lineno
        end = self.starts[last - 1] + (node.end_col_offset or 0)
        return self.starts[node.lineno - 1] + node.col_offset, end

    def add(self, kind: str, node: ast.expr | ast.stmt, new: ast.AST | str) -> None:
        """Add the mutation that replaces a node."""
        self.replace(kind, self.span(node), new if isinstance(new, str) else ast.unparse(new))

    def replace(self, kind: str, span: tuple[int, int], new: str) -> None:
        old = self.raw[span[0] : span[1]].decode()
        key = "|".join((self.file, ".".join(self.names), kind, old, new))
        self.seen[key] += 1
        digest = hashlib.sha1(f"{key}|{self.seen[key]}".encode()).hexdigest()[:ID_LENGTH]
        self.found.append(Mutation(digest, self.file, kind, self.lines, span, old, new))

    # what is walked over, and what is not

    def visit(self, node: ast.AST) -> None:
        """Note the statement's lines, collect the mutations of a node, and go into it."""
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
            return
        unread = ("TYPE_CHECKING", "__name__ == '__main__'")
        if isinstance(node, ast.If) and ast.unparse(node.test) in unread:
            return
        if isinstance(node, ast.Call) and said(node):
            return
        before = self.lines
        if isinstance(node, ast.stmt):
            self.lines = header(node)
        super().visit(node)
        self.lines = before

    def generic_visit(self, node: ast.AST) -> None:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases", "msg", "type_comment"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self.visit(child)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names.append(node.name)
        self.generic_visit(node)
        self.names.pop()

    def visit_FunctionDef(self, node: Function) -> None:
        if node.name in SPOKEN:
            return
        self.names.append(node.name)
        self.lines = (node.body[0].lineno, node.end_lineno or node.lineno)
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if isinstance(default, ast.Constant | ast.UnaryOp):
                self.constant("default", default)
        if isinstance(node.body[-1], BLOCKS) and len(node.body) > 1:
            self.lines = header(node.body[-1])
            self.add("early return", node.body[-1], "return")
        for statement in node.body:
            self.visit(statement)
        self.names.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    # operators

    def visit_Compare(self, node: ast.Compare) -> None:
        for position, operator in enumerate(node.ops):
            changed = copy.copy(node)
            changed.ops = [*node.ops]
            changed.ops[position] = COMPARISONS[type(operator)]()
            self.add("comparison", node, changed)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        changed = copy.copy(node)
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self.add("boolean", node, changed)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = (ast.JoinedStr, ast.List, ast.Tuple)
        sides = (node.left, node.right)
        text = any(
            isinstance(side, texts)
            or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
            for side in sides
        )
        if type(node.op) in ARITHMETIC and not text:
            changed = copy.copy(node)
            changed.op = ARITHMETIC[type(node.op)]()
            self.add("arithmetic", node, changed)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.add("not removed", node, f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        self.constant("constant", node)

    def constant(self, kind: str, node: ast.Constant | ast.UnaryOp) -> None:
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, bool):
            self.add(kind, node, str(not value))
        elif isinstance(value, int):
            self.add(kind, node, str(value + 1))
        elif isinstance(value, float):
            self.add(kind, node, str(value * 2 if value else 1.0))

    # conditions

    def condition(self, node: ast.If | ast.While | ast.IfExp) -> None:
        removed = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
        if not isinstance(node.test, ast.Compare | ast.Constant) and not removed:
            self.add("negated", node.test, f"not ({ast.unparse(node.test)})")
        self.generic_visit(node)

    visit_If = visit_While = visit_IfExp = condition

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.add("negated", test, f"(not ({ast.unparse(test)}))")
        self.generic_visit(node)

    # statements

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call) and not said(call):
            self.add("dropped", node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self.add("dropped", node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Attribute | ast.Subscript):
            self.add("dropped", node, "pass")
        if type(node.op) in ARITHMETIC and not isinstance(node.value, ast.JoinedStr | ast.List):
            changed = copy.copy(node)
            changed.op = ARITHMETIC[type(node.op)]()
            self.add("arithmetic", node, changed)
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self.add("dropped", node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self.add("loop", node, "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add("loop", node, "break")

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        if len(node.items) == 1 and node.items[0].optional_vars is None:
            end = self.span(node.items[0].context_expr)[1]
            self.replace("guard removed", (self.span(node)[0], end), "if True")
        self.generic_visit(node)

    visit_AsyncWith = visit_With

    def visit_Call(self, node: ast.Call) -> None:
        for position, (left, right) in enumerate(zip(node.args, node.args[1:])):
            alike = type(left) is type(right) and isinstance(left, ast.Name | ast.Attribute)
            if alike and ast.dump(left) != ast.dump(right):
                changed = copy.copy(node)
                changed.args = [*node.args]
                changed.args[position] = right
                changed.args[position + 1] = left
                self.add("swapped arguments", node, changed)
        self.generic_visit(node)


def header(node: ast.stmt) -> tuple[int, int]:
    """Return the lines of a statement, of a block those before its body."""
    body: Sequence[ast.stmt] = getattr(node, "body", ())
    last = node.end_lineno or node.lineno
    return node.lineno, max(node.lineno, body[0].lineno - 1) if body else last


def said(call: ast.Call) -> bool:
    """Whether a call only tells people something."""
    parts = ast.unparse(call.func).split(".")
    return any(part.lstrip("_") in SAYS for part in parts)
