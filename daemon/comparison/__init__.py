"""Comparing ranks that must hold the same bytes, by the digests of their captures."""
