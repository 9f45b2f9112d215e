"""Espresso: which option of the decision tree each tensor takes, and what an iteration takes then."""
