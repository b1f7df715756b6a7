"""Each docstring of the API page says what its arguments are, what is written, returned and raised."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import docstring_rules
import pytest
from test_api_page import ON_THE_PAGE, resolved

CALLED = [name for name, kind in ON_THE_PAGE.items() if kind != "autoexception"]
OPS, CLASS = "scaler_triton.ops", "scaler_triton.GradScaler"


def neighbour(name: str) -> Callable[[str], str]:
    """Return what gives the docstring of a function beside this one."""
    return lambda other: inspect.getdoc(resolved(f"{name.rpartition('.')[0]}.{other}")) or ""


def docstring(thing: Any) -> str:
    return inspect.getdoc(thing) or ""


@pytest.mark.parametrize("name", CALLED)
def test_it_says_all(name: str) -> None:
    thing = resolved(name)
    assert docstring_rules.problems(thing, docstring(thing), neighbour(name)) == []


@pytest.mark.parametrize(
    ("name", "said", "less", "problem"),
    [
        (f"{OPS}.unscale_", "NaN or Inf before.", "NaN or Inf before", "its first line is no sentence"),
        (f"{OPS}.unscale_", "fp16, bf16, fp32 or fp64 tensors", "tensors", "grads has no dtype"),
        (f"{OPS}.unscale_", " of any shape", "", "grads has no shape"),
        (f"{OPS}.unscale_", " on any devices", "", "grads has no device"),
        (f"{OPS}.unscale_", "shards; written.", "shards.", "grads is not said to be read or written"),
        (f"{OPS}.unscale_", "inv_scale: fp32,", "inverse: fp32,", "inv_scale is not described"),
        (f"{OPS}.unscale_", "Raises: ", "Note: ", "that it raises TypeError, ValueError is not said"),
        (f"{OPS}.check_nonfinite", "Args and raises: as", "See", "grads is not described"),
        (f"{OPS}.update_scale_", "steps, >= 1.", "how long.", "growth_interval has neither bound nor unit"),
        (f"{OPS}.update_scale_", "TypeError or ValueError naming", "naming", "ValueError is not among what it raises"),
        (f"{OPS}.grad_norm", "Returns: fp64, ", "Returns: ", "the result has no dtype"),
        (f"{OPS}.grad_norm", "fp64, `()`, on", "fp64, on", "the result has no shape"),
        (f"{OPS}.grad_norm", "on the first gradient's device", "as said", "the result has no device"),
        (f"{CLASS}.clip_grad_norm_", "Returns: ", "Note: ", "what it returns is not said"),
        (f"{CLASS}.clip_grad_norm_", "max_norm: >= 0, of", "max_norm: of", "max_norm has neither bound nor unit"),
        (f"{CLASS}.step", "RuntimeError", "errors", "RuntimeError is not among what it raises"),
        (f"{CLASS}.step", "its gradients are written", "has gradients", "optimizer is not said to be read or written"),
        (f"{CLASS}.set_growth_factor", "; else ValueError", ", or ValueError", "that it raises ValueError is not said"),
        (f"{CLASS}.set_min_scale", "; else ValueError or TypeError", "", "what a wrong value raises is not said"),
        (f"{CLASS}.set_hysteresis", ": >= 1", "", "new_hysteresis has neither bound nor unit"),
        (f"{CLASS}.get_hysteresis", "how many overflows", "what", "the result has neither bound nor unit"),
        ("scaler_triton.audit", "Nothing is written", "Quick", "model is not said to be read or written"),
        ("scaler_triton.overflow_report.BadGradient", ", counted from 0", "", "rank has neither bound nor unit"),
    ],
)
def test_it_is_noticed_when_a_docstring_says_less(name: str, said: str, less: str, problem: str) -> None:
    thing = resolved(name)
    doc = docstring(thing)
    assert said in doc
    assert problem in docstring_rules.problems(thing, doc.replace(said, less), neighbour(name))


def test_errors_are_found_where_they_are_raised() -> None:
    """By the function itself, or by one that it calls."""
    assert docstring_rules.errors_of(resolved(f"{OPS}.update_scale_")) >= {"ValueError", "TypeError"}
    assert docstring_rules.errors_of(resolved(f"{CLASS}.unscale_")) == {"RuntimeError"}
    assert docstring_rules.errors_of(resolved(f"{CLASS}.set_consecutive_hysteresis")) == {"TypeError"}
    assert docstring_rules.errors_of(resolved(f"{CLASS}.stats")) == set()
