"""Fused operations and the exact CPU products: one file per subject, each with a plain reference."""
