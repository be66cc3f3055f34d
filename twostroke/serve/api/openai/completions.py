"""`POST /v1/completions`: continues one or several prompts, each `n` times."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.outputs import CompletionOutput, Logprobs, RequestOutput
from twostroke.request import EngineRequest
from twostroke.serve.fields.protocol import CompletionRequest
from twostroke.serve.fields.response_json import (
    Encoded,
    Json,
    LazyList,
    LogprobWriter,
    TextEventTemplate,
    concat,
    count_tokens,
    event,
    long_event,
    request_metrics,
    timings,
)
from twostroke.serve.generation.generate import ChunkWriter, Generation
from twostroke.serve.generation.params import completion_params
from twostroke.serve.generation.prompts import split_prompts
from twostroke.serve.generation.service import Service


class CompletionGeneration(Generation[CompletionRequest]):
    request_type = CompletionRequest
    id_prefix = "cmpl"

    def __init__(self, service: Service, request: CompletionRequest) -> None:
        super().__init__(service, request)
        self._prompts = split_prompts(request.prompt)
        self.num_choices = len(self._prompts) * (request.n or 1)
        self.echo = bool(request.echo)
        self.only_echo = self.echo and request.max_tokens == 0
        self._tokenizer = service.tokenizer
        as_ids = service.shows_token_ids(request)
        self._logprobs = LogprobWriter(service.token_names, request.logprobs or 0, as_ids)

    def prepare(self) -> list[EngineRequest]:
        prompts, request = self.service.prompts, self.request
        params = completion_params(request, self.service.client.info, self.service.settings)
        requests = []
        for prompt in self._prompts:
            if isinstance(prompt, str) and request.add_special_tokens is False:
                prompt = prompts.encode(prompt, add_special_tokens=False)
            requests.append(prompts.prepare(prompt, params, request))
        self._prompts = []
        return requests

    def stream_writer(self) -> CompletionStreamWriter:
        return CompletionStreamWriter(self)

    def full_response(self, outputs: Sequence[RequestOutput]) -> Json:
        counts = count_tokens(outputs)
        if self.only_echo:
            counts.completion = 0
        response = self.head.as_json("text_completion")
        response["choices"] = (
            self._choice(number, output, completion)
            for number, output in enumerate(outputs)
            for completion in output.outputs
        )
        response["usage"] = counts.usage()
        response["timings"] = timings(outputs, bool(self.request.return_token_gaps))
        if self.service.settings.enable_per_request_metrics:
            response["metrics"] = request_metrics(outputs)
        return response

    def index(self, prompt_index: int, completion: CompletionOutput) -> int:
        return prompt_index * (self.request.n or 1) + completion.index

    def _choice(self, number: int, output: RequestOutput, completion: CompletionOutput) -> Json:
        prompt = self.prompt_text(output) if self.echo else ""
        text = "" if self.only_echo else completion.text
        ids = [] if self.only_echo else completion.token_ids
        parts = [] if self.only_echo else [completion.logprobs]
        if self.echo and self.request.logprobs is not None:
            ids = [*output.prompt_token_ids, *ids]
            parts = [output.prompt_logprobs, *parts]
        choice = self.choice(
            self.index(number, completion),
            prompt + text,
            None if self.request.logprobs is None else self._logprobs.completion(ids, parts),
            completion.finish_reason,
            completion.stop_reason,
        )
        # As in vLLM, these fields are present (null) even if they were not requested.
        with_logprobs = self.request.prompt_logprobs is not None
        with_ids = self.request.return_token_ids
        choice["prompt_logprobs"] = self._logprobs.prompt(output) if with_logprobs else None
        choice["prompt_token_ids"] = output.prompt_token_ids if with_ids else None
        choice["token_ids"] = completion.token_ids if with_ids else None
        return choice

    def prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None or self._tokenizer is None:
            return output.prompt or ""
        return self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def logprobs(self, completion: CompletionOutput, offset: int) -> Json | None:
        if completion.logprobs is None:
            return None
        return self._logprobs.completion(completion.token_ids, [completion.logprobs], offset)

    def prompt_logprobs_by_id(self, output: RequestOutput) -> LazyList | None:
        return self._logprobs.prompt(output)

    def prompt_logprobs(self, output: RequestOutput) -> Json | None:
        if self.request.logprobs is None:
            return None
        entries = output.prompt_logprobs
        if entries is None:  # the prompt has one token, which has no log-probability
            entries = Logprobs()
            entries.add(None)
        return self._logprobs.completion(output.prompt_token_ids, [entries])

    def choice(
        self,
        index: int,
        text: str,
        logprobs: Json | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> Json:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }


class CompletionStreamWriter(ChunkWriter[CompletionGeneration]):
    chunk_object = "text_completion"

    def __init__(self, generation: CompletionGeneration) -> None:
        request = generation.request
        super().__init__(generation, request.stream_options)
        # By the index of the choice, for choices that have begun:
        self._templates: dict[int, TextEventTemplate] = {}
        self._offsets: dict[int, int] = {}  # the number of characters written
        self._plain_text = not (
            self.usage_always
            or generation.only_echo
            or request.return_token_ids
            or request.logprobs is not None
        )
        self._prompts_counted: set[int] = set()

    def write(self, prompt_index: int, output: RequestOutput) -> Encoded:
        if output.finished:
            self.finished.append(output)
        if not output.outputs:
            return self.progress_event(output)
        events: list[Encoded] = []
        for completion in output.outputs:
            if not self.generation.only_echo:
                self.counts.completion += len(completion.token_ids)
            index = self.generation.index(prompt_index, completion)
            template = self._templates.get(index)
            if template is not None and completion.finish_reason is None:
                events.append(template.encode(completion.text))
            else:
                events.append(self._write_choice(prompt_index, index, output, completion))
        return concat(events)

    def _write_choice(
        self, prompt_index: int, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> Encoded:
        generation = self.generation
        begin: Encoded = b""
        if index not in self._offsets:
            begin = self._begin(prompt_index, index, output)
        if generation.only_echo:
            completion = CompletionOutput(completion.index, finish_reason=completion.finish_reason)
        choice = generation.choice(
            index,
            completion.text,
            generation.logprobs(completion, self._offsets[index]),
            completion.finish_reason,
            completion.stop_reason,
        )
        self._offsets[index] += len(completion.text)
        if generation.request.return_token_ids:
            choice["token_ids"] = completion.token_ids
        more = self.running_usage()
        if output.finished and completion.index == output.outputs[-1].index:
            with_gaps = bool(generation.request.return_token_gaps)
            more["timings"] = timings([output], with_gaps)
            if with_gaps:
                return concat([begin, long_event(self.chunk([choice], **more))])
        return concat([begin, event(self.chunk([choice], **more))])

    def _begin(self, prompt_index: int, index: int, output: RequestOutput) -> Encoded:
        """Write the first event of a choice, with the echo and the fields of the prompt."""
        generation = self.generation
        self._offsets[index] = 0
        if prompt_index not in self._prompts_counted:
            self._prompts_counted.add(prompt_index)
            self.counts.prompt += len(output.prompt_token_ids)
        if self._plain_text:
            self._templates[index] = TextEventTemplate(
                lambda text: event(self.chunk([generation.choice(index, text)]))
            )
        request = generation.request
        if not (generation.echo or request.return_token_ids or request.prompt_logprobs is not None):
            return b""
        prompt = generation.prompt_text(output) if generation.echo else ""
        logprobs = generation.prompt_logprobs(output) if generation.echo else None
        self._offsets[index] = len(prompt)
        choice = generation.choice(index, prompt, logprobs)
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = generation.prompt_logprobs_by_id(output)
        if request.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
            choice["token_ids"] = []
        return long_event(self.chunk([choice], **self.running_usage()))
