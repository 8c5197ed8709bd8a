"""Evaluation: image metrics and reports."""
