"""vLLM's module for images, audio and video. Importing it raises an error that explains that
twostroke does not have them."""

raise ImportError(
    "models read and write text only; leave out other content",
    name="twostroke.multimodal",
)
