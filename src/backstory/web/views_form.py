"""What can be asked of a run: its query sets, which of their queries the model gets wrong, and which kinds of questions it takes."""

from collections.abc import Sequence
from urllib.parse import quote

from ..replay.queries import size
from . import schemas as shapes
from .errors import Refused
from .state import Opened
from .views_query import data_url, how
from .views_samples import label, shown_queries

SHOWN = 50  # queries of a set in the form


def form(opened: Opened, mistakes: bool = False) -> shapes.AskForm:
    """What can be asked; with `mistakes`, of the stored queries those alone that the model gets wrong."""
    tells = opened.can_tell
    if mistakes and not tells:
        raise Refused(422, "this service cannot tell the model's mistakes.", how(opened, "page.predict"))
    return shapes.AskForm(
        query_sets=[_set(opened, name, mistakes) for name in opened.sets] if opened.can_ask else [],
        checkpoints=opened.checkpoints,
        can_type=opened.can_type,
        can_upload=opened.can_upload,
        can_tell=tells,
        mistakes=mistakes,
        longest_text=shapes.LONGEST_TEXT,
        dims=opened.run.store.width,
        missing=opened.missing(),
    )


def _set(opened: Opened, name: str, mistakes: bool) -> shapes.StoredSet:
    count, known = size(opened.sets[name]), shown_queries(opened, name)
    says = (
        opened.own(name, opened.final).says
        if opened.recipe is not None and opened.recipe.page.predict is not None
        else []
    )
    wrong = [_mistake(known[q] if known else {}, says, q) for q in range(count)]
    fits = [q for q in range(count) if wrong[q] or not mistakes]
    items = []
    for q in fits[:SHOWN]:
        shown = known[q] if known else {}
        text = shown.get("text")
        items.append(
            shapes.Stored(
                index=q, label=label(opened, name, q), text=None if text is None else str(text), mistake=wrong[q],
                image=data_url(shown.get("image")), path=f"/queries/{quote(name, safe='')}/{q}", says=says[q] if says else None,
            )
        )  # fmt: skip
    return shapes.StoredSet(name=name, count=count, fits=len(fits), items=items)


def _mistake(shown: dict[str, object], says: Sequence[str], q: int) -> bool | None:
    """Whether the model says something else than the label; None where one of them is not known."""
    return says[q] != str(shown["label"]) if q < len(says) and shown.get("label") is not None else None
