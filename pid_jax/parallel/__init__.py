"""Meshes and where arrays live on them."""
