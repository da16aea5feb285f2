"""How a trained model is judged: pictures made or reconstructed, measured, and the numbers kept."""
