"""Run the optimizers of other packages under a scaler, and write the tables of docs/optimizers.md: `make optimizers`.

Each class trains a small net in fp32 with torch's scaler, ours and a guard. Its weights are compared to the bit with a
run that has no scaler; a step that overflows with one that never was. Of a class that raises the page says why. Names
of libraries, as arguments, run only those and write nothing.
"""

import contextlib
import fnmatch
import importlib
import inspect
import io
import random
import re
import signal
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peer import make_importable
from programs import PROGRAMS, judged
from tabulate import tabulate

from scaler_triton import GradScaler, StepGuard

PAGE = Path(__file__).parents[3] / "docs/optimizers.md"
STEPS, BAD, SECONDS = 6, 3, 30
SMALL = 2.0**-7  # brings fp16 gradients near 1e-5, as unscaling does
LIBRARIES = {  # as PyPI calls it, and what is imported
    "torch": "torch.optim",
    "adabelief-pytorch": "adabelief_pytorch",
    "adam-mini": "adam_mini",
    "apollo-torch": "apollo_torch",
    "bitsandbytes": "bitsandbytes.optim",
    "came-pytorch": "came_pytorch",
    "dadaptation": "dadaptation",
    "fairscale": "fairscale.optim",
    "galore-torch": "galore_torch",
    "heavyball": "heavyball",
    "kron-torch": "kron_torch",
    "lion-pytorch": "lion_pytorch",
    "muon-optimizer": "muon",
    "prodigyopt": "prodigyopt",
    "pytorch_optimizer": "pytorch_optimizer",
    "schedulefree": "schedulefree",
    "sophia-opt": "sophia_opt",
    "timm": "timm.optim",
    "torch-optimi": "optimi",
    "torch-optimizer": "torch_optimizer",
    "torchao": "torchao.optim",
}
SCALERS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.amp.GradScaler("cpu", init_scale=1024.0),
    "ours": lambda: GradScaler("cpu", init_scale=1024.0),
    "guard": lambda: StepGuard("cpu"),
}
BASES = {"Optimizer", "BaseOptimizer", "PSGDBase", "SOAPBase"}
SECOND_ORDER = {"AdaHessian", "Adahessian", "SophiaH"}  # they ask for backward(create_graph=True)

# How a class is made, where `cls(parameters)` does not do: the first pattern that fits.


def split(model: Any, **of_matrices: Any) -> list[dict[str, Any]]:
    """Return two groups, matrices and the rest, the first with options."""
    matrices = [each for each in model.parameters() if each.ndim == 2]
    return [{"params": matrices, **of_matrices}, {"params": [each for each in model.parameters() if each.ndim < 2]}]


def muon_groups(model: Any) -> list[dict[str, Any]]:
    """Return two groups of which the first is Muon's."""
    first, second = split(model)
    return [first | {"use_muon": True}, second | {"use_muon": False}]


def matrices(model: Any) -> list[Any]:
    """Return the parameters that are matrices."""
    return list(split(model)[0]["params"])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return what a wrapper wraps."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def wrapped(cls: Any, model: Any) -> Any:
    """Return a wrapper around it."""
    return cls(sgd(model.parameters()))


def heavyball(name: str) -> Any:
    """Return a class of heavyball's."""
    return getattr(importlib.import_module("heavyball"), name)


