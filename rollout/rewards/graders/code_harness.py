"""The program that runs one test of a solution inside the sandbox, as two processes.

The solution's process executes `solution.py` and answers requests. The judging process holds the
test: it reads the task from standard input only after the fork, the kernel lets no other process
read its memory, and it takes only values of Python's own types from the solution, rebuilt from
JSON. Every other object stays with the solution; the test has a `Remote` of it, which cannot be
compared.

The source of this file is sent to the sandbox, so it imports only the standard library, and works
with older Python versions than ours.
"""

from __future__ import annotations

import builtins
import collections
import json
import operator
import os
import signal
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

PR_SET_DUMPABLE = 4
DEEP = 100_000


# --- values ---------------------------------------------------------------------------------------


def _pairs(value: Any) -> list[list[Any]]:
    return [[key, item] for key, item in value.items()]


# type that is sent as a copy -> conversions to JSON types (or types of this table) and back
KINDS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "builtins.tuple": (list, tuple),
    "builtins.set": (list, set),
    "builtins.frozenset": (list, frozenset),
    "builtins.dict": (_pairs, dict),
    "builtins.dict_keys": (list, lambda found: dict.fromkeys(found).keys()),
    "builtins.dict_values": (list, lambda found: dict(enumerate(found)).values()),
    "builtins.dict_items": (list, lambda found: dict(found).items()),
    "builtins.bytes": (list, bytes),
    "builtins.bytearray": (list, bytearray),
    "builtins.range": (lambda one: [one.start, one.stop, one.step], lambda found: range(*found)),
    "builtins.complex": (lambda one: [one.real, one.imag], lambda found: complex(*found)),
    "collections.deque": (list, collections.deque),
    "collections.OrderedDict": (_pairs, collections.OrderedDict),
    "collections.Counter": (_pairs, lambda found: collections.Counter(dict(found))),
    "decimal.Decimal": (str, lambda found: __import__("decimal").Decimal(found)),
    "fractions.Fraction": (str, lambda found: __import__("fractions").Fraction(found)),
    "datetime.datetime": (str, lambda found: __import__("datetime").datetime.fromisoformat(found)),
    "datetime.date": (str, lambda found: __import__("datetime").date.fromisoformat(found)),
    "datetime.time": (str, lambda found: __import__("datetime").time.fromisoformat(found)),
    "datetime.timedelta": (
        lambda one: [one.days, one.seconds, one.microseconds],
        lambda found: __import__("datetime").timedelta(*found),
    ),
    "numpy.generic": (lambda one: one.item(), lambda found: found),
    "numpy.ndarray": (lambda one: one.tolist(), lambda found: __import__("numpy").array(found)),
}


def encode(value: Any, keep: Callable[[Any], int]) -> Any:
    """Encode a value as JSON types; an object of another type as the number that `keep` returns.

    A subclass is sent as its base type: an IntEnum as a number, a namedtuple as a tuple.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list):
        return [encode(item, keep) for item in value]
    for kind in type(value).__mro__:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in KINDS:
            return {name: encode(KINDS[name][0](value), keep)}
    return {"object": keep(value)}


def decode(text: str, find: Callable[[int], Any]) -> Any:
    """Decode the result of `encode`; `find` returns the object with a given number."""

    def revive(tagged: dict[str, Any]) -> Any:
        ((name, value),) = tagged.items()
        return find(value) if name == "object" else KINDS[name][1](value)

    return json.loads(text, object_hook=revive)


# --- the solution's process -----------------------------------------------------------------------


def load(module: types.ModuleType, prelude: str, recursion: int) -> None:
    """Execute the solution as the module `solution`, which pickle and dataclasses expect."""
    sys.modules["solution"] = module
    if recursion:
        sys.setrecursionlimit(recursion)
    exec(prelude, module.__dict__)
    with open("solution.py", encoding="utf-8") as file:
        code = compile(file.read(), "solution.py", "exec", dont_inherit=True)
    exec(code, module.__dict__)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "load": load,
    "call": lambda called, *args, **kwargs: called(*args, **kwargs),
    "get": getattr,
    "set": setattr,
    "item": operator.getitem,
    "bool": bool,
    "len": len,
    "iter": iter,
    "next": next,
    "str": str,
    "repr": repr,
}


def serve(requests: Any, replies: Any) -> None:
    """Answer requests until the pipe is closed."""
    kept: list[Any] = [types.ModuleType("solution")]

    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    for line in requests:
        operation, number, args, kwargs = decode(line, kept.__getitem__)
        try:
            value = OPERATIONS[operation](kept[number], *args, **kwargs)
            # a function that works in place returns None
            changed = args if operation == "call" and value is None else None
            reply = json.dumps(encode(["value", value, changed], keep))
        except Exception as error:  # noqa: BLE001 - raised again where the test has called
            kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
            reply = json.dumps(["error", kinds[0], encode(list(map(_plain, error.args)), keep)])
        replies.write(reply + "\n")
        replies.flush()


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float) else str(value)


# --- the judging process --------------------------------------------------------------------------


class CannotJudge(BaseException):
    """The test gives the solution an unencodable value; no handler in the test catches it."""


def _asks(operation: str) -> Callable[..., Any]:
    """The method that requests an operation from the solution's process."""

    def ask(self: Remote, *args: Any, **kwargs: Any) -> Any:
        return self._link.ask(operation, self._number, args, kwargs)

    return ask


