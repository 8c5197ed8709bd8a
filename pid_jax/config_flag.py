"""The flag --config, defined once, so that the commands that take it can be imported together."""

from ml_collections import config_flags

CONFIG = config_flags.DEFINE_config_file("config", help_string="a file of configs/")
