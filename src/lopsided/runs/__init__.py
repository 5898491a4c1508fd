"""Runs and sets of runs.

- ``run`` trains one recipe in one folder; ``folder``, ``metrics`` and ``records`` read what it wrote.
- A ``cell`` is one such training. A ``plan`` is a set of cells and what becomes of them: ``folds``, ``sweep``,
  ``comparison_plan``, ``auto``, ``demo``.
- The ``driver`` trains the cells of a plan on one of the ``engines``: this process, others, or a Ray cluster.
- ``fold_results``, ``comparison`` and ``answer`` say what the cells of a plan amount to.
"""
