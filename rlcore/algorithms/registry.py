"""The algorithms by name: register one, build one, list them.

An estimator or policy loss comes from a decorator here, from an entry point of an installed package
(groups `rlcore.estimators` and `rlcore.policy_losses`) or from an import path `package.module:Name`
in the config. The keywords of its constructor are its configuration keys.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, get_args

from rlcore.algorithms.errors import (
    AlgorithmError,
    DuplicateNameError,
    KeywordError,
    UnknownNameError,
    known_names,
)
from rlcore.algorithms.normalization import NormalizationMode
from rlcore.algorithms.plugin_guard import (
    ESTIMATOR_ALWAYS,
    ESTIMATOR_OPTIONAL,
    ESTIMATOR_WHERE_GIVEN,
    POLICY_LOSS_ALWAYS,
    POLICY_LOSS_OPTIONAL,
    Guarded,
    GuardedEstimator,
    GuardedPolicyLoss,
)
from rlcore.algorithms.plugins import (
    REQUIRED,
    Keyword,
    check_keywords,
    constructor_keywords,
    import_plugin,
)
from rlcore.algorithms.reward_shaping import shaping_needs

# Method names of other projects -> the settings that they stand for here.
METHODS = {
    "dapo": "algorithm.loss.clip_high=0.28, algorithm.loss.aggregation=token-mean and"
    " rollout.filters=[mixed_verdicts]",
    "gae": "algorithm.estimator.name=ppo",
}

Needs = Collection[str] | Callable[[Any], Collection[str]]
AnyGuarded = TypeVar("AnyGuarded", bound=Guarded)
Factory = TypeVar("Factory", bound=Callable[..., Any])


@dataclass(frozen=True)
class Plugin:
    """One algorithm: how to build it, and which fields of the batch it takes.

    `needs` and `optional` are field names or a function of the built instance that returns them. A
    batch without a needed field is an error; an optional field is passed where the batch has it.
    `formula` is the algorithm in one line, `source` the paper or implementation it comes from; both
    may be empty. `compares_group` and `normalization` are for estimators: see `register_estimator`.
    They belong to the registered name and do not pass to a subclass.
    """

    name: str
    factory: Callable[..., Any]
    needs: Needs
    optional: Needs
    formula: str = ""
    source: str = ""
    compares_group: bool = False
    normalization: NormalizationMode = "none"


class Registry(Generic[AnyGuarded]):
    """The algorithms of one kind, by name.

    Args:
        guard: the type of guard that each is put behind.
        entry_points: the group in which installed packages announce theirs.
        fields: the record fields that `needs` may name.
        key: the configuration key that names one.

    Attributes:
        others: registries in which names that are unknown here are looked up.
    """

    def __init__(
        self, guard: type[AnyGuarded], entry_points: str, fields: Collection[str], key: str
    ) -> None:
        self._guard = guard
        self.kind = guard.kind
        self.entry_points = entry_points
        self.fields = frozenset(fields)
        self.key = key
        self.others: list[Registry[Any]] = []
        self._plugins: dict[str, Plugin] = {}

    def register(self, name: str, factory: Factory, **declared: Any) -> Factory:
        """Register a class, or a function that builds the algorithm, and return it.

        Args:
            declared: fields of `Plugin`; those that are empty come from the class.
        """
        self._enter(name, factory, declared)
        return factory

    def names(self) -> list[str]:
        """Return all names, registered or announced by installed packages, sorted. Imports none."""
        return sorted({*self._plugins, *(point.name for point in self._points())})

    def resolve(self, name: str | Callable[..., Any]) -> Plugin:
        """Return the algorithm of a name, of `package.module:Name`, or of a class or function."""
        if not isinstance(name, str):
            return self._of(name, getattr(name, "__qualname__", repr(name)))
        if ":" in name:
            return self._of(import_plugin(name, self.kind), name)
        points = [point for point in self._points() if point.name == name]
        # Loading may register the name through the module's own decorator.
        objects = [point.load() for point in points]
        plugin = self._plugins.get(name)
        if plugin is None and objects:
            plugin = self._enter(name, objects[0], {})
        if plugin is None:
            elsewhere = ""
            # GSPO, say, is an estimator in verl and slime.
            if name.lower() in METHODS:
                elsewhere = f": {name} is {METHODS[name.lower()]}"
            elif other := next((one for one in self.others if name in one.names()), None):
                elsewhere = f": it is a {other.kind} here, set {other.key}={name}"
            near = known_names("" if elsewhere else name, self.names())
            raise UnknownNameError(
                f"unknown {self.kind} {name!r}{elsewhere}; {near};"
                " one of your own is named by its import path,"
                f" '{name.replace('.', ':') if name.count('.') == 1 else 'package.module:Name'}'"
            )
        for point, found in zip(points, objects):
            if not _same(found, plugin.factory):
                raise DuplicateNameError(
                    f"{self.kind} {name!r} is claimed by {_path(plugin.factory)} and by the entry"
                    f" point {point.value}"
                )
        return plugin

    def keywords(self, name: str) -> dict[str, Keyword]:
        """Return the config keys of an algorithm: name, annotation and default of each."""
        return constructor_keywords(self.resolve(name).factory, f"{self.kind} {name!r}")

    def build(self, name: str | Callable[..., Any], **kwargs: Any) -> AnyGuarded:
        """Build an algorithm by name, import path or class, with checked keywords and guard."""
        plugin = self.resolve(name)
        owner = f"{self.kind} {plugin.name!r}"
        keywords = constructor_keywords(plugin.factory, owner)
        missing = [k for k, one in keywords.items() if one.default is REQUIRED and k not in kwargs]
        if inspect.isroutine(plugin.factory) and missing:
            # It is the algorithm itself, where a function that builds one is expected.
            raise KeywordError(
                f"{owner}: {_path(plugin.factory)} is a function that needs {', '.join(missing)};"
                " expected a class or function that builds the algorithm from its configuration"
                f" keys alone: make it a class with __call__(self, {', '.join(missing)})"
            )
        check_keywords(owner, keywords, kwargs)
        instance = plugin.factory(**kwargs)
        if not callable(instance):
            raise AlgorithmError(
                f"{owner}: expected something that can be called on its inputs, got {instance!r}"
            )
        return self._guarded(plugin, instance)

    def guard(self, plugin: str | Callable[..., Any], **keywords: Any) -> AnyGuarded:
        """Put an algorithm behind its guard: a name or a class is built, an instance taken."""
        if isinstance(plugin, str | type):
            return self.build(plugin, **keywords)
        if keywords:
            given = ", ".join(keywords)
            raise TypeError(f"{given}: this is built already; pass its class or name with keywords")
        if isinstance(plugin, self._guard):
            return plugin
        plain = inspect.isroutine(plugin)
        return self._guarded(self.resolve(plugin if plain else type(plugin)), plugin)

    def _guarded(self, plugin: Plugin, instance: Any) -> AnyGuarded:
        owner = f"{self.kind} {plugin.name!r}"
        needs = self._fields(owner, "needs", plugin.needs, instance)
        optional = self._fields(owner, "optional", plugin.optional, instance)
        put: Callable[..., AnyGuarded] = self._guard
        return put(plugin.name, instance, needs, optional - needs)

    def _enter(self, name: str, factory: Callable[..., Any], declared: dict[str, Any]) -> Plugin:
        if not name or ":" in name:
            raise AlgorithmError(
                f"{self.kind} name: expected a non-empty name without ':', got {name!r}"
            )
        taken = self._plugins.get(name)
        # A module that is loaded again registers its classes again; the newest counts.
        if taken is not None and not _same(taken.factory, factory):
            raise DuplicateNameError(
                f"{self.kind} {name!r} is already registered by {_path(taken.factory)}; "
                f"give {_path(factory)} another name"
            )
        constructor_keywords(factory, f"{self.kind} {name!r}")
        given = {field: value for field, value in declared.items() if value not in (None, "")}
        plugin = self._plugins[name] = replace(self._of(factory, name), **given)
        return plugin

    def _of(self, factory: Callable[..., Any], name: str) -> Plugin:
        """Describe `factory` by its decorator, its own `needs`, or a decorated base."""
        if not callable(factory):
            raise AlgorithmError(
                f"{self.kind} {name!r}: expected a class or a function, got {factory!r}"
            )
        described: dict[str, Any] = {
            key: str(getattr(factory, key, "")) for key in ("formula", "source")
        }
        registered = {id(plugin.factory): plugin for plugin in self._plugins.values()}
        for base in getattr(factory, "__mro__", (factory,)):
            if id(base) in registered:
                found = registered[id(base)]
                own: dict[str, Any] = {key: text for key, text in described.items() if text}
                reset: dict[str, Any] = {"compares_group": False, "normalization": "none"}
                return replace(found, name=name, factory=factory, **reset, **own)
            if "needs" in vars(base) or "optional" in vars(base):
                break
        return Plugin(name, factory, _attribute("needs"), _attribute("optional"), **described)

    def _points(self) -> list[importlib.metadata.EntryPoint]:
        return list(importlib.metadata.entry_points(group=self.entry_points))

    def _fields(self, owner: str, what: str, declared: Needs, instance: Any) -> frozenset[str]:
        names = declared(instance) if callable(declared) else declared
        if isinstance(names, str):
            raise AlgorithmError(
                f"{owner}: {what}: expected a set of field names, got the string {names!r}"
            )
        for field in names:
            if field not in self.fields:
                raise AlgorithmError(
                    f"{owner}: {what}: no field {field!r}; {known_names(str(field), self.fields)}"
                )
        return frozenset(names)


def _attribute(name: str) -> Callable[[Any], Collection[str]]:
    """Read field names from an instance: from an attribute, a property or a method."""

    def read(instance: Any) -> Collection[str]:
        value = getattr(instance, name, ())
        return value() if callable(value) else value

    return read


def _same(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Whether two factories are one definition, loaded twice or imported under two names.

    A definition inside a function may differ from call to call, so there identity counts.
    """
    if one is other:
        return True
    name = getattr(one, "__qualname__", "<")
    if name != getattr(other, "__qualname__", None) or "<" in name:
        return False
    files = [
        getattr(sys.modules.get(each.__module__), "__file__", None) or "" for each in (one, other)
    ]
    return one.__module__ == other.__module__ or (
        all(files) and os.path.realpath(files[0]) == os.path.realpath(files[1])
    )


