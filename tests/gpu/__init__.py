"""Streams and memory of an accelerator, or of one that is emulated on the CPU."""
