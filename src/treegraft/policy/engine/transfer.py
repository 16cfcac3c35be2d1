"""Numbers from the engine's thread to its device, in one copy that is not waited for."""

from __future__ import annotations

import torch
from torch import Tensor


def moved(numbers: Tensor, device: torch.device) -> Tensor:
    """Returns a CPU tensor on `device`; a tensor on the CPU itself where that is the device."""
    # From memory that is not paged the copy runs beside the thread, which goes on.
    ours = numbers.pin_memory() if device.type == "cuda" else numbers
    return ours.to(device, non_blocking=True)
