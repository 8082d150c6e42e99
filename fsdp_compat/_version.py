"""The version of the package, which setup.cfg and the manifests of checkpoints read."""

__version__ = "0.1.0"
