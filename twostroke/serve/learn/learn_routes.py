"""The routes with the data of the page `/learn`: facts of model and machine, forecasts,
experiments, and the attention of a short prompt. Experiments run only when a reader starts them."""

from __future__ import annotations

from time import monotonic
from typing import Any

from twostroke import __version__
from twostroke.measure.roofline.hardware import HARDWARE
from twostroke.observe.forecast import Forecast, Prediction, Workload
from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields.protocol import (
    LearnAttentionRequest,
    LearnPredictRequest,
    LearnRunRequest,
)
from twostroke.serve.fields.response_json import Json
from twostroke.serve.generation.prompts import ThreadPool
from twostroke.serve.generation.service import Service
from twostroke.serve.http.http_request import HttpRequest
from twostroke.serve.http.routing import Route
from twostroke.serve.learn.attention_source import AttentionSource
from twostroke.serve.learn.lab import (
    EXAMPLE_TEXT,
    MAX_OUTPUT,
    MAX_PROMPT,
    MAX_STREAMS,
    Lab,
    LabExperiment,
)

MAX_TEXT_TOKENS = 1536
ANSWER_TOKENS = 32  # of the context, kept free for the answer to a text
IDLE_BEFORE_FIRST_STEP_S = 60.0  # the idle time of an engine that has run no step yet


def learn_routes(service: Service) -> list[Route]:
    routes = LearnRoutes(service)
    facts, predict = "Model, machine and limits.", "TTFT and TPOT of requests before they run."
    run, attention = "An experiment, with its records.", "A head's attention over a short prompt."
    attention_body = LearnAttentionRequest
    return [
        Route("GET", "/learn/facts", routes.facts, facts),
        Route("POST", "/learn/predict", routes.predict, predict, LearnPredictRequest),
        Route("POST", "/learn/run", routes.run, run, LearnRunRequest, acts=True),
        Route("POST", "/learn/attention", routes.attention, attention, attention_body, acts=True),
    ]


class LearnRoutes:
    def __init__(self, service: Service) -> None:
        self._service, self._data = service, LearnData(service)

    async def facts(self, http: HttpRequest) -> None:
        await http.respond_json(self._data.facts())

    async def predict(self, http: HttpRequest) -> None:
        async with self._service.read(http, LearnPredictRequest) as (request, _):
            load = Workload(request.prompt_tokens, request.output_tokens, request.streams)
        await http.respond_json({"prediction": await self._data.predict(load)})

    async def run(self, http: HttpRequest) -> None:
        async with self._service.read(http, LearnRunRequest) as (request, _):
            found = await self._data.run(request)
        await http.respond_json(found)

    async def attention(self, http: HttpRequest) -> None:
        async with self._service.read(http, LearnAttentionRequest) as (request, _):
            found = await self._data.attention(request.tokens, request.layer, request.head)
        await http.respond_json(found)


