"""Parsers of tool calls and reasoning."""
