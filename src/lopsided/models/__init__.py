"""Networks: encoders, heads, the trained model with its card."""
