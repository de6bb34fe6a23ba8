"""Kernel templates."""
