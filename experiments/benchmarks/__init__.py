"""Timings and memory, in paired runs; never part of the tests."""
