"""The diffusion maths: five small objects over logSNR and a sampler. Torch alone, no model, no config.

Every constructor raises ConfigError where an option is out of range.
"""
