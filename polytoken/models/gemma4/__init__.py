"""Gemma 4's transformer as encoder and decoder of a canvas: blocks, tensor names, and the `CanvasModel` on top."""
