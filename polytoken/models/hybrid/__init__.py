"""Hybrid networks (qwen3_5, qwen3_next): gated delta nets, every n-th layer full attention, and a draft head."""
