"""The answer cache: which requests share an answer, where it is found, how it is remembered."""
