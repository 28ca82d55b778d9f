"""Model FLOPs of training, and what devices could do at most: MFU is the rate of the former over the latter.

Of a token, forward and backward: three times what ``models/size.py`` counts forward (matrix products, convolutions, the
memory rule), and for attention three times 2 (K + V) of every query head for every token that it sees. What is
recomputed, and what a kernel does beyond the rule, does not count. A row counts as one document: attention across
documents is never computed, and a model with attention on packed ones looks busier by that.
"""

import torch

from ..models import MetaplasticConfig
from ..models.size import ModelSize, size

# Dense bf16 FLOP/s as the makers state them, by a part of the device's name; the first that fits.
PEAKS = {
    "GB200": 2500e12, "B200": 2250e12, "H200 NVL": 835e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12,
    "H100": 989e12, "A100": 312e12, "L40S": 362e12, "MI300X": 1307e12,
}  # fmt: skip


def peak_flops(device: str) -> float | None:
    """Of a device by its name; None if it is not in the table, or is a part of one (MIG)."""
    if "MIG" in device:
        return None
    return next((peak for name, peak in PEAKS.items() if name.lower() in device.lower()), None)


def model_flops(size: ModelSize, seen: float) -> float:
    """Of one token that sees so many, itself included."""
    return size.training_flops + 3 * size.attention_per_token * seen


def seen_in_a_row(length: int, window: int | None = None) -> float:
    """How many tokens those of a row of ``length`` see on average, themselves included."""
    reach = length if window is None else min(window, length)
    return reach - reach * (reach - 1) / (2 * length)


def least_seconds(model: MetaplasticConfig, length: int, device: torch.device, peak: float | None) -> float | None:
    """What a token of a row of ``length`` takes at ``peak`` FLOP/s; None where that is not known.

    ``peak`` None: that of the device, of its bf16 products, so it must be given for any others.
    """
    if peak is None and device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(device))
    if peak is None:
        return None
    counted = size(model)
    return model_flops(counted, seen_in_a_row(length, counted.window)) / peak
