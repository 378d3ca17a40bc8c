"""Sentences of the pages that follow the numbers: their sign, and when they were made."""

import re

from . import schemas as shapes

LATE = 10  # one part in so many is the end of training
SAME = 0.05  # of the larger of two influences: a smaller change is none


def labelled(name: str, by: str = "label") -> str:
    """A label that is a bare number with the word before it; any other name as it is."""
    return f"label {name}" if by == "label" and re.fullmatch(r"-?\d+(\.\d+)?", name) else name


def evolution(found: shapes.Life) -> str:
    """How a sample's influence went from checkpoint to checkpoint."""
    known = [x.influence for x in found.evolution if x.influence is not None]
    said = "Influence of its uses so far on the model at each checkpoint."
    if not known:
        return f"{said} It was used at none of them."
    if len(known) == 1 and len(found.evolution) == 1:
        return f"{said} There is one: {_now(known[0])}."
    if len(known) == 1:
        return f"{said} It was first used after all of them but the last, so there is one value: {_now(known[0])}."
    return f"{said} {_change(known[0], known[-1])}"


def _change(first: float, last: float) -> str:
    if abs(last - first) <= SAME * max(abs(first), abs(last)):
        return f"It hardly changed: {_now(last)}."
    if first * last < 0:
        return f"Its sign turned: at first {_now(first)}, in the end {_now(last)}. Later samples changed what it means."
    kind = "help" if first + last > 0 else "harm"
    if abs(last) > abs(first):
        return f"Its {kind} grew, by more uses or because later samples built on it."
    why = "took its lesson over" if kind == "help" else "made up for it"
    return f"Its {kind} became smaller: later samples {why}, or the queries became easy."


def _now(x: float) -> str:
    return "it helped" if x > 0 else "it hurt" if x < 0 else "it had no influence"


def occurrences(found: shapes.Life) -> str:
    """What the influences of its single uses say; late ones have had nothing to overwrite them."""
    values = [x.influence for x in found.occurrences if x.influence is not None]
    said = ["Influence of each single use on the model at the end."]
    if values:
        said.append(_signs(values))
    late = [x.step for x in found.occurrences if x.step >= found.at - max(1, found.at // LATE)]
    if late:
        many = "Its uses" if len(late) > 1 else "Its use"
        place = ", ".join(f"{s:,}" for s in late[:6])
        said.append(
            f"{many} at step {place} came in the last tenth of training: little came after to overwrite or correct it, so it weighs more "
            "than an earlier one would."
        )
    return " ".join(said)


def _signs(values: list[float]) -> str:
    helped, hurt = sum(x > 0 for x in values), sum(x < 0 for x in values)
    if len(values) == 1:
        return "It helped." if helped else "It hurt." if hurt else "It had no influence."
    return f"{helped} of {len(values)} helped, {hurt} hurt."


def lateness(found: shapes.Harmful) -> str:
    """How many of the samples that hurt most were used at the end, and why that is so."""
    if not found.items:
        return ""
    if found.without_last and found.at - found.without_last <= found.late_from:
        return f"Uses in the last tenth of training (from step {found.late_from:,}), which weigh most, are left out."
    share = f"{found.late} of these {len(found.items)} samples" if len(found.items) > 1 else "This sample"
    verb = "were" if len(found.items) > 1 else "was" if found.late else "was not"
    return (
        f"{share} {verb} last used in the last tenth of training (from step {found.late_from:,}). Late uses weigh most, for nothing has "
        "overwritten them yet: a sample may stand here because it came last, not because it is bad."
    )
