"""The engine as a library runs where torch, numpy, safetensors, tokenizers and jinja2 are installed
and nothing else: what the server, grammars and commands need is imported where they are used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.tiny import tiny_folder

HERE = Path(__file__).parents[2]
OF_OTHERS = (
    "gguf huggingface_hub httptools llguidance msgspec opentelemetry prometheus_client rich "
    "sentencepiece transformers triton uvicorn uvloop yaml zmq"
)
PROGRAM = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from twostroke import LLM, SamplingParams

llm = LLM(sys.argv[2], num_gpu_blocks_override=64, kernels="reference", device="cpu")
params = SamplingParams(max_tokens=3, ignore_eos=True)
print(len(llm.generate(["hi"], params, use_tqdm=False)[0].outputs[0].token_ids))
print(len(llm.chat([{"role": "user", "content": "hi"}], params)[0].outputs[0].token_ids))
"""


def test_the_library_runs_on_the_core_dependencies_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, OF_OTHERS, str(tiny_folder(tmp_path))],
        env=os.environ | {"PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["3", "3"]
