"""`LLM`: the offline API of the library, compatible with vLLM's `LLM`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from twostroke.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from twostroke.engine.build import build_engine
from twostroke.engine.in_process import SyncClient
from twostroke.engine.input_processor import Message, Prompt
from twostroke.errors import EngineError, RequestError
from twostroke.kv.usage import KVUsage
from twostroke.llm_tokenizer import LLMTokenizer
from twostroke.model.text.template_source import CONTENT_FORMATS
from twostroke.observe.phase_progress import PhaseProgress
from twostroke.observe.totals import Totals
from twostroke.outputs import Deltas, RequestOutput
from twostroke.request import SamplingParams
from twostroke.v1.metrics.reader import Metric, metric_objects
from twostroke.vllm_settings import TEXT_ONLY, VLLMSettings

OneOrMore = SamplingParams | Sequence[SamplingParams] | None

NO_WORKERS = "there are no workers: the model runs in this process (`LLM.engine`)"
FIXED_WEIGHTS = "weights stay on the device as they were loaded"
# Methods of vLLM's `LLM` that twostroke does not have, and the reasons.
REFUSED = {
    **dict.fromkeys(("encode", "embed", "classify", "score", "reward"), TEXT_ONLY),
    **dict.fromkeys(("collective_rpc", "apply_model", "llm_engine", "get_world_size"), NO_WORKERS),
    **dict.fromkeys(
        ("sleep", "wake_up", "update_weights", "init_weight_transfer_engine"), FIXED_WEIGHTS
    ),
    "set_tokenizer": "give tokenizer=… to LLM(…)",
}


class LLM:
    """A loaded model. The settings are the fields of `EngineConfig`, and those of vLLM in
    `VLLMSettings`."""

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        if "performance_mode" not in settings:
            # `generate` streams no tokens, so prefill need not wait for decode.
            settings.setdefault("max_decode_stall", 0)
        self.engine = build_engine(VLLMSettings(model=model, **settings).engine_config())
        self._client = SyncClient(self.engine)
        self._totals = Totals(self._client.info.max_model_len)
        self.engine.core.records.listeners.append(self._totals)

    if not TYPE_CHECKING:  # a type checker reports unknown attributes itself

        def __getattr__(self, name: str) -> NoReturn:
            reason = f": {REFUSED[name]}" if name in REFUSED else ""
            raise AttributeError(f"LLM has no {name!r}{reason}")

    @classmethod
    def from_engine_args(cls, engine_args: VLLMSettings) -> LLM:
        return cls(**engine_args.changed())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: OneOrMore = None,
        *,
        use_tqdm: bool = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate the outputs of all prompts, and return them in the order of the prompts.

        A prompt is a text, a list of token ids, or a dict with `prompt` or `prompt_token_ids`.
        If a prompt is refused, no prompt is started.
        """
        _check_no_lora(lora_request)
        return self._run(_as_list(prompts), sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: OneOrMore = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several (a list of such lists).

        `chat_template`: the text of a template that replaces the model's.
        `chat_template_content_format`: the template gets the contents of messages as texts
        ("string") or as lists of parts ("openai"); "auto": the engine decides by the template.
        `continue_final_message`: continue the last message.
        """
        _check_no_lora(lora_request)
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message continues the last message and add_generation_prompt "
                "begins a new one; set add_generation_prompt=False"
            )
        chats: Any = [messages] if not messages or isinstance(messages[0], dict) else messages
        processor, prompts = self.engine.input_processor, []
        if chat_template_content_format not in CONTENT_FORMATS:
            raise RequestError(
                f"chat_template_content_format must be one of {', '.join(CONTENT_FORMATS)}, not "
                f"{chat_template_content_format!r}"
            )
        run = processor.template_runner(chat_template, chat_template_content_format)
        for chat in chats:
            text = processor.chat_text(
                chat,
                add_generation_prompt,
                tools,
                variables=chat_template_kwargs,
                continue_final_message=continue_final_message,
                run=run,
            )
            assert processor.tokenizer is not None  # templates are not rendered without a tokenizer
            ids = processor.tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self._run(prompts, sampling_params, use_tqdm, None)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the most likely outputs of each prompt. `use_tqdm` and `concurrency_limit` have no
        effect."""
        _check_no_lora(lora_request)
        max_logprobs = self._client.info.max_logprobs
        if 2 * params.beam_width > max_logprobs:
            raise RequestError(
                f"beam_width is {params.beam_width}, and twice as many log-probabilities for each "
                f"token are more than max_logprobs {max_logprobs}; lower beam_width, or raise "
                "max_logprobs"
            )
        processor, tokenizer = self.engine.input_processor, self.engine.tokenizer()
        requests = [processor.process(prompt, SamplingParams()) for prompt in _as_list(prompts)]
        found = beam_search(
            [(request.prompt_token_ids, request.salt) for request in requests],
            params,
            frozenset() if tokenizer is None else tokenizer.stop_ids,
            self._client.info.max_model_len,
            lambda batch, one_token: self._run(batch, one_token, False, None),
        )
        for beam in (beam for beams in found for beam in beams):
            beam.text = None if tokenizer is None else tokenizer.decode(beam.tokens)
        return [BeamSearchOutput(beams) for beams in found]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Generate the output of one prompt. Yield the new part of the output after each step.

        Leaving the loop early aborts the request.
        """
        request_id = self._client.add(prompt, sampling_params or self.engine.sampling)
        deltas = Deltas()
        try:
            for changed in self._client.run([request_id]):
                for output in changed:
                    _raise_if_failed(output)
                    yield deltas.take(output)
        finally:
            self._client.abort(request_id)

    def kv_usage(self) -> KVUsage:
        """Return the use of the KV cache in tokens: reserved = used + fragmented + cached +
        free."""
        return self.engine.core.scheduler.kv.usage()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default sampling parameters, which the model's makers recommend."""
        return self.engine.sampling.clone()

    def get_tokenizer(self) -> LLMTokenizer | None:
        """Return the tokenizer; None with `skip_tokenizer_init`."""
        return LLMTokenizer.from_input_processor(self.engine.input_processor)

    def get_metrics(self) -> list[Metric]:
        """Return the metrics that a server has on /metrics."""
        from twostroke.serve.monitor.prometheus import Families  # needs prometheus-client

        families = Families(self._client.info.model_name)
        return metric_objects(families.all(self._client, self._totals))

    def start_profile(self) -> None:
        """Start a profile of the steps, of at most a minute."""
        self.engine.core.profiler.start()

    def stop_profile(self) -> dict[str, Any]:
        """Return the profile in the format of a server's /stop_profile (docs/PROFILING.md)."""
        return self.engine.core.profiler.stop()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Delete all cached prefixes and return True. Running requests keep their KV blocks, which
        other requests cannot reuse then."""
        self.engine.core.scheduler.kv.reset_prefixes()
        return True

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: OneOrMore,
        show_progress: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        params = _one_each("sampling_params", sampling_params, self.engine.sampling, len(prompts))
        priorities = _one_each("priority", priority, 0, len(prompts))
        index_of: dict[str, int] = {}  # by request id
        done: list[RequestOutput | None] = [None] * len(prompts)
        try:
            for n, prompt in enumerate(prompts):
                try:
                    index_of[self._client.add(prompt, params[n], priorities[n])] = n
                except RequestError as error:
                    if len(prompts) == 1:
                        raise
                    raise RequestError(f"prompt {n} of {len(prompts)}: {error}") from None
            with PhaseProgress(self.engine.core.records, len(prompts), show_progress) as progress:
                for changed in self._client.run(index_of):
                    for output in changed:
                        _raise_if_failed(output)
                        if output.finished:
                            done[index_of[output.request_id]] = output
                    progress.update(sum(output is not None for output in done))
        finally:
            for request_id in index_of:
                self._client.abort(request_id)
        return [output for output in done if output is not None]


def _as_list(prompts: Any) -> list[Any]:
    """Return a list of prompts. A list of ints is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise RequestError(
            "prompts is a text, a list of token ids, a dict with 'prompt' or 'prompt_token_ids', "
            f"or a list of prompts, not {type(prompts).__name__}"
        )
    if prompts and all(type(token) is int for token in prompts):
        return [prompts]
    return list(prompts)


def _check_no_lora(lora_request: None) -> None:
    if lora_request is not None:
        raise RequestError(
            "lora_request: LoRA adapters are not supported yet; merge the adapter into the model"
        )


def _one_each(name: str, value: Any, default: Any, count: int) -> list[Any]:
    """Return a value for each prompt, from one value for all prompts or a list of values."""
    if value is None:
        return [default] * count
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise RequestError(
            f"{name} has {len(value)} entries for {count} prompts; give one for each prompt"
        )
    return list(value)


def _raise_if_failed(output: RequestOutput) -> None:
    if output.error:
        raise EngineError(output.error)