def _path(factory: Callable[..., Any]) -> str:
    return (
        f"{getattr(factory, '__module__', '?')}:{getattr(factory, '__qualname__', repr(factory))}"
    )


_ESTIMATORS = Registry(
    GuardedEstimator,
    "rlcore.estimators",
    (*ESTIMATOR_ALWAYS, *ESTIMATOR_WHERE_GIVEN, *ESTIMATOR_OPTIONAL),
    "algorithm.estimator.name",
)
_POLICY_LOSSES = Registry(
    GuardedPolicyLoss,
    "rlcore.policy_losses",
    (*POLICY_LOSS_ALWAYS, *POLICY_LOSS_OPTIONAL),
    "algorithm.loss.name",
)
_ESTIMATORS.others.append(_POLICY_LOSSES)
_POLICY_LOSSES.others.append(_ESTIMATORS)

build_estimator = _ESTIMATORS.build
build_policy_loss = _POLICY_LOSSES.build
guard_estimator = _ESTIMATORS.guard
guard_policy_loss = _POLICY_LOSSES.guard
estimator_plugin = _ESTIMATORS.resolve
policy_loss_plugin = _POLICY_LOSSES.resolve
estimator_names = _ESTIMATORS.names
policy_loss_names = _POLICY_LOSSES.names
estimator_keywords = _ESTIMATORS.keywords
policy_loss_keywords = _POLICY_LOSSES.keywords


