"""Measurements, in rooms by what they measure; README.md lists them."""
