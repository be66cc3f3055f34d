"""Settings of the native kernels: what is wrong is refused in words, what is right is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file

from tests.model.gguf.gguf_files import SPEC, save
from tests.tiny import CONFIG, tiny_folder, tiny_llm, tiny_weights
from twostroke import LLM, SamplingParams
from twostroke.engine import kernel_choice
from twostroke.errors import ConfigError
from twostroke.exec.native_executor import NativeExecutor
from twostroke.exec.torch_executor import TorchExecutor
from twostroke.kernels import cpu
from twostroke.model.describe.gguf_names import NAMES

pytestmark = pytest.mark.skipif(
    not cpu.available(), reason="this installation was built without the native kernels"
)

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = list(range(5, 45))
# Wide enough that a block of 32 has 32 weights, and its hidden layer no whole number of them.
WIDE = {"hidden_size": 64, "intermediate_size": 112}


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_folder(tmp_path_factory.mktemp("bf16"), **WIDE, torch_dtype="bfloat16")
    weights = tiny_weights(CONFIG | WIDE)
    tensors = {name: torch.from_numpy(values).bfloat16() for name, values in weights.items()}
    save_file(tensors, path / "model.safetensors")
    return path


def refusal(path: Path, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        tiny_llm(path, **settings)
    return str(caught.value)


def executor_of(llm: LLM) -> object:
    return llm.engine.core._executor


def write(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


# Which kernels


def test_a_cpu_runs_the_native_kernels_unless_told_otherwise(folder: Path) -> None:
    assert isinstance(executor_of(tiny_llm(folder, device="cpu")), NativeExecutor)
    native = tiny_llm(folder, device="cpu", kernels="native")
    assert isinstance(executor_of(native), NativeExecutor)
    plain = tiny_llm(folder, device="cpu", kernels="reference")
    assert isinstance(executor_of(plain), TorchExecutor)


def test_named_tokens_have_the_same_logprobs_on_both_kernels(folder: Path) -> None:
    named = SamplingParams(temperature=0, max_tokens=3, logprobs=0, logprob_token_ids=[5, 200])
    best = SamplingParams(temperature=0, max_tokens=3, logprobs=2)
    found = [
        tiny_llm(folder, device="cpu", kernels=kernels).generate(
            ["the fox", "a dog"], [named, best]
        )
        for kernels in ("native", "reference")
    ]
    for native, reference in zip(*found, strict=True):
        ours, theirs = native.outputs[0].logprobs, reference.outputs[0].logprobs
        for one, other in zip(ours, theirs, strict=True):
            assert list(one) == list(other)
            for token, told in one.items():
                assert told.logprob == pytest.approx(other[token].logprob, abs=0.01)
                assert told.rank == other[token].rank
    first = found[0][0].outputs[0]
    assert list(first.logprobs[0])[:2] == [5, 200]
    assert first.logprobs[0][5].rank is None
    assert first.logprobs[0][first.token_ids[0]].rank == 1


def test_threads_that_share_the_rows_draw_what_one_draws(folder: Path) -> None:
    params = [
        SamplingParams(temperature=0.8, top_p=0.9, max_tokens=12, logprobs=3, seed=seed)
        for seed in range(7)
    ]
    found = [
        tiny_llm(folder, device="cpu", kernels="native", threads=threads).generate(
            [PROMPT] * len(params), params, use_tqdm=False
        )
        for threads in (1, 2)
    ]
    one, two = (
        [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in each] for each in found
    )
    assert one == two
    assert len({tuple(ids) for ids, _ in one}) > 1


def test_a_kv_dtype_that_the_native_kernels_lack_is_slow_or_refused(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm = tiny_llm(folder, device="cpu", kv_cache_dtype="float32")
    assert isinstance(executor_of(llm), TorchExecutor)
    assert "kv_cache_dtype=float32: computed with torch, which is slow" in caplog.text
    said = refusal(folder, device="cpu", kernels="native", kv_cache_dtype="float32")
    assert "have no kv_cache_dtype='float32'" in said
    assert "kernels='reference'" in said


@pytest.mark.parametrize(("given", "dtype"), [("bfloat16", "bfloat16"), ("half", "float16")])
def test_a_narrow_dtype_on_a_cpu_is_reported_and_keeps_the_native_kernels(
    given: str, dtype: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = write(tiny_llm(folder, device="cpu"))
    assert not caplog.records
    llm = tiny_llm(folder, device="cpu", dtype=given)
    assert isinstance(executor_of(llm), NativeExecutor)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"dtype={dtype} changes nothing: ")
    assert write(llm) == expected


def test_the_reference_rounds_weights_and_computes_in_float32_on_a_cpu(
    folder: Path, bfloat16: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights that are bf16 already are what they are: the same log-probabilities, to the bit."""
    llm = tiny_llm(folder, device="cpu", kernels="reference", dtype="bfloat16")
    assert llm.engine.dtype == "float32"
    assert "dtype=bfloat16: weights are rounded to it" in caplog.text
    wide, narrow = (
        prompt_logprobs(path, kernels="reference", dtype=dtype)
        for path, dtype in ((bfloat16, "float32"), (bfloat16, "bfloat16"))
    )
    assert torch.equal(wide, narrow)
    wide, narrow = (
        prompt_logprobs(folder, kernels="reference", dtype=dtype)
        for dtype in ("float32", "bfloat16")
    )
    assert 0 < (wide - narrow).abs().max() < 0.5


