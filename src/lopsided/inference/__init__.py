"""Use a trained model: probabilities, evaluation, export."""
