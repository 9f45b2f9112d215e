"""Measures what links and compressors cost."""
