"""The sampling parameters of a request, under vLLM's module name."""

from twostroke.beam_search import BeamSearchParams
from twostroke.request import RequestOutputKind, SamplingParams
from twostroke.request import StructuredOutputs as StructuredOutputsParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
