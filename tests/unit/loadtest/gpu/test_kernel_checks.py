"""The checks of kernels, on tensors that say they are a GPU's and have no values."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.gpu.kernels.launch import Launch
from loadtest.gpu.checks.kernels import kernel_items
from loadtest.gpu.common.place import Place

NAMES = ("norms, 4096 wide", "gates", "grammar masks")
"""Those whose work asks no tensor for a value in between."""


@pytest.mark.parametrize("name", NAMES)
def test_a_check_mixes_no_devices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[set[str]] = []

    def note(launch: Launch) -> None:
        tensors = [x for x in launch.arguments.values() if isinstance(x, torch.Tensor)]
        launched.append({tensor.device.type for tensor in tensors})

    # Neither a driver nor values: what would ask for them is left out.
    monkeypatch.setattr(Launch, "run", note)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "__float__", lambda tensor: 0.0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    place = Place(torch.device("cuda", 0), torch.bfloat16, small=False)
    item = next(item for item in kernel_items(place) if item.name == name)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        assert list(item.work())
    assert launched
    assert all(devices == {"cuda"} for devices in launched)
