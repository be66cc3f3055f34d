"""A process with one engine, for bench/cpu.py. The engine's own Python runs it:

    PYTHON bench/cpu_workers.py {twostroke,vllm,openvino,transformers,llama} MODEL [key=value ...]

Loads the model, generates one token and prints `{"ready": true}`. Then answers each line
`{"prompts": [[ids]], "output": n}` with `{"first_s": ..., "decode_s": ..., "decode_tokens": ...}`,
until stdin ends. `first_s`: until every prompt has its first token. `decode_*`: from then until the
first of them ends, so that only steps count in which every stream writes. Needs nothing but the
engine.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

Prompts = list[list[int]]
Times = list[list[float]]  # for each request, when each of its tokens came


def tokens(count: int, start: int) -> list[int]:
    return [(start * 977 + n * 31) % 40000 + 100 for n in range(count)]


def summary(start: float, times: Times) -> dict[str, float]:
    first, end = max(each[0] for each in times), min(each[-1] for each in times)
    written = sum(first < when <= end for each in times for when in each)
    return {"first_s": first - start, "decode_s": end - first, "decode_tokens": written}


class TwostrokeWorker:
    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from twostroke import LLM

        self._llm = LLM(model or None, **{"enable_prefix_caching": False, **options})

    def run(self, prompts: Prompts, output: int) -> dict[str, float]:
        from twostroke import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        records = [done.records[0] for done in outputs]
        return summary(min(r.received_s for r in records), [list(r.token_s) for r in records])


class VLLMWorker:
    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(model, **{"enable_prefix_caching": False, **options})
        self._count = 0

    def run(self, prompts: Prompts, output: int) -> dict[str, float]:
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        times: dict[str, list[float]] = {}
        start = perf_counter()
        for prompt in prompts:
            name = str(self._count)
            self._count += 1
            # The engine may extend a request's name and returns the name.
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
            times[name] = []
        while engine.has_unfinished_requests():
            for done in engine.step():
                seen = times[done.request_id]
                seen += [perf_counter()] * (len(done.outputs[0].token_ids) - len(seen))
        return summary(start, list(times.values()))


class OpenVINOWorker:
    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import openvino_genai

        self._pipeline = openvino_genai.LLMPipeline(model, "CPU", **options)

    def run(self, prompts: Prompts, output: int) -> dict[str, float]:
        import numpy as np
        import openvino
        import openvino_genai

        ids = np.array(prompts, dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
        )
        config = openvino_genai.GenerationConfig(
            max_new_tokens=output, ignore_eos=True, do_sample=False
        )
        start = perf_counter()
        done = self._pipeline.generate(inputs, config)
        total = perf_counter() - start
        assert all(len(each) == output for each in done.tokens)
        steps = list(done.perf_metrics.raw_metrics.m_new_token_times)  # milliseconds of its clock
        decode = (steps[-1] - steps[0]) / 1e3
        # If prompts start in different steps, the first ones decode during the prefill of the rest.
        assert len(steps) == output, "its streams did not run in step"
        return {
            "first_s": total - decode,
            "decode_s": decode,
            "decode_tokens": (output - 1) * len(prompts),
        }


class TransformersWorker:
    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        dtype = getattr(torch, options.pop("dtype", "float32"))
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, **options).eval()

    def run(self, prompts: Prompts, output: int) -> dict[str, float]:
        import torch

        with torch.inference_mode():
            ids, cache, times = torch.tensor(prompts), None, []
            start = perf_counter()
            for _ in range(output):
                out = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                ids, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
                times.append(perf_counter())
        return summary(start, [times] * len(prompts))


class LlamaWorker:
    """llama.cpp's own benchmark, which loads the model each time and accepts no token ids.

    `model` is FOLDER_OF_BINARIES:FILE.gguf. Options are flags of llama-batched-bench.
    """

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        folder, _, self._model = model.partition(":")
        self._bin = Path(folder)
        self._flags = [f"-{key}={value}" for key, value in options.items()]
        self._flags = [part for flag in self._flags for part in flag.split("=", 1)]
        self._started = False

    def run(self, prompts: Prompts, output: int) -> dict[str, float]:
        if not self._started and (self._bin / "llama-completion").exists():
            self._started = True
            return self._start(len(prompts[0]))
        length, count = len(prompts[0]), len(prompts)
        flags = ["-npp", length, "-ntg", max(1, output - 1), "-npl", count]
        flags += ["-c", count * (length + output), "--output-format", "jsonl"]
        text = self._call("llama-batched-bench", [*flags, *self._flags])
        line = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
        written = line["tg"] * count
        return {"first_s": line["t_pp"], "decode_s": line["t_tg"], "decode_tokens": written}

    def _start(self, length: int) -> dict[str, float]:
        """Time a prompt of as many tokens as words up to its first token."""
        flags = ["-p", "the" + " the" * (length - 1), "-n", "1", "-no-cnv", *self._flags]
        start = perf_counter()
        self._call("llama-completion", flags)
        return {"first_s": perf_counter() - start, "decode_s": 0.0, "decode_tokens": 0}

    def _call(self, binary: str, flags: list[Any]) -> str:
        cores = len(os.sched_getaffinity(0))
        command = [self._bin / binary, "-m", self._model, "-t", cores, *flags]
        return subprocess.run(
            [str(part) for part in command], check=True, capture_output=True, text=True
        ).stdout


ENGINES: dict[str, Any] = {
    "twostroke": TwostrokeWorker,
    "vllm": VLLMWorker,
    "openvino": OpenVINOWorker,
    "transformers": TransformersWorker,
    "llama": LlamaWorker,
}


def as_options(pairs: list[str]) -> dict[str, Any]:
    """Return key=value options as a dict. A value is JSON if it can be parsed as JSON."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not separator:
            raise SystemExit(f"{pair!r} is not key=value")
        try:
            options[key] = json.loads(text)
        except ValueError:
            options[key] = {"True": True, "False": False, "None": None}.get(text, text)
    return options


def main() -> None:
    # What an engine prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = ENGINES[sys.argv[1]](sys.argv[2], as_options(sys.argv[3:]))
    engine.run([tokens(128, 7)], 1)
    answers.write('{"ready": true}\n')
    for line in sys.stdin:
        asked = json.loads(line)
        answer = engine.run(asked["prompts"], asked["output"])
        answer["child_peak_kib"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
