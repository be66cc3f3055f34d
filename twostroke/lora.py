"""vLLM's module for LoRA adapters. Importing it raises an error that explains that twostroke does
not have them."""

raise ImportError(
    "LoRA adapters are not supported yet; merge the adapter into the model and give the merged "
    "folder",
    name="twostroke.lora",
)
