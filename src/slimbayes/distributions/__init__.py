"""Families, their divergences, and the priors built from them."""
