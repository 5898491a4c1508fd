"""From files to batches: sources, scenarios, splits, augmentation and samplers.

Importing this package imports nothing else; take what you need from its modules.
"""
