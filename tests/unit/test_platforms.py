"""What is left of the package where triton, `torch.distributed` or a name private to torch is missing."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import STRICT

ROOT = Path(__file__).parents[2]

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
torch.autograd.graph.increment_version = torch._C._increment_version
del torch._C._increment_version
"""

# What a torch built with USE_DISTRIBUTED=0 lacks is taken out as its extension module is loaded.
WITHOUT_DISTRIBUTED = """
import importlib.machinery
load = importlib.machinery.ExtensionFileLoader.exec_module

def exec_module(self, module):
    load(self, module)
    if module.__name__ == "torch._C":
        for name in ("_c10d_init", "_rpc_init", "_faulty_agent_init", "_dist_autograd_init"):
            delattr(module, name)

importlib.machinery.ExtensionFileLoader.exec_module = exec_module
"""

TRAINS = """
import copy, pickle, torch
import scaler_triton

def steps(scaler):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    for bad in (False, True, False):
        scaler.scale((parameter * parameter).sum()).backward()
        if bad:
            parameter.grad[1] = float("inf")
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        assert scaler.was_skipped(optimizer) == bad
        scaler.update()
        optimizer.zero_grad()
    return parameter, optimizer

scaler = scaler_triton.GradScaler("cpu", init_scale=8.0)
parameter, optimizer = steps(scaler)
assert scaler.get_scale() == 4.0
assert scaler.stats().skipped == 1
assert "Inf" in str(scaler.overflow_report([("weight", parameter)]))
assert pickle.loads(pickle.dumps(scaler)).get_scale() == copy.deepcopy(scaler).get_scale() == 4.0
scaler_triton.audit(optimizer, scaler)
with scaler_triton.patch_torch():
    assert torch.amp.GradScaler is scaler_triton.GradScaler
"""

SHARDED_TOO = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sharded = scaler_triton.ShardedGradScaler("cpu", init_scale=8.0)
steps(sharded)
assert (sharded.get_scale(), sharded.stats().skipped) == (4.0, 1)
"""

INFO = "from scaler_triton import cli; cli.main(['info'])"
NAMES_WHAT_IS_MISSING = """
assert not torch.distributed.is_available()
try:
    scaler_triton.ShardedGradScaler
except ImportError as error:
    missing = str(error)
assert missing == "ShardedGradScaler needs torch.distributed, which this torch was built without: use GradScaler"
"""


PROGRAMS = [WITHOUT_TRITON + TRAINS + SHARDED_TOO, WITHOUT_DISTRIBUTED + TRAINS + NAMES_WHAT_IS_MISSING]


@pytest.mark.parametrize("program", PROGRAMS, ids=["triton", "distributed"])
def test_without_it_scalers_train(program: str) -> None:
    command = [sys.executable, *STRICT, "-c", program + INFO]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "scaler_triton" in done.stdout
