"""Where ``cu_seqlens`` is read: on the CPU, once a call, and without a copy if it was given there."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from metaplastic.ops import contract


class Copies(TorchDispatchMode):
    """Counts what is copied between devices."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.count += function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        return found


def test_offsets_on_a_device_are_copied_back_once():
    with FakeTensorMode(allow_non_fake_inputs=True), Copies() as copies:  # as of a device, without one
        offsets = contract.on_host(torch.empty(4, dtype=torch.int32, device="cuda"))
        assert offsets.device.type == "cpu" and copies.count == 1
        assert contract.on_host(offsets) is offsets and copies.count == 1
        inside = contract.inside_sequences(offsets, 7, torch.device("cuda"))
        assert inside.device.type == "cuda" and inside.dtype == torch.bool and copies.count == 1
    assert contract.on_host(None) is None


def test_the_tail_is_outside():
    inside = contract.inside_sequences(torch.tensor([0, 2, 5]), 7, torch.device("cpu"))
    assert inside.tolist() == [True] * 5 + [False] * 2
