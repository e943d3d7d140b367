"""The one exception that is meant for a person. Standard library only; anyone may import it."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can put right. The message says what was given, what was expected and what to type.

    The command line prints it as one line on stderr and exits with code 2; no traceback.
    """
