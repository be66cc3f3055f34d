"""`EngineArgs`: engine settings under vLLM's names, for Python and command lines."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from twostroke.commands.flags import ENGINE_HELP, add_engine_arguments, json_object
from twostroke.config import EngineConfig
from twostroke.vllm_settings import NOTICES, REFUSED, VLLMSettings

TYPES = {"int": int, "float": float, "str": str}


class EngineArgs(VLLMSettings):
    """Settings that can be changed until an engine is built from them. Building checks them."""

    __setattr__ = object.__setattr__

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add an option for each setting. The parsed arguments contain only the options that were
        given, so that `LLM(**vars(args))` has the defaults of the others."""
        own = {field.name for field in dataclasses.fields(EngineConfig)}
        others = [field for field in dataclasses.fields(VLLMSettings) if field.name not in own]
        add_engine_arguments(parser, leave_out=own - ENGINE_HELP.keys())
        group = parser.add_argument_group("accepted for compatibility with vLLM")
        for field in others:
            options: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": field.name}
            type_name = str(field.type).removesuffix(" | None")
            if type_name == "bool":
                options["action"] = argparse.BooleanOptionalAction
            else:
                options["type"] = TYPES.get(type_name, json_object)
            help_text = (NOTICES | REFUSED).get(field.name)
            group.add_argument(f"--{field.name.replace('_', '-')}", help=help_text, **options)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})


AsyncEngineArgs = EngineArgs
