"""From a trained model to answers: probabilities, evaluation, export."""
