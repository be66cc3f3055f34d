"""Routes that return information: models, health, load, version, metrics, tokenizer."""

from __future__ import annotations

import asyncio
from functools import partial

from prometheus_client import CONTENT_TYPE_LATEST

from twostroke import __version__
from twostroke.serve.error_responses import ApiError, unavailable
from twostroke.serve.fields.protocol import DetokenizeRequest, TokenizeRequest
from twostroke.serve.fields.response_json import Json
from twostroke.serve.generation.prompts import ThreadPool
from twostroke.serve.generation.service import Service
from twostroke.serve.http.http_request import JSON, HttpRequest


class InfoRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._metrics = ThreadPool("scrapes", 1, 0)
        self._scrape: asyncio.Task[bytes] | None = None

    def close(self) -> None:
        self._metrics.close()

    async def health(self, http: HttpRequest) -> None:
        service = self._service
        if service.admission.draining:  # no `ApiError`: this is not a failure to log
            await http.respond(503, b'{"status":"shutting down"}', JSON)
            return
        if service.client.asleep:  # status 200, so that a supervisor does not restart the server
            await http.respond_json({"status": "sleeping"})
            return
        if not service.client.healthy:
            raise unavailable("the engine is not running")
        await http.respond_json({"status": "ok"})

    async def load(self, http: HttpRequest) -> None:
        """Send the number of open requests, under vLLM's name."""
        await http.respond_json({"server_load": len(self._service.open_streams)})

    async def version(self, http: HttpRequest) -> None:
        await http.respond_json({"version": __version__})

    async def metrics(self, http: HttpRequest) -> None:
        kind = ((b"content-type", CONTENT_TYPE_LATEST.encode()),)
        if self._scrape is None or self._scrape.done():
            work = self._metrics.run(self._service.metrics.text)
            self._scrape = asyncio.get_running_loop().create_task(work)
        text = await asyncio.shield(self._scrape)  # one scrape for all concurrent requests
        await http.respond(200, text, kind)

    async def models(self, http: HttpRequest) -> None:
        models = [self._model(name) for name in self._service.models]
        await http.respond_json({"object": "list", "data": models})

    async def model(self, http: HttpRequest) -> None:
        name = http.path_params["model"]
        self._service.check_model(name)
        await http.respond_json(self._model(name))

    def _model(self, name: str) -> Json:
        service = self._service
        return {
            "id": name,
            "object": "model",
            "created": service.started,
            "owned_by": "twostroke",
            "root": service.models[0],
            "parent": None,
            "max_model_len": service.client.info.max_model_len,
        }

    async def embeddings(self, http: HttpRequest) -> None:
        raise ApiError(
            501, "this server generates text; embeddings are not supported", code="not_implemented"
        )

    async def tokenize(self, http: HttpRequest) -> None:
        service = self._service
        async with service.read(http, TokenizeRequest) as (request, num_bytes):
            service.check_model(request.model)
            work = partial(self._tokenize, request)
            answer = await service.prompts.off_loop(request, num_bytes, work)
        await http.respond_json(answer)

    def _tokenize(self, request: TokenizeRequest) -> Json:
        prompts = self._service.prompts
        if (request.prompt is None) == (request.messages is None):
            raise ApiError(400, "send either prompt or messages")
        if request.messages is not None:
            ids = prompts.render(request.messages, request)
        else:
            ids = prompts.encode(request.prompt or "", request.add_special_tokens is not False)
        tokenizer = self._service.tokenizer
        texts = None
        if request.return_token_strs and tokenizer is not None:
            texts = [tokenizer.vocabulary_entry(token) for token in ids]
        length = self._service.client.info.max_model_len
        return {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": texts}

    async def tokenizer_info(self, http: HttpRequest) -> None:
        tokenizer, service = self._service.tokenizer, self._service
        if tokenizer is None:
            raise ApiError(400, "no tokenizer is loaded")
        special = tokenizer.special_tokens
        named = (tokenizer.bos_token, tokenizer.eos_token)
        await http.respond_json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",  # transformers', for the same files
                "vocab_size": tokenizer.vocab_size,
                "model_max_length": service.client.info.max_model_len,
                "bos_token": tokenizer.bos_token or None,
                "eos_token": tokenizer.eos_token or None,
                "additional_special_tokens": [t for t in special.values() if t not in named],
                "added_tokens_decoder": {
                    str(token_id): {"content": text, "special": True}
                    for token_id, text in special.items()
                },
                "chat_template": service.client.input_processor.chat_template,
            }
        )

    async def detokenize(self, http: HttpRequest) -> None:
        service = self._service
        async with service.read(http, DetokenizeRequest) as (request, num_bytes):
            service.check_model(request.model)
            work = partial(self._detokenize, request)
            answer = await service.prompts.off_loop(request, num_bytes, work)
        await http.respond_json(answer)

    def _detokenize(self, request: DetokenizeRequest) -> Json:
        tokenizer, size = self._service.tokenizer, self._service.client.info.vocab_size
        if tokenizer is None:
            raise ApiError(400, "no tokenizer is loaded")
        longest = self._service.client.info.max_model_len
        if len(request.tokens) > longest:
            raise ApiError(
                400,
                f"tokens: {len(request.tokens)} ids, and at most {longest} (max_model_len) are "
                "read; send them in pieces",
                param="tokens",
            )
        if request.tokens and not 0 <= min(request.tokens) <= max(request.tokens) < size:
            raise ApiError(400, f"tokens: the model's ids go from 0 to {size - 1}", param="tokens")
        return {"prompt": tokenizer.decode(request.tokens, skip_special_tokens=False)}
