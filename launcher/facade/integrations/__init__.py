"""Integrations with the frameworks that own a training loop. Each module needs its framework, and nothing else does."""
