"""Latent deliberation: recurrent state around a denoiser.

Before a denoise, `LatentDeliberation` turns what is known about the canvas into a context for it; after full layers the
memory buses write into the hidden states; after the denoise `observe_state` updates the latents of each position, and a
commit writes the committed tokens into memory. The state itself is `LatentState`.
"""

from polytoken.models.latent.state import Gdn2State, LatentState

__all__ = ["Gdn2State", "LatentState"]
