"""The one exception a user may see: its message is the whole story, printed without a traceback."""


class LockstepError(Exception):
    """A user's mistake or an outside failure; the message names the thing and says what to do."""
