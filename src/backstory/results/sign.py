"""What the sign of an influence means; every result, command, page and report says it with these words."""

SIGN = "positive: the sample helped, removing it would raise the query's loss; negative: it hurt, removing it would lower it"
SHORT = "+ helped, − hurt"
HELPED, HURT = "helped: without it the loss would be higher", "hurt: without it the loss would be lower"
NOTHING = "had no influence"


def describe_sign(influence: float) -> str:
    """What an influence of this sign means."""
    return NOTHING if influence == 0 else HELPED if influence > 0 else HURT


def verb(influence: float) -> str:
    """The same in two words or three, to go after "it"."""
    return describe_sign(influence).split(":")[0]