LOW_RANK = {"rank": 8, "update_proj_gap": 2, "scale": 0.25, "proj_type": "std"}
APOLLO = LOW_RANK | {"proj": "random", "scale_type": "channel"}
RHO = types.SimpleNamespace(step=lambda: 0.05)  # GSAM's, in place of a schedule
MADE: dict[str, Callable[[Any, Any], Any]] = {
    "torch.Muon": lambda cls, model: cls(matrices(model)),
    "adam-mini.*": lambda cls, model: cls(model.named_parameters(), dim=64, n_heads=4),
    "apollo-torch.*APOLLOAdamW": lambda cls, model: cls(split(model, **APOLLO)),
    "apollo-torch.GaLore*": lambda cls, model: cls(split(model, **LOW_RANK)),
    "bitsandbytes.*SGD*": lambda cls, model: cls(model.parameters(), lr=0.01, momentum=0.9),
    "bitsandbytes.*LARS*": lambda cls, model: cls(model.parameters(), lr=0.01, momentum=0.9),
    "fairscale.AdaScale": lambda cls, model: cls(sgd(model.parameters()), num_gradients_to_accumulate=2),
    "fairscale.AdaScaleWrapper": lambda cls, model: cls(
        model.parameters(), num_gradients_to_accumulate=2, optim_cls=torch.optim.SGD, lr=0.01
    ),
    "fairscale.OSS": lambda cls, model: cls(model.parameters(), lr=0.01),
    "galore-torch.*": lambda cls, model: cls(split(model, **LOW_RANK)),
    "heavyball.SplitOpt": lambda cls, model: cls([each | {"optimizer": heavyball("AdamW")} for each in split(model)]),
    "heavyball.SAMWrapper": lambda cls, model: cls(model.parameters(), heavyball("SFAdamW")),
    "muon-optimizer.*WithAuxAdam": lambda cls, model: cls(muon_groups(model)),
    "muon-optimizer.*": lambda cls, model: cls(matrices(model)),
    "pytorch_optimizer.*Muon*": lambda cls, model: cls(muon_groups(model)),
    "pytorch_optimizer.AdaGO": lambda cls, model: cls(muon_groups(model)),
    "pytorch_optimizer.AdaLOMO": lambda cls, model: cls(model),
    "pytorch_optimizer.AdamMini": lambda cls, model: cls(model),
    "pytorch_optimizer.LOMO": lambda cls, model: cls(model),
    "pytorch_optimizer.SpectralSphere": lambda cls, model: cls(matrices(model)),
    "pytorch_optimizer.WSAM": lambda cls, model: cls(model, model.parameters(), torch.optim.SGD, lr=0.01),
    "pytorch_optimizer.GSAM": lambda cls, model: cls(model.parameters(), sgd(model.parameters()), model, RHO),
    "pytorch_optimizer.BSAM": lambda cls, model: cls(model.parameters(), num_data=64),
    "pytorch_optimizer.Ranger21": lambda cls, model: cls(model.parameters(), num_iterations=STEPS),
    "pytorch_optimizer.*SAM": lambda cls, model: cls(model.parameters(), base_optimizer=torch.optim.SGD, lr=0.01),
    "pytorch_optimizer.OrthoGrad": wrapped,
    "pytorch_optimizer.PCGrad": wrapped,
    "pytorch_optimizer.SafeFP16Optimizer": wrapped,
    "pytorch_optimizer.TRAC": wrapped,
    "timm.SGDP": lambda cls, model: cls(model.parameters(), lr=0.01),
    "torch-optimi.*": lambda cls, model: cls(model.parameters(), lr=1e-3, triton=False),
    "*.Lookahead": lambda cls, model: cls(sgd(model.parameters()), k=2),
    "*.ScheduleFreeWrapper*": wrapped,
}
FUSED = ("Adam", "AdamW", "SGD", "Adagrad")


def make(name: str, cls: Any, model: Any) -> Any:
    """Return an optimizer of that class, ready to train."""
    made = next((each for pattern, each in MADE.items() if fnmatch.fnmatch(name, pattern)), None)
    if made is None:
        lr = inspect.signature(cls).parameters.get("lr")
        needs_one = lr is not None and lr.default in (None, inspect.Parameter.empty)
        optimizer = cls(model.parameters(), **{"lr": 1e-3} if needs_one else {})
    else:
        optimizer = made(cls, model)
    if hasattr(optimizer, "train"):  # those that are schedule-free are made in either mode
        optimizer.train()
    return optimizer


def classes_of(library: str) -> Iterator[tuple[str, Any]]:
    """Yield name and class, or what makes an object, of each optimizer that a library defines."""
    module = importlib.import_module(LIBRARIES[library])
    for name, cls in sorted(vars(module).items()):
        own = isinstance(cls, type) and cls.__module__.split(".")[0] == module.__name__.split(".")[0]
        steps = own and (issubclass(cls, torch.optim.Optimizer) or name.startswith("ScheduleFreeWrapper"))
        if steps and name not in BASES and not name.startswith("_"):
            yield name, cls
            if library == "torch" and name in FUSED:
                yield f"{name}, fused", lambda *args, cls=cls, lr=1e-3: cls(*args, lr=lr, fused=True)


# One run


def held(thing: Any, seen: set[int]) -> Any:
    """Return all that a thing holds as plain values that can be compared, tensors to the bit."""
    if isinstance(thing, torch.Tensor):
        if hasattr(thing, "__tensor_flatten__"):
            return [held(getattr(thing, name), seen) for name in thing.__tensor_flatten__()[0]]
        return str(thing.dtype), thing.shape, thing.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(thing, np.ndarray):
        return thing.tobytes()
    if thing is None or isinstance(thing, (bool, int, float, complex, str, bytes)):
        return repr(thing)
    if id(thing) in seen:
        return "seen"
    seen.add(id(thing))
    if isinstance(thing, dict):
        return [(held(key, seen), held(value, seen)) for key, value in thing.items()]
    if isinstance(thing, (list, tuple)):
        return [held(each, seen) for each in thing]
    is_data = hasattr(thing, "__dict__") and not callable(thing) and not isinstance(thing, types.ModuleType)
    return held(vars(thing), seen) if is_data else type(thing).__name__


