"""API languages, pure in both directions: bytes in, bytes out, no I/O."""
