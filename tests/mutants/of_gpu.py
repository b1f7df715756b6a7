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
    Mutant(
        _S + "grad_scaler.py", "                self._forget_recorded(state)\n", "                pass\n", PRETENDED
    ),
    Mutant(
        _S + "grad_scaler.py",
        "        if is_captured(self._scale):\n            raise",
        "        if False:\n            raise",
        PRETENDED,
    ),
    Mutant(_S + "grad_scaler.py", "if not is_captured(self._scale):", "if True:", PRETENDED),
    Mutant(_S + "mirror.py", "(self.source, non_blocking=True)", "(self.source)", PRETENDED),
    Mutant(_S + "mirror.py", "        self._event.synchronize()\n", "", PRETENDED),
    Mutant(_S + "overflow_marks.py", " and self._generation.device == layout.key.device:", ":", PRETENDED),
    Mutant(_S + "records.py", " or left.captured != is_captured(left.found_inf)", "", PRETENDED),
    Mutant(_S + "records.py", "return not self.replayed or is_captured(flag)", "return not self.replayed", PRETENDED),
    Mutant(_S + "scaling.py", "            self._records.replayed = True\n", "            pass\n", PRETENDED),
    Mutant(_S + "scaling.py", ' or self._device == "cuda")', ")", PRETENDED),
    Mutant(_S + "states.py", "if is_captured(self._scale):  # no", "if False:  # no", PRETENDED),
    Mutant(_S + "states.py", 'if state.get("captured", True):', "if True:", PRETENDED),
    Mutant(_S + "stats.py", "if not is_captured(self._values):", "if True:", PRETENDED),
    Mutant(_S + "scaling.py", 'refuse_capture(device, "a scaler\'s first scale")', "pass", PRETENDED),
    Mutant(_S + "updating.py", "limit is not None and not is_captured(scale):", "limit is not None:", PRETENDED),
    Mutant("kernels/launcher.py", "elif self._current_device() == self._device.index:", "elif True:", PRETENDED),
    Mutant(
        "kernels/launcher.py", _ON_ITS + "compiled = ", _ON_ITS.replace(_GUARD, "if True") + "compiled = ", PRETENDED
    ),
    Mutant("kernels/launcher.py", "if stream not in self._streams and", "if False and", PRETENDED),
    Mutant("kernels/table.py", "pin_memory().to(device, non_blocking=True)", "to(device)", PRETENDED),
    Mutant("kernels/table.py", "        self.captured.append(buffer)\n", "", PRETENDED),
    Mutant("kernels/table.py", "if slot[-1].query():", "if True:", PRETENDED),
    Mutant(_S + "grad_scaler.py", "        self._note_reader(state)\n", "", PRETENDED),
    Mutant(_S + "updating.py", "readers - {launcher.current_stream(device)}", "readers", PRETENDED),
    Mutant(_S + "waiting.py", "torch.cuda.set_sync_debug_mode(0)", "pass", PRETENDED),
    Mutant(_S + "dispatch.py", "        with unnoticed(device):  #", "        if True:  #", PRETENDED),
]
