"""Comparisons: A/B runs, predictions, results of other tools."""
