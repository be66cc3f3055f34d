"""Peak rates of common hardware from data sheets.

Rates are dense (without sparsity) FLOP/s by precision, and memory bytes a second. Real kernels
reach a share of these rates (`PREFILL_EFFICIENCY`, `DECODE_EFFICIENCY`).
"""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.errors import ConfigError, did_you_mean

T, GB = 1e12, 1e9
# Estimated shares of the data sheet's rates that good kernels reach.
PREFILL_EFFICIENCY, DECODE_EFFICIENCY = 0.6, 0.8


@dataclass(frozen=True)
class Hardware:
    """The rates and the memory of a device."""

    name: str
    flops: dict[str, float]  # FLOP/s by precision of the matmul
    bandwidth: float  # bytes per second
    memory: float  # bytes
    link: float = 0.0  # bytes per second to another device of the kind, in one direction
    measured: bool = False

    def rate(self, precision: str) -> float:
        """Return FLOP/s in a precision, or in the next wider precision of the device."""
        for name in _wider(precision):
            if name in self.flops:
                return self.flops[name]
        return max(self.flops.values())


def _wider(precision: str) -> tuple[str, ...]:
    order = ("fp4", "fp8", "int8", "fp16", "fp32")
    at = order.index(precision) if precision in order else 3
    if precision == "int4":  # only weights have 4 bits: the matmul has 16
        at = 3
    return tuple(name for name in order[at:] if precision != "fp8" or name != "int8")


# TFLOP/s in fp16, fp8, int8 and fp4 (0: not supported); GB/s of memory; GB of memory; GB/s to
# another device.
_TABLE = {
    "A100-40GB": (312, 0, 624, 0, 1555, 40, 300),
    "A100": (312, 0, 624, 0, 2039, 80, 300),
    "H100": (989, 1979, 1979, 0, 3350, 80, 450),
    "H200": (989, 1979, 1979, 0, 4800, 141, 450),
    "B200": (2250, 4500, 4500, 9000, 8000, 192, 900),
    "GB200": (2500, 5000, 5000, 10000, 8000, 186, 900),
    "B300": (2250, 4500, 0, 13500, 8000, 288, 900),
    "GB300": (2500, 5000, 0, 15000, 8000, 288, 900),
    "L4": (121, 242, 242, 0, 300, 24, 32),
    "L40S": (362, 733, 733, 0, 864, 48, 32),
    "A10G": (70, 0, 140, 0, 600, 24, 32),
    "RTX4090": (165, 330, 661, 0, 1008, 24, 32),
    "RTX5090": (209, 419, 838, 1676, 1792, 32, 64),
    "RTXPRO6000": (503, 1007, 1007, 2015, 1597, 96, 64),
    "MI300X": (1307, 2615, 2615, 0, 5300, 192, 64),
}
_PRECISIONS = ("fp16", "fp8", "int8", "fp4")
HARDWARE = {
    name: Hardware(
        name,
        {p: rate * T for p, rate in zip(_PRECISIONS, rates, strict=True) if rate},
        bandwidth * GB,
        memory * GB,
        link * GB,
    )
    for name, (*rates, bandwidth, memory, link) in _TABLE.items()
}
HERE = "here"


def find_hardware(name: str) -> Hardware:
    """Return the hardware with this name. `here` measures this machine."""
    if name.lower() in (HERE, "this", "cpu", "local"):
        return measure_here()
    wanted = name.lower().replace("-", "").replace("_", "").replace(" ", "")
    wanted = wanted.removeprefix("nvidia").removeprefix("amd").removesuffix("sxm")
    for known, hardware in HARDWARE.items():
        plain = known.lower().replace("-", "")
        if wanted in (plain, plain.removeprefix("rtx"), plain + "80gb"):
            return hardware
    known_names = [*HARDWARE, HERE]
    raise ConfigError(
        f"--hardware {name!r} is not in the table{did_you_mean(name, known_names)}; choose one of "
        f"{', '.join(known_names)}"
    )


def measure_here() -> Hardware:
    """Measure the FLOP/s and the memory bandwidth of this machine's CPU."""
    import os

    from twostroke.observe.ceilings import measure_ceilings

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = measure_ceilings(threads or 1)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware(
        "this machine",
        {"fp16": found.ops_per_s},
        found.read_bytes_per_s,
        float(memory),
        measured=True,
    )
