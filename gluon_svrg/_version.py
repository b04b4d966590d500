"""The version, where a build can read it without importing MXNet."""

__version__ = "0.3.0"
