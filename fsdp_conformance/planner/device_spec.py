"""Compute and memory of a device: nominal numbers from data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from fsdp_conformance.errors import ConfigError
from fsdp_conformance.planner.link_spec import LinkSpec

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """One device, and its rank's share of the host."""

    tflops_16_bit: float
    """10**12 floating-point operations per second of matrix products in bfloat16 or float16, dense."""
    tflops_32_bit: float
    """The same in float32, without TensorFloat-32."""
    memory_gib: float
    """GiB (2**30 bytes)."""
    memory_gb_per_s: float
    """GB (10**9 bytes) per second between the device and its memory."""
    host_link: LinkSpec
    """Between the device and host memory, in each direction."""
    host_memory_gb_per_s: float
    """GB per second between the host's processors and memory, divided by the ranks of the host."""
    overlaps: bool = True
    """True if collectives overlap with computation. False if the same cores do both."""

    def __post_init__(self) -> None:
        problems = [
            f"{field.name} must be positive, got {value!r}"
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), (int, float))
            and field.name != "overlaps"
            and not value > 0
        ]
        if problems:
            raise ConfigError(problems, where="DeviceSpec")

    def tflops(self, itemsize: int) -> float:
        """TFLOPS in a dtype of `itemsize` bytes."""
        return self.tflops_16_bit if itemsize <= 2 else self.tflops_32_bit


#: PCIe 5.0 and 4.0 x16: 32 and 16 GT/s on 16 lanes, 128 of 130 bits of payload; a copy starts within ten microseconds.
_PCIE_5 = LinkSpec(launch_us=10.0, latency_us=0.0, bandwidth_gb_per_s=63.0)
_PCIE_4 = LinkSpec(launch_us=10.0, latency_us=0.0, bandwidth_gb_per_s=31.5)

#: Named devices. Memory sold as 80 GB is 80 x 2**30 bytes, of which the driver keeps less than 1 %.
DEVICES: Mapping[str, DeviceSpec] = {
    # NVIDIA A100 data sheet, SXM 80GB; DGX A100: 16 channels of DDR4-3200, 410 GB/s, for 8 ranks.
    "a100": DeviceSpec(
        tflops_16_bit=312.0, tflops_32_bit=19.5, memory_gib=80.0, memory_gb_per_s=2039.0, host_link=_PCIE_4,
        host_memory_gb_per_s=51.0,
    ),
    # NVIDIA H100 data sheet, SXM, without sparsity; DGX H100: 16 channels of DDR5-4800, 614 GB/s, for 8 ranks.
    "h100": DeviceSpec(
        tflops_16_bit=989.0, tflops_32_bit=67.0, memory_gib=80.0, memory_gb_per_s=3350.0, host_link=_PCIE_5,
        host_memory_gb_per_s=77.0,
    ),
    # NVIDIA H200 data sheet, SXM; the host of the H100.
    "h200": DeviceSpec(
        tflops_16_bit=989.0, tflops_32_bit=67.0, memory_gib=141.0, memory_gb_per_s=4800.0, host_link=_PCIE_5,
        host_memory_gb_per_s=77.0,
    ),
}  # fmt: skip
