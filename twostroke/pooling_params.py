"""vLLM's module for embeddings and scores. Importing it raises an error that explains that
twostroke does not have them."""

raise ImportError(
    "the engine only generates text: no embeddings, scores or classes; use another engine for them",
    name="twostroke.pooling_params",
)
