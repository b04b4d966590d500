"""What the trainer costs and how it converges: ``python -m benchmarks NAME``."""
