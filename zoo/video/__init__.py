"""Video diffusion transformers, which compute over space and over time in turn."""
