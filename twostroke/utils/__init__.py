"""The part of vLLM's package `utils` that programs import."""

from twostroke.utils.argparse_utils import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
