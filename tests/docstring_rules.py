"""What a public docstring must say: rules that read a docstring beside the code that it describes."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

# What the text of a tensor argument, or of a returned tensor, has to say; "any" will do.
TENSOR = {
    "dtype": r"\b(fp\d+|bf16|int\d+|any dtype|their dtype|torch's dtype)\b|\bany tensors?\b",
    "shape": r"\bone[- ]element\b|\bshape\b|`?\(\)`?|\bany tensors?\b",
    "device": r"\bdevices?\b|\bany tensors?\b",
}
MUTATED = r"\b(read|written|changed|set to)\b"
# An argument's number has a bound; one that is counted, in a result, has what is counted.
BOUND = r">=? \d|\bin [\[(]|\bfp32 max\b|2\^-126|\bany number\b"
COUNTED = r"\bcounted from\b|\b(updates?|overflows?|elements?|calls)\b"
MUTABLE = r"Tensor|\bAny\b|Mapping|\bdict\b|Module|Optimizer|\bGradScaler\b"
ELSEWHERE = re.compile(r"^(?:Args and raises: as|The other arguments are|Raises: as) `(\w+)`", re.MULTILINE)


def sections(doc: str) -> dict[str, str]:
    """Return what stands in each part of a docstring; "" is what comes before them."""
    parts = re.split(r"^(Args|Returns|Raises|Warns|Args and raises): ?", doc, flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def arguments(doc: str) -> dict[str, str]:
    """Return the text of each argument."""
    lines = re.split(r"^    (\w+(?:, \w+)*):", sections(doc).get("Args", ""), flags=re.MULTILINE)
    pairs = zip(lines[1::2], lines[2::2], strict=True)
    return {name: " ".join(text.split()) for names, text in pairs for name in names.split(", ")}


def problems(thing: Any, doc: str, neighbour: Callable[[str], str]) -> list[str]:
    """Return what a docstring fails to say of a function, method or class; `neighbour` gives another's docstring."""
    first = doc.partition("\n")[0]
    referred = ELSEWHERE.search(doc)
    others = neighbour(referred[1]) if referred else ""
    return [
        *([] if re.fullmatch(r"[A-Z`](?:[^.]|\.(?=\S))*\.", first) else ["its first line is no sentence"]),
        *_of_arguments(thing, doc, others),
        *_of_results(thing, doc),
        *_of_errors(thing, doc, others),
    ]


def _of_arguments(thing: Any, doc: str, others: str) -> Iterator[str]:
    told = {**arguments(others), **arguments(doc)}
    setter = thing.__name__.startswith("set_") and "\n" not in doc
    nothing_written = re.search(r"Nothing is written\b|\bread, not written\b", sections(doc)[""]) is not None
    for name, parameter in inspect.signature(thing).parameters.items():
        if name == "self":
            continue
        text, kind = (doc if setter else told.get(name, "")), str(parameter.annotation)
        if not text:
            yield f"{name} is not described"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if "Tensor" in kind:
            yield from (f"{name} has no {what}" for what, says in TENSOR.items() if not re.search(says, text))
        if re.search(MUTABLE, kind) and not nothing_written and not re.search(MUTATED, text):
            yield f"{name} is not said to be read or written"
        if re.search(r"\b(int|float)\b", kind) and not re.search(COUNTED if is_dataclass(thing) else BOUND, text):
            yield f"{name} has neither bound nor unit"


def _of_results(thing: Any, doc: str) -> Iterator[str]:
    returned = inspect.signature(thing).return_annotation
    if inspect.isclass(thing) or returned in ("None", None):
        return
    begins = ("Return ", "Tell whether ") if returned == "bool" else ("Return ",)
    text = sections(doc).get("Returns", "")
    if not text and not doc.startswith(begins):
        yield "what it returns is not said"
    if returned == "Tensor":
        yield from (f"the result has no {what}" for what, says in TENSOR.items() if not re.search(says, text))
    number = re.fullmatch(r"(int|float)( \| None)?", returned) and "what `optimizer.step` returns" not in text
    if number and not re.search(f"{BOUND}|{COUNTED}", text or doc):
        yield "the result has neither bound nor unit"


def _of_errors(thing: Any, doc: str, others: str) -> Iterator[str]:
    text = sections(doc).get("Raises", "") + sections(others).get("Raises", "")
    raised, setter = errors_of(thing), thing.__name__.startswith("set_")
    if setter and not text:
        text = doc.partition("; else ")[2]
    if setter and "Error" not in text:
        yield "what a wrong value raises is not said"
    if raised and not text:
        yield f"that it raises {', '.join(sorted(raised))} is not said"
        return
    yield from (f"{name} is not among what it raises" for name in sorted(raised) if name not in text)


def errors_of(thing: Any, depth: int = 1) -> set[str]:
    """Return the errors that a function raises itself, or a function of this package that it calls, to some depth."""
    function = inspect.unwrap(thing.__init__ if inspect.isclass(thing) else thing)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError):  # a dataclass's
        return set()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            called = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            name = ast.unparse(called).rpartition(".")[2]
            found |= {name} if inspect.isclass(getattr(builtins, name, None)) or name.endswith("Error") else set()
        elif isinstance(node, ast.Call) and depth:
            helper = _called(node.func, function)
            found |= errors_of(helper, depth - 1) if helper is not None else set()
    return found


def _called(node: ast.expr, function: Any) -> Any:
    """Return the function of this package that a call means: by name, by `module.name`, or by `self.name`."""
    names = ast.unparse(node).split(".")
    scope = dict(function.__globals__)
    if names[0] == "self":
        owner = scope.get(function.__qualname__.rpartition(".")[0])
        found = getattr(owner, names[1], None) if len(names) == 2 else None
    else:
        found = scope.get(names[0])
        for name in names[1:]:
            found = getattr(found, name, None) if inspect.ismodule(found) else None
    ours = inspect.isfunction(found) and (found.__module__ or "").startswith("scaler_triton")
    return found if ours else None
