"""Mutants of what only GPUs need: they go on while the host does, steps can be captured, and there may be two."""

from __future__ import annotations

from mutant import PRETENDED, Mutant

_S, _LATER = "scaler_triton/", 'non_blocking=device.type != "cpu"'
_GUARD = "with _on(self._device)"
_ON_ITS = f"        {_GUARD}:\n            "
MUTANTS = [
    Mutant(_S + "clipping/at_once.py", _LATER, "non_blocking=True", PRETENDED),
    Mutant(_S + "cuda_graphs.py", "tensor.is_cuda and torch.cuda.is_current_stream_capturing()", "False", PRETENDED),
    Mutant(_S + "flags.py", _LATER, "non_blocking=True", PRETENDED),
    Mutant(_S + "mirror.py", "(self.source, non_blocking=True)", "(self.source)", PRETENDED),
    Mutant(_S + "mirror.py", "        self._event.synchronize()\n", "", PRETENDED),
    Mutant(_S + "overflow_marks.py", " and self._generation.device == layout.key.device:", ":", PRETENDED),
    Mutant(_S + "stats.py", "if not is_captured(self._values):", "if True:", PRETENDED),
    Mutant(_S + "updating.py", "        if is_captured(scale):", "        if False:", PRETENDED),
    Mutant("kernels/launcher.py", "elif self._current_device() == self._device.index:", "elif True:", PRETENDED),
    Mutant(
        "kernels/launcher.py", _ON_ITS + "compiled = ", _ON_ITS.replace(_GUARD, "if True") + "compiled = ", PRETENDED
    ),
    Mutant("kernels/table.py", "        self.captured.append(buffer)\n", "", PRETENDED),
    Mutant("kernels/table.py", "if slot[-1].query():", "if True:", PRETENDED),
    Mutant("kernels/update_scale.py", "pin_memory=self.numbers.is_cuda", "pin_memory=False", PRETENDED),
]
