"""What is measured, against what, and how often: ``python -m benchmarks``."""
