"""Mutants of what only a GPU needs: it goes on while the host does, and its steps can be captured."""

from __future__ import annotations

from mutant import PRETENDED, Mutant

_S, _LATER = "scaler_triton/", 'non_blocking=device.type != "cpu"'
MUTANTS = [
    Mutant(_S + "clipping/at_once.py", _LATER, "non_blocking=True", PRETENDED),
    Mutant(_S + "cuda_graphs.py", "tensor.is_cuda and torch.cuda.is_current_stream_capturing()", "False", PRETENDED),
    Mutant(_S + "flags.py", _LATER, "non_blocking=True", PRETENDED),
    Mutant(_S + "mirror.py", "(self.source, non_blocking=True)", "(self.source)", PRETENDED),
    Mutant(_S + "mirror.py", "        self._event.synchronize()\n", "", PRETENDED),
    Mutant(_S + "stats.py", "if not is_captured(self._values):", "if True:", PRETENDED),
    Mutant(_S + "updating.py", "        if is_captured(scale):", "        if False:", PRETENDED),
    Mutant("kernels/table.py", "        self.captured.append(buffer)\n", "", PRETENDED),
    Mutant("kernels/table.py", "if slot[-1].query():", "if True:", PRETENDED),
    Mutant("kernels/update_scale.py", "pin_memory=self.numbers.is_cuda", "pin_memory=False", PRETENDED),
]