def register_estimator(
    name: str,
    needs: Needs | None = None,
    *,
    optional: Needs | None = None,
    shaped_rewards: bool = False,
    compares_group: bool = False,
    normalization: NormalizationMode = "none",
    formula: str = "",
    source: str = "",
) -> Callable[[Factory], Factory]:
    """Register a class as estimator `name`; its constructor's keywords become its config keys.

    Args:
        name: unique; a name that is taken is refused.
        needs: the optional fields of `EstimatorInputs` that it must have, or a function of the
            built instance that returns them. Without it, a `needs` attribute of the class counts.
            All other fields are None for it.
        optional: fields that it takes where the batch has them, in the same form.
        shaped_rewards: it rewards single tokens, with attributes `kl_coef` and `distill_coef`. The
            fields that these read are needed too, and `token_rewards` are optional.
        compares_group: it compares the samples of one prompt, so a group of one teaches nothing.
        normalization: how advantages are normalised where `algorithm.normalize_advantages` is not
            set.
        formula: the algorithm in one line, for `rlcore config --algorithms`. Without it, a
            `formula` attribute counts.
        source: the paper or implementation it comes from, in the same way.

    `compares_group` and `normalization` hold for the registered name, not for import paths and
    subclasses. `rlcore.config.built_in` says the same of built-in estimators, since a configuration
    is checked without torch.
    """
    if normalization not in get_args(NormalizationMode):
        raise AlgorithmError(f"estimator {name!r}: unknown normalization {normalization!r}")
    given = needs
    if shaped_rewards:

        def with_shaping(instance: Any) -> set[str]:
            own = given(instance) if callable(given) else given or ()
            return {*own, *shaping_needs(instance.kl_coef, instance.distill_coef)}

        needs = with_shaping
        optional = {"token_rewards"} if optional is None else optional
    return lambda factory: _ESTIMATORS.register(
        name,
        factory,
        needs=needs,
        optional=optional,
        compares_group=compares_group,
        normalization=normalization,
        formula=formula,
        source=source,
    )


def register_policy_loss(
    name: str,
    needs: Needs | None = None,
    *,
    optional: Needs | None = None,
    formula: str = "",
    source: str = "",
) -> Callable[[Factory], Factory]:
    """Register a class as policy loss `name`, like `register_estimator`.

    The class may define `batch_stats(inputs) -> dict[str, Tensor]`, which is called on the whole
    optimizer step before it is split and comes back in `inputs.batch_stats`.
    """
    return lambda factory: _POLICY_LOSSES.register(
        name, factory, needs=needs, optional=optional, formula=formula, source=source
    )
