"""The native kernels on emulated CPUs: of the other architecture, Arm or x86, and a small Arm."""

from __future__ import annotations

import functools
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.kernels.cross_build import OTHER, MissingError, emulator_version
from tests.kernels.other_architecture import CPUS, Cpu, Machine
from tests.kernels.test_native_model import NAMES

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]  # the first run compiles

ALL_NAMES = "test_what_need_not_be_exact_stays_near_the_reference"
NATIVE_TESTS = (
    "test_native.py::test_products_equal_float64_for_every_number_of_columns",
    "test_native.py::test_products_equal_float64_for_every_number_of_tokens",
    "test_native.py::test_the_largest_codes_and_activations_overflow_nothing",
    "test_native_blocks.py::test_a_format_that_holds_a_type_multiplies_it_as_float64_does",
    "test_native_fp16.py",
    "test_native_int8_kv.py",
    f"test_native_model.py::{ALL_NAMES}",
    "test_native_model.py::test_each_head_has_its_own_sink_however_its_context_is_split",
    "test_native_model.py::test_every_kind_of_model_gives_the_logits_of_the_reference",
    "test_native_model.py::test_random_steps_give_the_logits_of_the_reference",
    "test_native_model.py::test_several_tokens_of_a_decode_row_see_each_other",
)


@functools.cache
def machine_of(cpu: Cpu) -> Machine:
    try:
        return Machine(cpu)
    except MissingError as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("cpu", CPUS, ids=str)
def test_every_instruction_set_equals_the_portable_kernels(cpu: Cpu) -> None:
    machine = machine_of(cpu)
    assert machine.isas[-1] == "portable"
    assert cpu.isa == "portable" or cpu.isa in machine.isas
    assert cpu.isa != "portable" or len(machine.isas) == 1
    check = machine.kernels_check()
    assert check.returncode == 0, check.stdout
    assert re.findall(r"^(\w+) checked$", check.stdout, re.MULTILINE) == machine.isas
    assert check.stdout.endswith("\n0 failures\n")


@pytest.mark.parametrize("isa", OTHER.isas)
def test_the_emulator_has_the_instruction_set(isa: str) -> None:
    """A skip names kernels that were compiled, but not run."""
    if isa not in machine_of(CPUS[0]).isas:
        version = ".".join(map(str, emulator_version()))
        pytest.skip(f"QEMU {version} does not emulate {isa}: its kernels are compiled, but not run")


def test_native_tests_pass_on_the_other_architecture(tmp_path: Path) -> None:
    """The core cases run for the vector instruction sets, and the models of all names. Emulation is
    slow: the host computes the reference models, and a model takes only the steps of one row's
    decode, whose mean error is the largest, and the mixed steps."""
    machine, xml = machine_of(CPUS[0]), tmp_path / "report.xml"
    vector_isas = [isa for isa in machine.isas if isa != "portable"]
    status = machine.pytest(
        *(f"tests/kernels/{test}" for test in NATIVE_TESTS),
        *("-m", "core", f"--core={ALL_NAMES}"),
        *("-k", " or ".join(["int8_kv", *vector_isas])),
        *("--host-references", "--steps=decode,mixed", f"--junit-xml={xml}"),
    )
    assert status == 0
    cases = list(ET.parse(xml).iter("testcase"))
    passed = {case.attrib["name"] for case in cases if len(case) == 0}
    assert len(passed) == len(cases)
    assert {f"{ALL_NAMES}[{name}-{isa}]" for name in NAMES for isa in vector_isas} <= passed
    files = {"test_native", "test_native_blocks", "test_native_int8_kv", "test_native_model"}
    assert {f"tests.kernels.{name}" for name in files} <= {
        case.attrib["classname"] for case in cases
    }
