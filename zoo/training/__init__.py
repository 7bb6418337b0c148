"""What a training run needs beside a model: its configuration, its checkpoints and its records."""


class UserError(ValueError):
    """Something the user can put right. The trainer prints the message alone and exits with code 2.

    Every rank raises it, unless it is marked `alone`: then this rank is the only one that knows.
    """

    alone = False
    told = False  # it has been printed, here or by rank 0
