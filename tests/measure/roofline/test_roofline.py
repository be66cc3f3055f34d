"""Floors by arithmetic one can follow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.model.describe.test_experts import QWEN3_30B
from tests.model.gguf.gguf_files import write_model
from twostroke.cli import main
from twostroke.measure.roofline.hardware import HARDWARE, find_hardware
from twostroke.measure.roofline.roofline import Roofline, Settings, measured_phases
from twostroke.measure.roofline.shapes import SHAPES, find_spec, parameter_count, stored_bytes


def test_seven_billion_parameters_on_an_a100() -> None:
    """The figures everybody quotes: 46 ms to prefill 1,024 tokens, 7 ms a token."""
    found = Roofline(None, HARDWARE["A100"], Settings(prompt=1024), parameters=7e9)
    assert 1e3 * found.prefill().floor_s == pytest.approx(2 * 7e9 * 1024 / 312e12 * 1e3)
    assert 1e3 * found.prefill().floor_s == pytest.approx(46, abs=0.5)
    assert 1e3 * found.decode().floor_s == pytest.approx(14e9 / 2039e9 * 1e3)
    assert 1e3 * found.decode().floor_s == pytest.approx(7, abs=0.2)


def test_thirteen_billion_take_0_8_mb_of_cache_a_token() -> None:
    found = Roofline(find_spec("llama-2-13b"), HARDWARE["A100"], Settings())
    assert found.kv_bytes_per_token == 2 * 40 * 40 * 128 * 2 == 819_200
    half = Roofline(find_spec("llama-2-13b"), HARDWARE["A100"], Settings(kv="fp8"))
    assert half.kv_bytes_per_token == 409_600


def test_a_models_floors_count_what_the_notes_say() -> None:
    spec = find_spec("llama-3.1-8b")
    found = Roofline(spec, HARDWARE["H200"], Settings(prompt=1024, context=1024, batch=32))
    layers = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    head = 4096 * 128256
    attention = 4 * 32 * 4096
    prefill = 2 * layers * 1024 + 2 * head + attention * 1024 * 1025 / 2
    assert found.prefill().flops == pytest.approx(prefill)
    decode = 32 * (2 * layers + 2 * head + 1024 * attention)
    assert found.decode().flops == pytest.approx(decode)
    assert found.decode().num_bytes == pytest.approx(2 * (layers + head) + 32 * 1025 * 131_072)
    assert found.decode().bound == "memory"
    assert found.prefill().bound == "compute"
    assert found.ridge == pytest.approx(989e12 / 4.8e12)
    assert found.kv_bound_batch == pytest.approx(2 * (layers + head) / (1025 * 131_072))
    notes = " ".join(found.notes())
    assert "Rule of thumb" in notes
    assert "16.6 ms" in notes  # what 2 × parameters × tokens would have been


def test_a_precision_a_phase_reads_one_of_two_formats() -> None:
    spec, h200 = find_spec("llama-3.1-8b"), HARDWARE["H200"]
    fp8, int4 = (Roofline(spec, h200, Settings(weights=one, batch=8)) for one in ("fp8", "int4"))
    both = Roofline(spec, h200, Settings(weights="fp8", decode_weights="int4", batch=8))
    assert both.prefill() == fp8.prefill()
    assert both.decode() == int4.decode()
    assert both.weight_bytes == fp8.weight_bytes + int4.weight_bytes
    assert both.compute_bound_batch == int4.compute_bound_batch
    assert "Prefill reads fp8 weights and decode int4 ones" in " ".join(both.notes())


def test_a_mixture_of_experts_reads_those_that_its_tokens_choose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_30B))
    spec = find_spec(str(path))
    layer = 2048 * (2 * 4096 + 2 * 512 + 128)  # q and o, k and v, the router
    expert, head = 3 * 2048 * 768, 2048 * 151936
    for batch, used in ((1, 8.0), (4, 128 * (1 - (1 - 8 / 128) ** 4)), (10**4, 128.0)):
        found = Roofline(spec, HARDWARE["H200"], Settings(batch=batch))
        assert found.experts_in_use(batch) == (pytest.approx(used), 128)
        expected = 2 * (48 * (layer + used * expert) + head)
        cached = batch * 1025 * found.kv_bytes_per_token
        assert found.decode().num_bytes == pytest.approx(expected + cached)
        assert found.decode().flops == pytest.approx(
            batch * (2 * (48 * (layer + 8 * expert) + head) + 1024 * 4 * 48 * 4096)
        )
    assert main(["roofline", str(path), "--hardware", "H200", "--batch", "4"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "parameters: 30.53e9, of which a token goes through 3.35e9; decode at batch 4" in told
    assert "reads 29.1 of a layer's 128 experts" in told
    assert "if all are equally likely" in told
    assert "3.35e9 active parameters" in told


def test_two_devices_share_the_work_and_talk() -> None:
    spec = find_spec("llama-3.1-70b")
    one = Roofline(spec, HARDWARE["H100"], Settings())
    two = Roofline(spec, HARDWARE["H100"], Settings(tensor_parallel=2))
    assert one.kv_tokens == 0  # 141 GB of weights in 80 GB
    assert two.prefill().compute_s == pytest.approx(one.prefill().compute_s / 2)
    # 80 layers, two sums each, and the embedding's, of 1,024 × 8,192 numbers of 16 bits, half of
    # them sent twice; half of the logits of a token, and the token, by one of the two
    sent = (2 * 80 + 1) * 2 * 8192 * 1024 + (128256 / 2 * 2 + 4) / 2
    assert two.prefill().comm_s == pytest.approx(sent / 450e9)
    four_bits = Roofline(spec, HARDWARE["H100"], Settings(weights="int4"))
    assert (four_bits.kv_tokens or 0) > 90_000


def test_every_shape_is_about_as_large_as_its_name_says() -> None:
    for name in SHAPES:
        size = parameter_count(name.rsplit("-", 1)[1])
        assert size is not None
        count = find_spec(name).num_parameters()
        assert count == pytest.approx(size, rel=0.25), name


@pytest.mark.parametrize(
    ("spelt", "name"),
    [("a100", "A100"), ("4090", "RTX4090"), ("nvidia H100", "H100"), ("A100-80GB", "A100")],
)
def test_hardware_is_found_as_people_spell_it(spelt: str, name: str) -> None:
    assert find_hardware(spelt).name == name


def test_measured_phases_come_from_steps_of_one_phase() -> None:
    work = {"tokens": 4, "flops": 100.0, "num_bytes": 50.0}
    none = {"tokens": 0, "flops": 0.0, "num_bytes": 0.0}
    steps = [
        {"prefill": work, "decode": none, "device_s": 2.0},
        {"prefill": none, "decode": work, "device_s": 4.0},
        {"prefill": none, "decode": work, "device_s": 4.0},
        {"prefill": work, "decode": work, "device_s": 9.0},
    ]
    prefill, decode = measured_phases(steps)
    assert (prefill.name, prefill.steps, prefill.flops_per_s) == ("prefill", 1, 50.0)
    assert (decode.steps, decode.flops_per_s, decode.intensity) == (2, 25.0, 2.0)


def test_the_command_prints_draws_and_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "roof.html"
    words = ["roofline", "llama-3.1-8b", "--hardware", "H100"]
    assert main([*words, "--html", str(page)]) == 0
    assert "compute" in capsys.readouterr().out
    assert page.read_text().count("<figure") == 3
    assert main([*words, "--json", "--html", str(page)]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["kv_bytes_per_token"] == 131_072  # and nothing else is there
    assert told.err == f"report: {page}\n"
    assert main(["roofline", "llama-3.1-8b", "--hardware", "H1000"]) == 1
    assert "is not in the table, did you mean" in capsys.readouterr().err.replace("; did", ", did")
    assert main(["roofline", "lama-3.1-8b"]) == 1
    assert "Known by name: llama-2-7b" in capsys.readouterr().err


def test_weights_of_a_gguf_file_count_as_they_are_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.gguf"
    write_model(path)  # in fp32
    assert main(["roofline", str(path), "--hardware", "A100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["weights"] == "file"
    assert found["weight_bytes"] == 4 * found["parameters"]
    assert main(["roofline", str(path), "--hardware", "A100", "--weights", "fp16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["weight_bytes"] == 2 * found["parameters"]
    assert stored_bytes("llama-3.1-8b") is None
