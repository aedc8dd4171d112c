"""The decoding worker. The only package that imports torch."""
