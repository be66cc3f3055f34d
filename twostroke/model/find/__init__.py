"""Models on disk, on the Hugging Face Hub and in Python packages."""
