"""The diffusion maths: five small objects over logSNR and a sampler. Torch alone, no model, no config."""
