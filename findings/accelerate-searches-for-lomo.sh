#!/usr/bin/env bash
# accelerate 1.15.0, torch 2.13.0 (CPU), Python 3.11
#
# Behaviour: each `step` of a prepared optimizer searches the installed packages for `lomo_optim`, twice, whatever the
#   optimizer is; the answer is not remembered. A search that finds nothing asks every folder of sys.path.
# Guess: whether a package is there is looked up once, when Accelerate is imported or the optimizer is prepared.
# Output seen:
#   searches for lomo_optim in 20 steps: 40
#   searches in zero_grad: 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 accelerate==1.15.0
cat > "$folder/program.py" << 'PROGRAM'
import importlib.util

import torch
from accelerate import Accelerator

model = torch.nn.Linear(2, 1)
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

searched, find_spec = [], importlib.util.find_spec


def counted(name, *rest):
    searched.append(name)
    return find_spec(name, *rest)


importlib.util.find_spec = counted
in_zero_grad = 0
for _ in range(20):
    accelerator.backward(model(torch.ones(1, 2)).sum())
    searched_before = len(searched)
    optimizer.step()
    steps_searches = searched[searched_before:]
    assert steps_searches == ["lomo_optim"] * 2, steps_searches
    searched_before = len(searched)
    optimizer.zero_grad()
    in_zero_grad += len(searched) - searched_before
print("searches for lomo_optim in 20 steps:", searched.count("lomo_optim"))
print("searches in zero_grad:", in_zero_grad)
assert in_zero_grad == 0
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
