"""What the sign of an influence means, in the words that every result, command, page and report uses."""

SIGN = "positive: the sample helped, removing it would raise the query's loss; negative: it hurt, removing it would lower it"
SHORT = "+ helped, − hurt"
NOTHING = "had no influence"


def without(influence: float, what: str = "it") -> str:
    """What the loss would be without it."""
    return f"without {what} the loss would be {'higher' if influence > 0 else 'lower'}"


HELPED, HURT = f"helped: {without(1)}", f"hurt: {without(-1)}"


def describe_sign(influence: float) -> str:
    """What an influence of this sign means."""
    return NOTHING if influence == 0 else HELPED if influence > 0 else HURT


def verb(influence: float) -> str:
    """The same in two words or three, to go after "it"."""
    return describe_sign(influence).split(":")[0]


def describe_axis(what: str, they: str = "it", more: str = "") -> str:
    """How to read a curve of influence around zero."""
    return f"Above zero: {what} {verb(1)}{more}; below zero: {they} {verb(-1)}."
