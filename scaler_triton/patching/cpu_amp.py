"""GradScaler as `torch.cpu.amp` has it, for `patch_torch`; both are called so, which takes a module for each."""

from scaler_triton.patching.deprecated import DeprecatedGradScaler


class GradScaler(DeprecatedGradScaler):
    """Drop-in for `torch.cpu.amp.GradScaler`, which is deprecated: `scaler_triton.GradScaler("cpu", ...)`."""

    _kind = "cpu"
