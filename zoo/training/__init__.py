"""What a training run needs beside a model: its configuration, its checkpoints and its records."""


class UserError(ValueError):
    """Something the user can put right. The trainer prints the message alone and exits with code 2."""
