"""vLLM's module for LoRA adapters, which twostroke does not have: its import says so."""

raise ImportError(
    "LoRA adapters are not supported yet; merge the adapter into the model and give the merged "
    "folder",
    name="twostroke.lora",
)
