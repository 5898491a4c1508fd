"""Networks: encoders, heads, and the trained model with its model card."""
