"""A device without fp64 that is not there, Apple's GPU: a mode in which some of the host's tensors count as on "mps:0".

A tensor is on the device if its storage was made there: by a factory with `device="mps"`, a copy, or an op on others of
the device. Ops compute on the host. What the real device lacks raises TypeError: fp64 tensors, ops that torch's own
table lists for other devices only, and ops on tensors of both sides.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torchgen
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

HERE = torch.device("mps:0")
_HOST = torch.device("cpu")
_MOVES = {"to", "cpu", "type_as"}  # methods that may take a tensor to another device
_MAY_MIX = {"aten::copy_", "aten::_to_copy", "aten::set_"}


class WithoutFp64(TorchFunctionMode):
    """The mode; what was made in one is on the device in all others, too."""

    _storages: ClassVar[dict[int, StorageWeakRef]] = {}  # those of the device; a weak reference keeps the key unique

    def __init__(self) -> None:
        super().__init__()
        self._below = _Ops(self)

    def __enter__(self) -> Any:
        self._below.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._below.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, attribute = getattr(func, "__name__", ""), getattr(getattr(func, "__self__", None), "__name__", "")
        if name == "__get__" and attribute in _GETTERS:
            return _GETTERS[attribute](self, args[0], func)
        asked: list[Any] = [each for each in (*args, *kwargs.values()) if _is_device(each)]
        if name == "cpu" and self.holds(args[0]):
            func, name, asked = Tensor.clone, "clone", [_HOST]
        if not asked or func is torch.device or name == "_parse_to":
            return func(*args, **kwargs)
        there = asked[0].type == HERE.type if isinstance(asked[0], torch.device) else asked[0].startswith(HERE.type)
        args, kwargs = tree_map_only((torch.device, str), _on_host, (args, kwargs))
        before = args[0] if args and isinstance(args[0], Tensor) else None
        if before is not None and name in _MOVES and self.holds(before) is not there:
            kwargs["copy"] = True  # for the host it is there already
        self._below.place = there
        try:
            made = func(*args, **kwargs)
        finally:
            self._below.place = None
        if func is torch.tensor and there:  # no op of its own is seen below
            self.put(made)
        return made

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the device."""
        if tensor.layout is torch.sparse_coo:
            return self.holds(tensor._values())
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # a subclass without memory
            return False
        held = self._storages.get(storage._cdata)
        return held is not None and not held.expired()

    def put(self, tensor: Tensor) -> None:
        """Make a tensor one of the device."""
        if tensor.layout is torch.sparse_coo:
            self.put(tensor._values())
            self.put(tensor._indices())
            return
        storage = tensor.untyped_storage()
        if tensor.dtype is torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype: the MPS framework doesn't support float64.")
        self._storages[storage._cdata] = StorageWeakRef(storage)

    def device_of(self, tensor: Tensor, get: Any) -> torch.device:
        device = get(tensor)
        return HERE if device.type == "cpu" and self.holds(tensor) else device

    def grad_of(self, tensor: Tensor, get: Any) -> Tensor | None:
        grad = get(tensor)  # autograd has made it, behind this mode's back
        if grad is not None and type(grad) is Tensor and self.holds(tensor) and not self.holds(grad):
            self.put(grad)
        return grad


_GETTERS: dict[str, Callable[[WithoutFp64, Tensor, Any], Any]] = {
    "device": WithoutFp64.device_of,
    "is_cpu": lambda mode, tensor, get: get(tensor) and not mode.holds(tensor),
    "is_mps": lambda mode, tensor, get: mode.holds(tensor),
    "grad": WithoutFp64.grad_of,
}


class _Ops(TorchDispatchMode):
    """Below the other mode: what an op may take, and where its results are."""

    def __init__(self, above: WithoutFp64) -> None:
        super().__init__()
        self.above = above
        self.place: bool | None = None  # whether a call wants its results on the device; None: where its inputs are

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, overload = func._schema.name, func._schema.overload_name
        given = [each for each in tree_leaves((args, kwargs or {})) if isinstance(each, Tensor)]
        on = [self.above.holds(each) for each in given]
        if any(on) and name not in _MAY_MIX:
            if any(each.dim() for each, there in zip(given, on, strict=True) if not there):
                raise RuntimeError(f"Expected all tensors to be on the same device in {name}, but found two devices")
            if lacks(name.removeprefix("aten::"), overload):
                raise NotImplementedError(f"The operator '{name}' is not currently implemented for the MPS device")
        made = func(*args, **(kwargs or {}))
        there = any(on) if self.place is None else self.place
        if there and name not in ("aten::copy_", "aten::set_"):
            old = {id(each) for each in given}
            for each in tree_leaves(made):
                if isinstance(each, Tensor) and id(each) not in old and not (given and _aliases(each, given)):
                    self.above.put(each)
        return made


def _aliases(tensor: Tensor, others: list[Tensor]) -> bool:
    if tensor.layout is not torch.strided:
        return False
    at = tensor.untyped_storage()._cdata
    return any(each.layout is torch.strided and each.untyped_storage()._cdata == at for each in others)


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and bool(re.match(r"(cpu|mps)(:\d+)?$", value)))


def _on_host(value: Any) -> Any:
    return _HOST if _is_device(value) else value


@functools.cache
def lacks(name: str, overload: str) -> bool:
    """Return whether torch's table has kernels for an op, but none for this device."""
    entry = _table().get(f"{name}.{overload}" if overload else name)
    if entry is None:
        return False
    if structured := re.search(r"structured_delegate: (\w+)\.?(\w*)", entry):
        return lacks(*structured.groups())
    dispatch = re.search(r"\n  dispatch:\n((?:    .*\n)+)", entry)
    if dispatch is None or "Composite" in dispatch[1]:
        return False
    return "MPS" not in dispatch[1]


@functools.cache
def _table() -> dict[str, str]:
    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    return {entry.split("(")[0]: entry for entry in path.read_text().split("\n- func: ")[1:]}


_NOT_HERE = (
    "test_report",  # torch's ops leave marks on the CPU only
    "test_a_report_says_which_it_was",
    "test_a_subclass",  # one that holds two tensors has no storage, by which this mode tells where it is
    "test_spikes.py",  # the bits of fp64
    "test_wrong_scalars_beside_a_known_list_raise",  # here and below: of several dtypes, fp64 among them
    "test_other_tensors_of_the_same_form_are_not_looked_at",
    "test_no_tensor_is_kept_alive",
    "test_every_kind_is_unscaled_and_checked_as_by_torch[fp64",
    "test_every_kind_is_unscaled_and_checked_as_by_torch[mixed",
    "test_one_flag_is_for_all_batches_of_a_device",
    "test_the_2_norm_of_any_dtypes_together",
)


def applies(item: Any) -> bool:
    """Return whether a test of every place can run on this device: it asks for no fp64 there."""
    given = getattr(item, "callspec", None)
    if given is None or getattr(given.params.get("place"), "device", None) != "mps":
        return False
    if any(name in item.nodeid for name in _NOT_HERE):
        return False
    return not any(each is torch.float64 or "float64" in str(each) for each in given.params.values())
