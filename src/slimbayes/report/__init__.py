"""Reads records, writes tables and one self-contained page. It sees only files and imports no torch."""
