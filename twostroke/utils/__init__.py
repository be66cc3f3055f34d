"""vLLM's package of small tools."""

from twostroke.utils.argparse_utils import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
