"""RL post-training of Mixture-of-Experts language models with FP4 rollouts that train as if they had been BF16.

Importing this package imports neither torch nor any heavy dependency: each room below imports what it owns, lazily.
"""

__version__ = "0.1.0"
