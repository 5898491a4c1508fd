"""Feature blocks, one class each. Their entries are in ``lopsided.recipe.blocks``."""
