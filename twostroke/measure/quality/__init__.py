"""The quality of a weight or KV format against a base."""
