"""`LLM`: the library's API, as vLLM users know it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from twostroke.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from twostroke.engine.build import build_engine
from twostroke.engine.in_process import SyncClient
from twostroke.engine.input_processor import Message, Prompt
from twostroke.errors import EngineError, RequestError
from twostroke.kv.cache import KVUsage
from twostroke.llm_tokenizer import LLMTokenizer
from twostroke.observe.progress_bar import PhaseProgress
from twostroke.observe.totals import Totals
from twostroke.outputs import Deltas, RequestOutput
from twostroke.request import SamplingParams
from twostroke.v1.metrics.reader import Metric, metric_objects
from twostroke.vllm_settings import TEXT_ONLY, VLLMSettings

OneOrMore = SamplingParams | Sequence[SamplingParams] | None

ONE_PROCESS = "there are no workers to call: the model runs in this process (`LLM.engine`)"
STAYS = "weights stay on the device as they were loaded"
# Methods of vLLM's that are not there, and why.
REFUSED = {
    **dict.fromkeys(("encode", "embed", "classify", "score", "reward"), TEXT_ONLY),
    **dict.fromkeys(("collective_rpc", "apply_model", "llm_engine", "get_world_size"), ONE_PROCESS),
    **dict.fromkeys(("sleep", "wake_up", "update_weights", "init_weight_transfer_engine"), STAYS),
    "set_tokenizer": "give tokenizer=… to LLM(…)",
}


class LLM:
    """A model, ready to write. Settings: see `EngineConfig`, and `VLLMSettings` for those that are
    taken for vLLM's sake."""

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        if "performance_mode" not in settings:
            settings.setdefault("max_decode_stall", 0)  # nobody reads along while `generate` runs
        self.engine = build_engine(VLLMSettings(model=model, **settings).engine_config())
        self._client = SyncClient(self.engine)
        self._totals = Totals(self._client.info.max_model_len)
        self.engine.core.records.listeners.append(self._totals)

    if not TYPE_CHECKING:  # a type checker says itself what is not there

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
        """Continue every prompt; outputs in the order of the prompts.

        A prompt is a text, a list of token ids, or a dict with `prompt` or `prompt_token_ids`.
        If one of them is refused, nothing has been started.
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

        `chat_template`: the text of a template, instead of the model's own.
        `chat_template_content_format` is taken for vLLM's sake: a message's parts are one text.
        `continue_final_message`: write on where the last message ends.
        """
        _check_no_lora(lora_request)
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message writes on in the last message, add_generation_prompt after "
                "it; set add_generation_prompt=False"
            )
        chats: Any = [messages] if not messages or isinstance(messages[0], dict) else messages
        processor, prompts = self.engine.input_processor, []
        run = processor.template_runner(chat_template)
        for chat in chats:
            text = processor.chat_text(
                chat,
                add_generation_prompt,
                tools,
                variables=chat_template_kwargs,
                continue_final_message=continue_final_message,
                run=run,
            )
            assert processor.tokenizer is not None  # or the template would not have been rendered
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
        """The likeliest continuations of each prompt, by beam search. The last two arguments are
        taken for vLLM's sake: there is no bar, and the schedule says how many run at one time."""
        _check_no_lora(lora_request)
        most = self._client.info.max_logprobs
        if 2 * params.beam_width > most:
            raise RequestError(
                f"beam_width is {params.beam_width}, and twice as many log-probabilities a token "
                f"are more than max_logprobs {most}; lower it, or raise max_logprobs"
            )
        processor, tokenizer = self.engine.input_processor, self.engine.tokenizer()
        requests = [processor.process(one, SamplingParams()) for one in _as_list(prompts)]
        found = beam_search(
            [(request.prompt_token_ids, request.salt) for request in requests],
            params,
            frozenset() if tokenizer is None else tokenizer.stop_ids,
            self._client.info.max_model_len,
            lambda asked, one_token: self._run(asked, one_token, False, None),
        )
        for beam in (beam for beams in found for beam in beams):
            beam.text = None if tokenizer is None else tokenizer.decode(beam.tokens)
        return [BeamSearchOutput(beams) for beams in found]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Continue one prompt, giving what is new after each step that wrote some of it.

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
        """The KV cache in tokens: reserved = used + fragmented + cached + free."""
        return self.engine.core.scheduler.kv.usage()

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's makers recommend; used where no parameters are given."""
        return self.engine.sampling.clone()

    def get_tokenizer(self) -> LLMTokenizer | None:
        """None with `skip_tokenizer_init`."""
        return LLMTokenizer.of(self.engine.input_processor)

    def get_metrics(self) -> list[Metric]:
        """What a server's /metrics would say."""
        from twostroke.serve.monitor.prometheus import Families  # needs prometheus-client

        families = Families(self._client.info.model_name)
        return metric_objects(families.all(self._client, self._totals))

    def start_profile(self) -> None:
        """Gather what steps are made of from now on, at most a minute of them."""
        self.engine.core.profiler.start()

    def stop_profile(self) -> dict[str, Any]:
        """What was found: as a server's /stop_profile has it (docs/PROFILING.md)."""
        return self.engine.core.profiler.stop()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget every cached prefix. Requests that run keep their own blocks, and what they have
        computed so far is not found by others; True, since that always succeeds."""
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
        ranks = _one_each("priority", priority, 0, len(prompts))
        place: dict[str, int] = {}
        done: list[RequestOutput | None] = [None] * len(prompts)
        try:
            for n, prompt in enumerate(prompts):
                try:
                    place[self._client.add(prompt, params[n], ranks[n])] = n
                except RequestError as error:
                    if len(prompts) == 1:
                        raise
                    raise RequestError(f"prompt {n} of {len(prompts)}: {error}") from None
            with PhaseProgress(self.engine.core.records, len(prompts), show_progress) as progress:
                for changed in self._client.run(place):
                    for output in changed:
                        _raise_if_failed(output)
                        if output.finished:
                            done[place[output.request_id]] = output
                    progress.update(sum(one is not None for one in done))
        finally:
            for request_id in place:
                self._client.abort(request_id)
        return [output for output in done if output is not None]


def _as_list(prompts: Any) -> list[Any]:
    """One prompt or several → several. A list of ints is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise RequestError(
            "prompts is a text, a list of token ids, a dict with 'prompt' or 'prompt_token_ids', "
            f"or a list of those, not {type(prompts).__name__}"
        )
    if prompts and all(type(token) is int for token in prompts):
        return [prompts]
    return list(prompts)


def _check_no_lora(lora_request: None) -> None:
    if lora_request is not None:
        raise RequestError(
            "lora_request: LoRA adapters are not supported yet; merge the adapter into the model"
        )


def _one_each(name: str, given: Any, default: Any, count: int) -> list[Any]:
    """One value for all prompts, or a list with one for each."""
    if given is None:
        return [default] * count
    if not isinstance(given, list | tuple):
        return [given] * count
    if len(given) != count:
        raise RequestError(f"{name} has {len(given)} entries for {count} prompts; give one each")
    return list(given)


def _raise_if_failed(output: RequestOutput) -> None:
    if output.error:
        raise EngineError(output.error)
