"""From files to batches: sources, scenarios, splits, augmentation and samplers.

Importing this package imports nothing else. Import from its modules.
"""
