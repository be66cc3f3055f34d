"""llama.cpp's sampling fields, as llama-server's requests and Ollama's options name them."""

from __future__ import annotations

from typing import Any, ClassVar

from twostroke.serve.errors import ApiError
from twostroke.serve.protocol import Body, GenerateRequest, Stops, StopText

RANDOM_SEEDS = (-1, 2**32 - 1)  # by which llama.cpp means: any


class LlamaSampling(Body, kw_only=True):
    # Samplers that are not there: the values that switch them off.
    OFF: ClassVar[dict[str, tuple[Any, ...]]] = {"mirostat": (0,), "typical_p": (1.0,)}

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None  # penalties look at the whole text
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: StopText | Stops | None = None
    typical_p: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None

    def apply_to(self, request: GenerateRequest) -> None:
        """Set them in a request of OpenAI's; raises `ApiError` for what cannot be done."""
        for name, values in self.OFF.items():
            value = getattr(self, name)
            if value is not None and value not in values:
                raise ApiError(
                    400,
                    f"{name} is not supported; leave it out, or give {values[0]!r}, which "
                    "switches it off",
                    param=name,
                )
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
