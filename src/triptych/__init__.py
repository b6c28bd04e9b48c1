"""Triptych: multi-replica serving for diffusion models behind one OpenAI-compatible port."""

__all__ = ["__version__"]

__version__ = "0.1.0"
