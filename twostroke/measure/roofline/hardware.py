"""What the machines people run models on can do at most, from their makers' data sheets.

Dense rates (without sparsity), in FLOP/s by precision, and bytes a second of memory. A real kernel
reaches a share of them; `EFFICIENCY` has what well-made ones reach.
"""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.errors import ConfigError, nearest

T, GB = 1e12, 1e9
# Shares of the data sheet's rates that good kernels reach: an estimate, told as one.
PREFILL_EFFICIENCY, DECODE_EFFICIENCY = 0.6, 0.8


@dataclass(frozen=True)
class Hardware:
    name: str
    flops: dict[str, float]  # by precision of the product
    bandwidth: float  # bytes a second
    memory: float  # bytes
    link: float = 0.0  # bytes a second to another such device, one way
    measured: bool = False

    def rate(self, precision: str) -> float:
        """FLOP/s in a precision; where the device does not have it, in the next wider one."""
        for name in _wider(precision):
            if name in self.flops:
                return self.flops[name]
        return max(self.flops.values())


def _wider(precision: str) -> tuple[str, ...]:
    order = ("fp4", "fp8", "int8", "fp16", "fp32")
    at = order.index(precision) if precision in order else 3
    if precision == "int4":  # weights alone: the products are 16 bits wide
        at = 3
    return tuple(name for name in order[at:] if precision != "fp8" or name != "int8")


# TFLOP/s in 16 bits, 8-bit floats, 8-bit integers, 4-bit floats (0: not there); GB/s of memory; GB
# of memory; GB/s to another device.
_TABLE = {
    "A100-40GB": (312, 0, 624, 0, 1555, 40, 300),
    "A100": (312, 0, 624, 0, 2039, 80, 300),
    "H100": (989, 1979, 1979, 0, 3350, 80, 450),
    "H200": (989, 1979, 1979, 0, 4800, 141, 450),
    "B200": (2250, 4500, 4500, 9000, 8000, 192, 900),
    "L4": (121, 242, 242, 0, 300, 24, 32),
    "L40S": (362, 733, 733, 0, 864, 48, 32),
    "A10G": (70, 0, 140, 0, 600, 24, 32),
    "RTX4090": (165, 330, 661, 0, 1008, 24, 32),
    "RTX5090": (209, 419, 838, 1676, 1792, 32, 64),
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
    """By its name, in any spelling; `here` is this machine, measured now."""
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
        f"--hardware {name!r} is not in the table{nearest(name, known_names)}; there are "
        f"{', '.join(known_names)}"
    )


def measure_here() -> Hardware:
    """This machine's processor: what its cores multiply and read, measured on the spot."""
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
