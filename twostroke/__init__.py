"""twostroke: an LLM inference engine built along the line between prefill and decode."""

__version__ = "0.1.0"
