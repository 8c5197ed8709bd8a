"""Packing collections of pictures into data sets."""
