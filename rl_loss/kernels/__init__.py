"""Triton kernels, each beside its launcher; loaded when first used."""
