"""Posteriors for networks that are trained already: curvature in one pass over the data, and chains."""
