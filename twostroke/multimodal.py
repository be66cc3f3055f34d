"""vLLM's module for other content than text, which twostroke does not have: its import says so."""

raise ImportError(
    "models read and write text only; leave out what is not text",
    name="twostroke.multimodal",
)
