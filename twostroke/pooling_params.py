"""vLLM's module for embeddings and scores, which twostroke does not have: its import says so."""

raise ImportError(
    "the engine writes text: there are no embeddings, scores or classes; "
    "for these use another engine",
    name="twostroke.pooling_params",
)
