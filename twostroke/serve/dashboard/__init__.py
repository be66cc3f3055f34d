"""The page `/dash` and its data."""
