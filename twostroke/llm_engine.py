"""`LLMEngine`: an engine whose steps the caller runs, compatible with vLLM's `LLMEngine`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from twostroke.config import EngineConfig
from twostroke.engine.build import build_engine
from twostroke.engine.in_process import SyncClient
from twostroke.engine.input_processor import Prompt
from twostroke.llm_tokenizer import LLMTokenizer
from twostroke.outputs import RequestOutput
from twostroke.request import SamplingParams
from twostroke.vllm_settings import VLLMSettings


class LLMEngine:
    """An engine. Requests may be added and aborted between steps:

    engine.add_request("1", "Once upon a time", SamplingParams())
    while engine.has_unfinished_requests():
        for output in engine.step(): ...
    """

    def __init__(self, config: EngineConfig) -> None:
        self.engine = build_engine(config)
        self._client = SyncClient(self.engine)
        self._outputs: list[RequestOutput] = []

    @classmethod
    def from_engine_args(cls, engine_args: VLLMSettings, **_: Any) -> LLMEngine:
        return cls(engine_args.engine_config())

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> str:
        """Add a request. `arrival_time` has no effect: the request arrives now."""
        return self._client.add(prompt, params, priority, request_id, self._outputs.append)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            self._client.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Run one step and return its outputs, in the `output_kind` of each request."""
        self._client.step()
        outputs = list(self._outputs)
        self._outputs.clear()
        return outputs

    def has_unfinished_requests(self) -> bool:
        return self.get_num_unfinished_requests() > 0

    def get_num_unfinished_requests(self) -> int:
        return len(self.engine.output_processor)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """See `LLM.reset_prefix_cache`."""
        self.engine.core.scheduler.kv.reset_prefixes()
        return True

    def get_tokenizer(self) -> LLMTokenizer | None:
        return LLMTokenizer.from_input_processor(self.engine.input_processor)
