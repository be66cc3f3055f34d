"""The description of a model as data, and the mappings to it from Hugging Face and GGUF files."""
