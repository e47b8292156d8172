"""The exceptions a user may see or raise: a message is the whole story, printed without a traceback."""


class LockstepError(Exception):
    """A user's mistake or an outside failure; the message names the thing and says what to do."""


class SharedError(LockstepError):
    """A failure that every rank finds at once; rank 0 speaks for all."""


class Diverged(SharedError):
    """Training itself went wrong, and would again with these settings: numbers that are not finite, or a stall."""


class LostContact(LockstepError):
    """Another rank is lost, and this one cannot go on without it."""


class Followed(LostContact):
    """That rank has said why itself; the first rank of every node repeats it."""


class Stop(Exception):
    """Raised by whoever listens to a run: it ends after the step at hand, with a checkpoint, as if interrupted."""