def train(
    name: str, cls: Any, scaler: Any, bad: int | None = None, without: int | None = None, dtype: Any = torch.float32
) -> tuple[Any, bool]:
    """Return the model after some steps, and whether the one that overflows, if one does, changed nothing."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)).to(dtype)
    inputs, targets = torch.randn(STEPS, 2, 16, 64).to(dtype).unbind(1)
    optimizer, unchanged = make(name, cls, model), True
    accumulated = 2 if "AdaScale" in name else 1
    for step in range(STEPS):
        if step == without:
            continue
        optimizer.zero_grad()
        before = held([list(model.parameters()), vars(optimizer)], set()) if step == bad else None
        for x, y in zip(inputs[step].chunk(accumulated), targets[step].chunk(accumulated), strict=True):
            loss = torch.nn.functional.mse_loss(model(x), y) / accumulated
            loss = loss * (torch.inf if step == bad else SMALL if dtype is torch.float16 else 1.0)
            scaler.scale(loss).backward(create_graph=name.split(".")[-1] in SECOND_ORDER)
        scaler.step(optimizer)
        scaler.update()
        if step == bad:
            unchanged = before == held([list(model.parameters()), vars(optimizer)], set())
    return model, unchanged


def weights(*args: Any, **options: Any) -> Any:
    """Return what `train` leaves in the parameters."""
    return held(list(train(*args, **options)[0].parameters()), set())


def answers(name: str, cls: Any) -> dict[str, tuple[bool, bool, bool]]:
    """Return for each scaler: equal to no scaler; a skip changes nothing; the run goes on as without that batch."""
    none = torch.amp.GradScaler("cpu", enabled=False)
    alone, shorter, found = weights(name, cls, none), weights(name, cls, none, without=BAD), {}
    for scaler, new in SCALERS.items():
        model, unchanged = train(name, cls, new(), bad=BAD)
        equal = weights(name, cls, new()) == alone
        found[scaler] = (equal, unchanged, held(list(model.parameters()), set()) == shorter)
    return found


def ends_in_nan(name: str, cls: Any) -> bool | None:
    """Return whether small gradients make fp16 weights NaN or Inf; None if fp16 raises an error."""
    try:
        model, _ = train(name, cls, torch.amp.GradScaler("cpu", enabled=False), dtype=torch.float16)
    except TimeoutError:
        raise
    except Exception:
        return None
    return not all(bool(each.isfinite().all()) for each in model.parameters())


def out_of_time(*_: Any) -> None:
    """Interrupt a class that takes too long."""
    raise TimeoutError(f"took more than {SECONDS} s")


# The page


table = partial(tabulate, tablefmt="github", disable_numparse=True)


def counted(found: list[dict[str, tuple[bool, ...]]], *which: int) -> str:
    """Return for how many classes all those answers are yes: one number if it is the same for all scalers."""
    numbers = {name: sum(all(each[name][index] for index in which) for each in found) for name in SCALERS}
    if len(set(numbers.values())) == 1:
        return str(numbers["ours"])
    return ", ".join(f"{name} {number}" for name, number in numbers.items())


def write(block: str, text: str) -> None:
    """Put a text between a block's marks on the page."""
    marked = re.compile(f"(<!-- {block} -->\n).*?(<!-- /{block} -->)", re.DOTALL)
    page, found = marked.subn(lambda match: f"{match[1]}{text}\n{match[2]}", PAGE.read_text())
    assert found == 1, block
    PAGE.write_text(page)


def prepare() -> None:
    """Make the libraries importable, and quick: no compiler, a world of one rank."""
    warnings.simplefilter("ignore")
    torch.compile = lambda model=None, **_: model if model else lambda function: function  # type: ignore[assignment]
    make_importable()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    signal.signal(signal.SIGALRM, out_of_time)


def run(library: str, left_out: list[Any]) -> list[Any]:
    """Return a library's row; of a class that raises, note the reason."""
    found, in_fp16, tried = [], [], 0
    for name, cls in classes_of(library):
        tried += 1
        signal.alarm(SECONDS)
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # some greet, at length
                answer = answers(f"{library}.{name}", cls)
                in_fp16.append(ends_in_nan(f"{library}.{name}", cls))
        except Exception as error:
            reason = re.sub(r"\s+", " ", str(error)).strip(" .")
            reason = re.split(r"\.[ (]", f"{type(error).__name__}: {reason}")[0].rstrip(": ")
            left_out.append([library, name, f"`{reason[:100]}`"])
        else:
            found.append(answer)
            for scaler in SCALERS:
                if not all(answer[scaler]):
                    print(f"{library}.{name} with {scaler}: equal, unchanged, goes on are {answer[scaler]}")
        finally:
            signal.alarm(0)
    nan = f"{in_fp16.count(True)} of {len(in_fp16) - in_fp16.count(None)}"
    row = [library, version(library).partition("+")[0], tried, len(found), counted(found, 0), counted(found, 1, 2), nan]
    print(*row, sep=" | ", flush=True)
    return row


def main() -> None:
    """Run all of them, and the programs; write the page."""
    prepare()
    left_out: list[Any] = []
    rows = [run(library, left_out) for library in sys.argv[1:] or LIBRARIES]
    if sys.argv[1:]:
        print(table(left_out))
        return
    write("classes", table(rows, ["library", "version", "tried", "ran", "equal", "skip is right", "NaN in fp16"]))
    write("left out", table(left_out, ["library", "class", "why"]))
    torch.distributed.destroy_process_group()
    kinds = torch.amp.GradScaler, GradScaler, StepGuard
    judgements = [[each.__doc__.rstrip("."), *(judged(each, kind) for kind in kinds)] for each in PROGRAMS.values()]
    write("programs", table(judgements, ["what is trained", "torch's scaler", "`GradScaler`", "`StepGuard`"]))


if __name__ == "__main__":
    main()
