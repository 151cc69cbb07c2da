"""The version of sparsepack, which every file that it writes names."""

__version__ = "0.1.0"
