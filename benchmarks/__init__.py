"""What the trainer costs: ``python -m benchmarks overhead``, ``memory`` and ``scaling``."""
