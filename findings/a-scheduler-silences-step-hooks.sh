#!/usr/bin/env bash
# timm 1.0.31 (Lookahead), torch 2.13.0 (CPU), Python 3.11
#
# Behaviour: a step hook registered on timm's Lookahead is called in every step, but never once if a schedule was made
#   before the first `zero_grad`, as in most programs. Nothing is raised. Lookahead does not run Optimizer's constructor,
#   so torch wraps its class's `step`, which calls hooks, only in the first `zero_grad`; a schedule keeps the `step` that
#   it found. After one `zero_grad` before the schedule, of that object or any other Lookahead, hooks are called again.
#   A program that counts taken steps by a hook, as one does to tell a scaler's skips apart, counts none.
# Guess: a hook that an optimizer takes is called once a step, with a schedule or without.
# Output seen:
#   SGD, with a schedule: 3 calls in 3 steps
#   Lookahead, with a schedule: 0 calls in 3 steps
#   Lookahead: 3 calls in 3 steps
#   Lookahead, with a schedule, after another Lookahead's zero_grad: 3 calls in 3 steps
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/pip" install --quiet --no-deps timm==1.0.31
cat > "$folder/program.py" << 'PROGRAM'
from importlib.util import find_spec, module_from_spec, spec_from_file_location

import torch

# timm's file by itself: the whole package also asks for torchvision.
place = f"{find_spec('timm').submodule_search_locations[0]}/optim/lookahead.py"
spec = spec_from_file_location("lookahead", place)
timm = module_from_spec(spec)
spec.loader.exec_module(timm)


def calls(wrap, has_schedule):
    """Return how often a hook is called in three steps."""
    model = torch.nn.Linear(2, 1)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    if has_schedule:
        torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    for _ in range(3):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert not torch.equal(model.weight, before)
    return len(called)


seen = {
    "SGD, with a schedule": calls(lambda inner: inner, True),
    "Lookahead, with a schedule": calls(timm.Lookahead, True),
    "Lookahead": calls(timm.Lookahead, False),
    "Lookahead, with a schedule, after another Lookahead's zero_grad": calls(timm.Lookahead, True),
}
for name, number in seen.items():
    print(f"{name}: {number} calls in 3 steps")
assert list(seen.values()) == [3, 0, 3, 3], seen
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