class LearnData:
    """Makes the data of the routes, also for a recording (`commands/learn.py`)."""

    def __init__(self, service: Service) -> None:
        client = service.client
        self._service, self._lab = service, Lab(service)
        self._forecast = Forecast(client.records, client.info.max_num_batched_tokens)
        self._attention = AttentionSource(service.settings.engine)
        self._thread = ThreadPool("forecasts", 1, 4)

    def facts(self) -> Json:
        service, client = self._service, self._service.client
        info, load, steps = client.info, client.load(), client.records.steps
        if not (load.running or load.waiting):
            idle_s = monotonic() - steps[-1].committed_s if steps else IDLE_BEFORE_FIRST_STEP_S
            service.ceilings_probe.measure_if_idle(idle_s)
        ceilings = service.ceilings_probe.ceilings
        return {
            "version": __version__,
            "model": service.models[0],
            "device": info.device,
            "weights": info.weights or info.dtype,
            "weight_bytes": info.weight_bytes,
            "figures": info.figures._asdict(),
            "kv_bytes": info.kv_bytes,
            "kv_tokens": info.kv_tokens,
            "kv_windows": [group.window for group in info.kv_groups],
            "kv": load.kv._asdict(),
            "total_bytes": info.total_bytes,
            "block_size": info.block_size,
            "max_model_len": info.max_model_len,
            "max_num_seqs": info.max_num_seqs,
            "max_num_batched_tokens": info.max_num_batched_tokens,
            "threads": info.threads,
            "read_bytes_per_s": ceilings.read_bytes_per_s or None,
            "ops_per_s": ceilings.ops_per_s or None,
            "engines": [engine.phase for engine in client.engines_by_name().values()],
            "own_engines": self._lab.has_engines,
            "example_text": EXAMPLE_TEXT,
            "limits": {
                "prompt_tokens": max(1, min(MAX_PROMPT, info.max_model_len - MAX_OUTPUT)),
                "text_tokens": self._text_tokens,
                "output_tokens": MAX_OUTPUT,
                "streams": min(MAX_STREAMS, info.max_num_seqs),
            },
            "hardware": [
                {
                    "name": device.name,
                    "flops_per_s": device.rate("fp16"),
                    "bytes_per_s": device.bandwidth,
                    "memory_bytes": device.memory,
                }
                for device in HARDWARE.values()
            ],
        }

    async def predict(self, load: Workload) -> Json | None:
        """Return the forecast, or None if too few steps have run."""
        found = await self._thread.run(lambda: self._forecast.predict(load))
        return None if found is None else self._as_json(found)

    def _as_json(self, prediction: Prediction) -> Json:
        steps = [step._asdict() for step in prediction.steps]
        bytes_per_token = self._service.client.info.figures.kv_bytes_per_token
        return {
            **prediction._asdict(),
            "steps": steps,
            "kv_bytes": prediction.kv_tokens * bytes_per_token,
        }

    async def run(self, request: LearnRunRequest) -> Json:
        tokens: list[int] = []
        if request.experiment == "text":
            tokens = await self._tokens(request)
        found = await self._lab.run(self._experiment(request, tokens))
        if tokens:
            found["tokens"] = [{"id": token, "text": self._text_of(token)} for token in tokens]
            found["vocabulary"] = self._vocabulary(found["arms"][0]["requests"][0])
        return {"experiment": request.experiment, **found}

    @property
    def _text_tokens(self) -> int:
        return max(1, min(MAX_TEXT_TOKENS, self._service.client.info.max_model_len - ANSWER_TOKENS))

    async def _tokens(self, request: LearnRunRequest) -> list[int]:
        prompts, text = self._service.prompts, request.text or ""
        tokens = await prompts.off_loop(request, len(text), lambda: prompts.encode(text, True))
        if not 1 <= len(tokens) <= self._text_tokens:
            raise ApiError(
                400,
                f"text: send a text of 1 to {self._text_tokens} tokens; this one has {len(tokens)}",
                param="text",
            )
        return tokens

    def _experiment(self, request: LearnRunRequest, tokens: list[int]) -> LabExperiment:
        lab = self._lab
        if request.experiment == "text":
            params: dict[str, Any] = {"ignore_eos": False, "temperature": request.temperature}
            return lab.text(tokens, request.max_tokens, params | {"top_p": request.top_p})
        if request.experiment == "predict":
            return lab.predict(
                request.prompt_tokens, request.output_tokens, request.streams, request.rounds
            )
        experiment: LabExperiment = getattr(lab, request.experiment)()
        return experiment

    def _vocabulary(self, run: Json) -> dict[str, str]:
        """Return the texts of all tokens and candidates of an answer, by token id."""
        ids = {*run["output_tokens"]}
        for entry in run["candidates"]:
            ids.update((entry["chosen"], *entry["ids"]))
        return {str(token): self._text_of(token) for token in sorted(ids)}

    def _text_of(self, token: int) -> str:
        tokenizer = self._service.tokenizer
        return "" if tokenizer is None else tokenizer.token_text(token)

    async def attention(self, tokens: list[int], layer: int, head: int) -> Json:
        size = self._service.client.info.vocab_size
        if not all(0 <= token < size for token in tokens):
            raise ApiError(400, f"tokens: the model's ids go from 0 to {size - 1}", param="tokens")
        maps = await self._attention.maps(tokens)
        for name, value, count in (("layer", layer, len(maps.heads)), ("head", head, None)):
            count = maps.heads[layer] if count is None else count
            if value >= count:
                raise ApiError(400, f"{name} must be from 0 to {count - 1}", param=name)
        return {"layer": layer, "head": head, "heads": maps.heads, "rows": maps.rows(layer, head)}
