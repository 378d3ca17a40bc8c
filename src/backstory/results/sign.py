"""What the sign of an influence means, in the words that every result, command, page and report uses."""

SIGN = "positive: the sample helped, removing it would raise the query's loss; negative: it hurt, removing it would lower it"
HELPED, HURT = "helped: without it the loss would be higher", "hurt: without it the loss would be lower"
NOTHING = "had no influence"


def describe_sign(influence: float) -> str:
    """What an influence of this sign means."""
    return NOTHING if influence == 0 else HELPED if influence > 0 else HURT


def verb(influence: float) -> str:
    """The same in two words or three, to go after "it"."""
    return describe_sign(influence).split(":")[0]
