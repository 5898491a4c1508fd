"""The arithmetic of the contrastive losses: exact, tiled, differentiable once."""
