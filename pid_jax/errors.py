"""The one exception for input that a person can mend."""


class UserError(ValueError):
    """Bad input. The message says what was wrong, the value, what was expected, what to do.

    Commands print it as `error: <message>` on stderr and exit with status 2.
    """