def test_an_installation_without_native_kernels_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_choice.cpu, "available", lambda: False)
    said = refusal(folder, device="cpu", kernels="native")
    assert "this installation has no native kernels" in said
    assert "kernels='auto'" in said
    assert isinstance(executor_of(tiny_llm(folder, device="cpu")), TorchExecutor)


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("kernels", "natve", "kernels must be one of auto, reference, native, not 'natve'"),
        ("kernels", None, "kernels must be one of"),
        (
            "isa",
            "sse2",
            "isa must be one of auto, amx, avx512, avx512bw, avx2, neon, portable, not 'sse2'",
        ),
        ("isa", "NEON", "isa must be one of"),
        ("threads", 0, "threads must be a whole number from 1 to 1024 or None, not 0"),
        ("threads", -2, "threads must be a whole number"),
        ("threads", 1.5, "threads must be a whole number"),
        ("threads", True, "threads must be a whole number"),
        ("threads", "2", "threads must be a whole number"),
        ("threads_batch", 0, "threads_batch must be a whole number from 1 to 1024 or None"),
        ("threads_batch", 5000, "threads_batch must be a whole number"),
        ("exact", 1, "exact must be True or False, not 1"),
        ("exact", "yes", "exact must be True or False"),
        ("quantization", "int2", "quantization must be one of int8, int4, fp8, not 'int2'"),
        ("quantization", 8, "quantization must be one of"),
    ],
)
def test_a_wrong_value_is_refused_with_the_valid_values(
    setting: str, value: object, words: str, folder: Path
) -> None:
    assert words in refusal(folder, **{setting: value})


def test_an_instruction_set_of_another_machine_is_refused(folder: Path) -> None:
    own = cpu.module().isas()
    (other, *_) = (isa for isa in cpu.ISAS if isa not in ("auto", *own))
    said = refusal(folder, device="cpu", isa=other)
    assert f"this machine does not support isa '{other}'; use one of {', '.join(own)}" in said


def test_quantization_that_the_native_kernels_lack_is_refused(folder: Path) -> None:
    said = refusal(folder, device="cpu", quantization="fp8", kernels="native")
    assert "the native kernels have no quantization='fp8'; use int8" in said


# What settings change, and what not


