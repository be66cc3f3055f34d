"""The page /learn."""
