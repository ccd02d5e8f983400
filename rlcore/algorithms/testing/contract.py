"""The rules of the contract, the error of a plugin that breaks one, and the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """One rule: the sentence that must hold, and advice to the author if it does not."""

    name: str
    sentence: str
    advice: str


class ContractError(AssertionError):
    """A plugin breaks a rule; the message has the rule, the smallest batch, and what to do.

    Attributes:
        rule: the rule that broke.
        plugin: kind and name of the plugin.
    """

    def __init__(self, plugin: str, rule: Rule, example: str) -> None:
        lines = "\n".join(f"  {line}" for line in example.splitlines())
        super().__init__(
            f"{plugin} breaks the rule {rule.name!r}: {rule.sentence}\n{lines}\n  to do:"
            f" {rule.advice}"
        )
        self.plugin = plugin
        self.rule = rule


@dataclass(frozen=True)
class ContractReport:
    """The rules that a plugin keeps, in the order in which they were checked; `print` it."""

    plugin: str
    kept: tuple[Rule, ...]
    skipped: Mapping[Rule, str]  # rule -> reason

    def __str__(self) -> str:
        lines = [f"{self.plugin} keeps {len(self.kept)} rules, {len(self.skipped)} skipped"]
        lines += [f"  kept     {rule.name:<18} {rule.sentence}" for rule in self.kept]
        lines += [f"  skipped  {rule.name:<18} {reason}" for rule, reason in self.skipped.items()]
        return "\n".join(lines)
