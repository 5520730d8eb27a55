"""The gateway: talks to callers, remembers, and wires the parts together."""
