"""How a trained model is evaluated: pictures sampled or reconstructed, measured, and the numbers kept."""
