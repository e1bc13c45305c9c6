"""Which native tensors and which foreign tensors are the same numbers, and how.

Pure: no file or network access; torch and the standard library alone.
"""
