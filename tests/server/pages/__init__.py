"""The chat page and what all pages share."""
