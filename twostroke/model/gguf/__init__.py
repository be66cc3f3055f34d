"""The GGUF file format: headers, block types and their values."""
