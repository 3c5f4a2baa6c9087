"""Latent deliberation: recurrent state around a denoiser, as small modules over arrays."""
