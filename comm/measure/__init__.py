"""Measures: how long schemes take, and what links and compressors cost."""
