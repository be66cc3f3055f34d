"""The diagnosis of a slow server, and the exam that checks the diagnosis."""
