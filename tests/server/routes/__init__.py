"""Routes that generate no text."""
