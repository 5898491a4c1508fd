"""What is made of records and run folders for people to read: tables, figures, pages. Needs no torch.

Importing this package imports nothing else; take what you need from its modules.
"""
