"""The version of the package; a constant, so that the command line need not read metadata at start."""

__version__ = "0.1.0"
