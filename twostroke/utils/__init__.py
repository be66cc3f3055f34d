"""Where vLLM's users import small tools from."""

from twostroke.utils.argparse_utils import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