class Remote:
    """An object in the solution's process.

    It can be called, read, iterated and printed. It cannot be compared: the comparison would send
    the other value to the solution, which could then judge itself.
    """

    __slots__ = ("_link", "_number")
    __hash__ = None  # type: ignore[assignment]
    _link: Link
    _number: int

    def __init__(self, link: Link, number: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    __call__ = _asks("call")
    __setattr__ = _asks("set")
    __getitem__ = _asks("item")
    __bool__ = _asks("bool")
    __len__ = _asks("len")
    __iter__ = _asks("iter")
    __next__ = _asks("next")
    __str__ = _asks("str")
    __repr__ = _asks("repr")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.ask("get", self._number, (name,), {})

    def __eq__(self, other: object) -> bool:
        raise TypeError("an object of the solution cannot be compared, only plain values")


class Link:
    """The judging process's end of the pipes to the solution's process."""

    def __init__(self, requests: Any, replies: Any) -> None:
        self._requests = requests
        self._replies = replies

    def ask(self, operation: str, number: int, args: Any, kwargs: Any) -> Any:
        """Request an operation from the solution's process. Raises what the solution raises."""
        request = json.dumps(encode([operation, number, list(args), kwargs], _number_of))
        try:
            self._requests.write(request + "\n")
            self._requests.flush()
            line = self._replies.readline()
            if not line:
                fail("the solution's process has ended")
            said, *rest = decode(line, lambda found: Remote(self, found))
            raised = _exception(*rest) if said == "error" else None
            value, changed = rest
        except Exception as error:  # noqa: BLE001 - whatever a solution has brought about
            fail(f"the solution's process gave no answer: {type(error).__name__}: {error}")
        if raised is not None:
            raise raised
        if value is None:
            for old, new in zip(args, changed or ()):
                _become(old, new)
        return value


def _number_of(value: Any) -> int:
    if type(value) is not Remote:
        raise CannotJudge(f"the test gives the solution a {type(value).__name__}")
    return value._number


def _exception(name: str, args: list[Any]) -> Exception:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(*args)
        # recovery: a constructor with other arguments
        except TypeError:
            pass
    return RuntimeError(f"{name}: {args}")


def _become(old: Any, new: Any) -> None:
    """Apply the solution's change of its copy to an argument."""
    if isinstance(old, list | bytearray) and type(old) is type(new):
        old[:] = new
    elif isinstance(old, dict | set) and type(old) is type(new):
        old.clear()
        old.update(new)


def fail(reason: str) -> NoReturn:
    """End at once, so that no handler of the test can continue."""
    os.write(2, f"{reason}\n".encode("utf-8", "replace"))
    os._exit(1)


def judge(link: Link, task: dict[str, Any]) -> Any:
    """Run the test; return the value of a call. A failed test raises or ends the process."""
    solution = Remote(link, 0)
    call = task["function"] is not None
    link.ask("load", 0, [task["prelude"], DEEP if call else 0], {})
    if call:
        return _function(solution, task["function"])(*task["arguments"])
    sys.modules["solution"] = solution  # type: ignore[assignment]
    names: dict[str, Any] = {"__name__": "test"}
    for name in task["names"]:
        try:
            names[name] = getattr(solution, name)
        except AttributeError:
            # the test raises NameError if it uses the name
            continue
    exec(task["imports"], names)
    exec(compile(task["statement"], "test", "exec", dont_inherit=True), names)
    return None


def _function(solution: Any, name: str) -> Any:
    """A function, or a method of `Solution`; its name may also be an import's."""
    try:
        getattr(solution.Solution, name)
    except AttributeError:
        return getattr(solution, name)
    return getattr(solution.Solution(), name)


def hide() -> None:
    """Protect the memory and descriptors from other processes of the same user."""
    # importing ctypes itself takes 4 ms
    import _ctypes

    prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]
    if _ctypes.call_function(prctl, (PR_SET_DUMPABLE, 0, 0, 0, 0)) != 0:
        fail("this process cannot be hidden from the solution's")
    # the solution can write to the current folder, and send signals
    folder = os.getcwd()
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != folder]
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> None:
    """Fork into two processes, and run the test."""
    # older Python versions have no limit
    getattr(sys, "set_int_max_str_digits", int)(0)
    requests = os.pipe()
    replies = os.pipe()
    if os.fork() == 0:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        for descriptor in (nothing, requests[1], replies[0]):
            os.close(descriptor)
        try:
            serve(os.fdopen(requests[0]), os.fdopen(replies[1], "w"))
        finally:
            os._exit(1)
    os.close(requests[0])
    os.close(replies[1])
    hide()
    task = json.loads(sys.stdin.read())
    link = Link(os.fdopen(requests[1], "w"), os.fdopen(replies[0]))
    try:
        answer = json.dumps({"value": judge(link, task)})
        sys.stdout.flush()
    except CannotJudge as error:
        answer = json.dumps({"cannot_judge": str(error)})
    except BaseException as error:  # noqa: BLE001 - the test has failed, by whatever it is
        fail(f"{type(error).__name__}: {error}".rstrip(": "))
    os.write(1, f"\n{task['token']}{answer}\n".encode())
    # the solution's process ends with its pipes; cleaning up would take longer than the test
    os._exit(0)


if __name__ == "__main__":
    main()