def test_threads_and_instruction_sets_write_the_same_tokens(folder: Path) -> None:
    expected = write(tiny_llm(folder, device="cpu", exact=True))
    for settings in (
        {"threads": 1},
        {"threads": 3},
        {"threads": 1, "threads_batch": 2},
        {"threads": 2, "threads_batch": 1},
        {"isa": "portable"},
        {"kernels": "reference"},
    ):
        exact = {} if "kernels" in settings else {"exact": True}
        llm = tiny_llm(folder, device="cpu", **exact, **settings)  # type: ignore[arg-type]
        assert write(llm) == expected, settings


def prompt_logprobs(path: Path, **settings: Any) -> torch.Tensor:
    """Return the log-probability of every prompt token after the first."""
    llm = tiny_llm(path, device="cpu", **settings)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    entries = output.prompt_logprobs[1:]
    pairs = zip(entries, PROMPT[1:], strict=True)
    return torch.tensor([entry[token].logprob for entry, token in pairs if entry is not None])


def test_eight_bits_are_nearer_to_the_model_than_four(bfloat16: Path) -> None:
    plain = prompt_logprobs(bfloat16, kernels="reference")
    off = {
        name: (prompt_logprobs(bfloat16, quantization=name, exact=True) - plain).abs().mean()
        for name in ("int8", "int4")
    }
    as_it_is = (prompt_logprobs(bfloat16, exact=True) - plain).abs().mean()
    assert as_it_is < 0.2 * off["int8"]
    assert 0 < off["int8"] < 0.25 * off["int4"]


def test_quantised_weights_take_the_memory_they_should(bfloat16: Path) -> None:
    def weight_bytes(**settings: Any) -> int:
        return tiny_llm(bfloat16, device="cpu", **settings).engine.memory.weight_bytes

    plain = weight_bytes()
    assert weight_bytes(quantization="int8") / plain == pytest.approx(34 / 64, rel=0.02)
    assert 20 / 64 * 0.98 <= weight_bytes(quantization="int4") / plain <= 24 / 64 * 1.02


@pytest.mark.parametrize("asked", ["int8", "int4"])
@pytest.mark.parametrize("type", ["Q8_0", "Q4_1", "Q5_0"])
def test_weights_that_are_quantised_already_are_refused_by_every_backend(
    type: str, asked: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_quantised(path, gguf.GGMLQuantizationType[type])
    settings: dict[str, Any] = {"quantization": asked, "skip_tokenizer_init": True}
    for kernels in ("native", "reference"):
        with pytest.raises(ConfigError) as caught:
            LLM(str(path), kernels=kernels, device="cpu", **settings)
        assert f"is quantised already ({type}); leave quantization out" in str(caught.value)


def write_quantised(path: Path, type: gguf.GGMLQuantizationType) -> None:
    writer = gguf.GGUFWriter(path, SPEC.family)
    writer.add_block_count(SPEC.num_layers)
    writer.add_context_length(SPEC.max_context)
    writer.add_embedding_length(SPEC.hidden_size)
    writer.add_feed_forward_length(SPEC.layers[0].mlp.intermediate_size)
    writer.add_head_count(SPEC.layers[0].attention.num_heads)
    writer.add_head_count_kv(SPEC.layers[0].attention.num_kv_heads)
    writer.add_layer_norm_rms_eps(SPEC.norm_eps)
    torch.manual_seed(0)
    for name, shape in SPEC.weight_shapes().items():
        values = torch.randn(shape).numpy() * 0.3
        if len(shape) == 1:
            writer.add_tensor(NAMES.tensor(name), values + 1)
        else:
            packed = gguf.quants.quantize(values, type)
            writer.add_tensor(NAMES.tensor(name), packed, raw_dtype=type)
    save(writer)


def test_the_memory_plan_counts_the_weights_as_they_are_packed() -> None:
    llm = LLM(max_model_len=512)
    held = llm.engine.core._executor._decoder.model.num_bytes
    assert abs(llm.engine.memory.weight_bytes - held) <= 1
