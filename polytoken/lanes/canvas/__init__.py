"""The canvas lane: a canvas of ids is denoised over the committed text, and what has settled becomes permanent."""
