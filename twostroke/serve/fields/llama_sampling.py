"""`LlamaSampling`: llama.cpp's sampling fields, in llama-server's requests and Ollama's options."""

from __future__ import annotations

from typing import ClassVar

from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields import foreign_fields
from twostroke.serve.fields.body_fields import EngineFields, Stops, StopText
from twostroke.serve.fields.foreign_fields import ForeignTable
from twostroke.serve.fields.protocol import GenerateRequest

RANDOM_SEEDS = (-1, 2**32 - 1)  # llama.cpp's values for a random seed


class LlamaSampling(EngineFields, kw_only=True):
    FOREIGN: ClassVar[ForeignTable] = foreign_fields.LLAMA

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None  # 0: no penalties; -1: the whole text; others are refused
    stop: StopText | Stops | None = None

    def apply_to(self, request: GenerateRequest) -> None:
        """Set the fields of OpenAI's request. Raise `ApiError` for an unsupported value."""
        if self.temperature is not None:
            request.temperature = max(self.temperature, 0.0)  # in llama.cpp, below 0 is greedy too
        if self.top_k is not None:
            request.top_k = max(self.top_k, 0)
        if self.seed not in RANDOM_SEEDS:
            request.seed = self.seed
        request.top_p, request.min_p = self.top_p, self.min_p
        request.stop = self.stop
        if self.repeat_last_n == 0:
            return
        request.repetition_penalty = self.repeat_penalty
        request.presence_penalty = self.presence_penalty
        request.frequency_penalty = self.frequency_penalty
        penalised = (
            self.repeat_penalty not in (None, 1) or self.presence_penalty or self.frequency_penalty
        )
        if penalised and (self.repeat_last_n or -1) > 0:
            raise ApiError(
                400,
                "repeat_last_n: penalties apply to the whole text; leave it out, or give -1",
                param="repeat_last_n",
            )
