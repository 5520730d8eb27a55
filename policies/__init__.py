"""Decisions from plain values: no await, no I/O, no clock."""
