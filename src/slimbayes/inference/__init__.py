"""Posteriors for networks that are trained already: curvature in one pass over the data, and chains.

laplace      linearised rows -> curvature -> evidence, which chooses priors and noise -> a JointNormal posterior
chains       density of factors, and steps through it -> a Rank1 model whose members are the states
means        the plain model and the factors that both begin with
"""
