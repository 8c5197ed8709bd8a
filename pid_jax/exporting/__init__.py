"""The decoder as an artefact that runs without this package."""
