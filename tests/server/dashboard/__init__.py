"""The page /dash."""
