"""Algorithms of optimizers beside torch's own, each named by `optimizer.algorithm._target_` and imported only then."""
