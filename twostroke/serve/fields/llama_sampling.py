"""llama.cpp's sampling fields, as llama-server's requests and Ollama's options name them."""

from __future__ import annotations

from typing import ClassVar

from twostroke.serve.error_responses import ApiError
from twostroke.serve.fields import foreign_fields
from twostroke.serve.fields.foreign_fields import Table
from twostroke.serve.fields.protocol import EngineFields, GenerateRequest, Stops, StopText

RANDOM_SEEDS = (-1, 2**32 - 1)  # by which llama.cpp means: any


class LlamaSampling(EngineFields, kw_only=True):
    FOREIGN: ClassVar[Table] = foreign_fields.LLAMA

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None  # penalties look at the whole text
    stop: StopText | Stops | None = None

    def apply_to(self, request: GenerateRequest) -> None:
        """Set them in a request of OpenAI's; raises `ApiError` for what cannot be done."""
        if self.temperature is not None:
            request.temperature = max(self.temperature, 0.0)  # below 0 it is greedy, too
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
                "repeat_last_n: penalties look at the whole text; leave it out, or give -1",
                param="repeat_last_n",
            )
