"""Makes fake CUDA tensors without a GPU, and records the costs of their operators for the host.

`FakeTensorMode` computes shapes and devices only. It refuses operators that mix devices. It also
refuses operators with a result size that depends on values, such as `nonzero`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.device("cuda", 0)
_MOVES = {
    torch.ops.aten._to_copy.default,
    torch.ops.aten.copy_.default,
}
_NO_KERNELS = {
    *("alias", "as_strided", "detach", "expand", "select", "slice", "squeeze", "t", "transpose"),
    *("unsqueeze", "view", "_unsafe_view"),
    *("empty", "empty_like", "new_empty"),
}
"""Names of operators that make a view, or memory without values."""
_INDEXING = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put_.default,
    torch.ops.aten.index_put.default,
}


class Costs(TorchDispatchMode):
    """Counts copies and synchronisations of the operators on fake CUDA tensors."""

    def __init__(self, scalar: bool | int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.synchronisations: list[str] = []
        """Operators that wait for the device."""
        self.downloads: list[int] = []
        """Bytes of each copy to the host for which the host does not wait."""
        self.uploads: list[int] = []
        """Bytes of each copy from the host to the device."""
        self.pinned = 0
        """Number of tensors that were pinned."""
        self.kernels: list[str] = []
        """Operators that run on the device. A composite of torch may run more than one kernel."""
        self._scalar = scalar

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_cuda:
            self.synchronisations.append(str(func))
            if self._scalar is None:
                raise AssertionError("the host reads a value of the device")
            return self._scalar
        if func is torch.ops.aten._pin_memory.default:  # needs a driver
            self.pinned += 1
            return args[0].clone()
        options = dict(kwargs or {})
        if func is torch.ops.aten.empty.memory_format and options.pop("pin_memory", False):
            self.pinned += 1
        result = func(*args, **options)
        name = func._schema.name.removeprefix("aten::")
        first = result[0] if isinstance(result, tuple) else result
        if isinstance(first, Tensor) and first.is_cuda and name not in _NO_KERNELS:
            self.kernels.append(name)
        if func in _INDEXING:
            places = [place for place in args[1] if isinstance(place, Tensor)]
            assert {place.device for place in places} <= {args[0].device}, f"{func} mixes devices"
        if func in _MOVES and isinstance(result, Tensor):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            if source.is_cuda and not result.is_cuda:
                if func is torch.ops.aten.copy_.default and args[2:] == (True,):
                    self.downloads.append(source.numel() * source.element_size())
                else:
                    self.synchronisations.append(str(func))
            elif result.is_cuda and not source.is_cuda:
                self.uploads.append(source.numel() * source.element_size())
        return result


@contextmanager
def fake_cuda(
    scalar: bool | int | None = None, fakes: FakeTensorMode | None = None
) -> Iterator[Costs]:
    """Make tensors fake, and count their costs.

    The host reads `scalar` from every tensor on the device; None fails the test instead. Fake
    tensors may be used again only with the same `fakes`.
    """
    with fakes or new_fakes(), Costs(scalar) as costs:
        yield costs


def new_fakes() -> FakeTensorMode:
    """A mode in which tensors of the host may still be real."""
    return FakeTensorMode(allow_non_fake_inputs=True)
