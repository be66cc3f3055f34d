"""`LLM`: the library's API, as vLLM users know it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from twostroke.config import EngineConfig
from twostroke.engine.build import build_engine
from twostroke.engine.client import SyncClient
from twostroke.engine.input_processor import Message, Prompt
from twostroke.errors import EngineError, RequestError
from twostroke.kv.cache import KVUsage
from twostroke.observe.progress import PhaseProgress
from twostroke.outputs import Deltas, RequestOutput
from twostroke.request import SamplingParams

OneOrMore = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model, ready to write. Settings: see `EngineConfig`."""

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        if "performance_mode" not in settings:
            settings.setdefault("max_decode_stall", 0)  # nobody reads along while `generate` runs
        self.engine = build_engine(EngineConfig(model=model, **settings))
        self._client = SyncClient(self.engine)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: OneOrMore = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; outputs in the order of the prompts.

        A prompt is a text, a list of token ids, or a dict with `prompt` or `prompt_token_ids`.
        If one of them is refused, nothing has been started.
        """
        return self._run(_as_list(prompts), sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: OneOrMore = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several (a list of such lists).

        With `continue_final_message` the last message is written on, whoever it is from.
        """
        continued = continue_final_message
        chats: Any = [messages] if not messages or isinstance(messages[0], dict) else messages
        prompts = [
            self.engine.input_processor.render_chat(
                chat,
                add_generation_prompt and not continued,
                tools,
                variables=chat_template_kwargs,
                continue_final_message=continued,
            )
            for chat in chats
        ]
        return self._run(prompts, sampling_params, use_tqdm, None)

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
        return self.engine.sampling

    def get_tokenizer(self) -> Any:
        return self.engine.input_processor.tokenizer

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
