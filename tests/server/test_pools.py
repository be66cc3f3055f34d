"""`twostroke serve` with several engines, as it runs for real: flags, HTTP, /metrics, a death."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_serve import Server, started
from tests.tiny import tiny_folder, tiny_llm
from twostroke import SamplingParams
from twostroke.kernels import cpu

pytestmark = pytest.mark.skipif(
    not cpu.available() or not hasattr(os, "memfd_create"), reason="native kernels on Linux only"
)
PROMPT = [50 + (7 * n * n) % 200 for n in range(120)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


def complete(server: Server, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True} | more
    status, content = server.ask("/v1/completions", body)
    assert status == 200, content
    return json.loads(content)


def series(server: Server) -> dict[str, float]:
    """Every sample of /metrics by its name and labels."""
    status, content = server.ask("/metrics")
    assert status == 200
    text = content.decode()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    names = [line.rpartition(" ")[0] for line in lines]
    assert len(set(names)) == len(names), "a series is there twice"
    families = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(set(families)) == len(families), "a family is there twice"
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def of_engine(found: dict[str, float], name: str, engine: str, more: str = "") -> float:
    labels = f'engine="{engine}"'
    (value,) = (
        v for k, v in found.items() if k.startswith(name + "{") and labels in k and more in k
    )
    return value


def test_two_pools_answer_as_one_engine_and_are_told_apart_in_the_metrics(folder: Path) -> None:
    expected = (
        tiny_llm(folder)
        .generate([PROMPT], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[0]
        .outputs[0]
    )
    options = ["--num-gpu-blocks-override", "256", "--max-num-seqs", "8", "--dtype", "float32"]
    pools = ["--prefill-engines", "1", "--decode-engines", "1", "--kv-transfer-checksums"]
    own = ["--decode-config", '{"max_num_seqs": 4}']
    with started("twostroke", "serve", str(folder), *options, *pools, *own) as server:
        assert complete(server, PROMPT)["choices"][0]["text"] == expected.text
        found = series(server)
        assert (
            of_engine(found, "twostroke:phase_tokens_total", "prefill-0", 'phase="prefill"') >= 120
        )
        assert of_engine(found, "twostroke:phase_tokens_total", "prefill-0", 'phase="decode"') == 0
        assert of_engine(found, "twostroke:phase_tokens_total", "decode-0", 'phase="prefill"') == 0
        assert of_engine(found, "twostroke:phase_tokens_total", "decode-0", 'phase="decode"') == 39
        assert of_engine(found, "vllm:time_to_first_token_seconds_count", "prefill-0") == 1
        assert of_engine(found, "vllm:time_to_first_token_seconds_count", "decode-0") == 0
        assert of_engine(found, "vllm:inter_token_latency_seconds_count", "decode-0") == 39
        done = 'finished_reason="length"'
        assert of_engine(found, "vllm:request_success_total", "decode-0", done) == 1
        assert of_engine(found, "vllm:request_success_total", "prefill-0", done) == 0
        outcomes = [
            of_engine(found, "twostroke:kv_transfers_total", "decode-0", f'outcome="{name}"')
            for name in ("fetched", "failed")
        ]
        assert outcomes == [1, 0]
        assert of_engine(found, "twostroke:kv_transfer_bytes_total", "decode-0") > 0
        status, content = server.ask("/records?seconds=600")
        assert status == 200
        (request,) = json.loads(content)["requests"]
        assert "prefilled by prefill-0" in request["route"]
        assert "handed over to decode-0" in request["route"]
        assert server.ask("/health")[0] == 200
        assert server.ask("/dash/feed")[0] == 200
        status, said = server.terminate()
        assert status == 0
        assert "engines   1 prefill, 1 decode" in said
