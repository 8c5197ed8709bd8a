"""Experiments: one short file each, built from the shared bases in `configs/common/`."""
