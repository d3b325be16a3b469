"""What training needs: likelihoods, the ELBO, parameter groups, schedules."""
