"""The verbs of the command, by what they are for: ``train``, ``use`` a trained model, ``look`` at what is there."""
