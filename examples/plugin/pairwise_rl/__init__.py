"""An estimator and a policy loss for rlcore."""
