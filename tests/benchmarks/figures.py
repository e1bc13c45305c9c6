"""What a job gives that measures more than one thing."""


class Figures(dict[str, float]):
    """Seconds, or steps per second, by name; returned by a job in place of the time it took."""
