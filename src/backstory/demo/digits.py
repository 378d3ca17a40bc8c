"""The demo on images: a small convolutional model on handwritten digits, plain SGD; its results are checked by retraining.

A few labels of the training images are replaced by wrong ones on purpose, drawn by the seed. They should be among the samples that hurt
the test images most, which `insight.harmful` lists; how many are is counted beside chance and beside the images' own loss.
"""

import io
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UsageError
from ..exact.check import Check, check
from ..insight.harmful import harmful
from ..insight.timeline import Timeline, timeline
from ..replay.recipe import Presentation, Recipe
from ..results.influence import Influence
from ..run.run import Run
from .data import DataError, Images, digits_8x8, mnist_5k
from .stages import Progress, Stages, prepare_folder, record_recipe

RECIPE = "backstory.demo.digits:recipe"
MOST_PIXELS = 1 << 20  # of a user's image
BATCH_SIZE = 50
TOP = 5  # samples at either end of a result
FEW = 20  # samples that a person would look at
WRONG = 0.03  # of the training labels, replaced in the demo
RIGHT_LABEL, WRONG_LABEL = "right label", "wrong label"  # the sources of the demo's samples
CURVATURE = "exact:10"  # ten more backward passes, one for each digit
# every use keeps its own ten curvature samples: a run as short as this can afford it
SETTINGS: dict[str, Any] = {"rank": 48, "curvature": CURVATURE, "curvature_of": "steps", "checkpoints": 3}
Batch = tuple[Tensor, Tensor]


def png(image: Tensor) -> bytes:
    """A PNG of a (H, W) tensor with values 0 … 1, dark on light."""
    file = io.BytesIO()
    pixels = (255 - image.clamp(0, 1) * 255).to(torch.uint8).numpy()
    _pillow().fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise UsageError("images need Pillow: pip install '.[demo]' in the checkout.") from error
    return Image


def images(source: str = "auto") -> Images:
    """MNIST's 5,000, or the 8 × 8 digits where no registry can be reached."""
    if source not in ("auto", "mnist", "digits"):
        raise UsageError(f"source must be auto, mnist or digits, got {source!r}.")
    if source == "digits":
        return digits_8x8()
    try:
        return mnist_5k()
    except DataError:
        if source == "mnist":
            raise
        return digits_8x8()


def split(data: Images, batch_size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Indices of training and test images: one in five is a test image, and so are those that would not fill a batch."""
    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(seed))
    whole = 4 * len(order) // 5 // batch_size * batch_size
    cut = len(order) - whole
    return order[cut:], order[:cut]


def replace_labels(y: Tensor, train: Tensor, share: float, seed: int = 0) -> Tensor:
    """The labels, of which this share of the training images' are another digit's, drawn by the seed."""
    g = torch.Generator().manual_seed(seed + 2)
    chosen = train[torch.randperm(len(train), generator=g)[: round(share * len(train))]]
    out = y.clone()
    out[chosen] = (y[chosen] + torch.randint(1, 10, chosen.shape, generator=g)) % 10
    return out


class Standardise(nn.Module):
    """Pixels to mean 0 and variance 1, so that training starts without a plateau."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, H, W) -> (B, 1, H, W); constants of MNIST."""
        return (x - 0.1307) / 0.3081


def build_model(side: int, seed: int = 0) -> nn.Module:
    """A convolution and a linear layer; GELU, so that retraining is smooth."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        conv = nn.Conv2d(1, 6, 5, stride=3, padding=1) if side > 8 else nn.Conv2d(1, 16, 3, stride=1, padding=1)
        with torch.no_grad():
            width = conv(torch.zeros(1, 1, side, side)).numel()
        return nn.Sequential(Standardise(), conv, nn.GELU(), nn.Flatten(), nn.Linear(width, 10))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of each image; a label below 0 stands for the model's own prediction."""
    x, y = batch
    out = model(x)
    return F.cross_entropy(out, torch.where(y < 0, out.argmax(1), y), reduction="none")


def recipe(
    source: str = "auto",
    epochs: int = 4,
    batch_size: int = BATCH_SIZE,
    learning_rate: float = 0.03,
    seed: int = 0,
    wrong: float = 0.0,
) -> Recipe:
    """Model, optimizer, schedule, loss, and the batches in their order; ids are the images' numbers in the data set.

    All batches have one size, and the learning rate falls in a straight line to nearly 0: no step weighs more only because of its place.
    `wrong` is the share of the training labels that are replaced by wrong ones.
    """
    data = images(source)
    train, test = split(data, batch_size, seed)
    labels = replace_labels(data.y, train, wrong, seed)
    model = build_model(data.x.shape[-1], seed)
    g = torch.Generator().manual_seed(seed + 1)
    order = [b for _ in range(epochs) for b in train[torch.randperm(len(train), generator=g)].split(batch_size)]
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    return Recipe(
        model=model,
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / len(order)),
        loss=loss,
        batches=[(b.tolist(), (data.x[b], labels[b])) for b in order],
        queries={"test": (data.x[test], data.y[test])},
        page=Presentation(image=partial(read_image, side=data.x.shape[-1]), show=show_queries, predict=predict),
    )


def read_image(data: bytes, label: str | None, side: int) -> Batch:
    """A user's PNG as a batch of one: a digit in the middle, dark on light or light on dark."""
    if label is not None and label not in tuple("0123456789"):
        raise UsageError(
            f"the label must be a digit from 0 to 9, got {label!r}. Leave it out to use the model's prediction."
        )
    grey = torch.from_numpy(np.array(_grey(data).resize((side, side)), dtype=np.float32) / 255)  # (side, side)
    border = torch.cat([grey[0], grey[-1], grey[:, 0], grey[:, -1]]).mean()
    ink = 1 - grey if border > 0.5 else grey
    return ink[None, None], torch.tensor([-1 if label is None else int(label)])


def _grey(data: bytes) -> Any:
    """The image in shades of grey, on white where it is transparent; too large a one is refused before it is decoded."""
    Image = _pillow()
    try:
        image = Image.open(io.BytesIO(data), formats=("PNG",))  # reads the size, and decodes nothing yet
        size = f"{image.width} × {image.height}"
        whole = image.convert("RGBA") if image.width * image.height <= MOST_PIXELS else None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        size, whole = "far more", None
    except (OSError, ValueError, SyntaxError) as error:
        raise UsageError("the upload is not a complete PNG image. Save it as PNG, and send that file.") from error
    if whole is None:
        raise UsageError(f"the image must have at most {MOST_PIXELS:,} pixels, got {size}. Send a smaller one.")
    return Image.alpha_composite(Image.new("RGBA", whole.size, "white"), whole).convert("L")


def predict(model: nn.Module, batch: Batch) -> list[str]:
    """The digit that the model takes each image for."""
    return [str(int(digit)) for digit in model(batch[0]).argmax(1)]


def show_queries(batch: Batch) -> list[dict[str, Any]]:
    """What a person sees of queries."""
    return [{"image": png(x[0]), "label": str(int(y))} for x, y in zip(*batch, strict=True)]


@dataclass(frozen=True)
class Found:
    """How many of the replaced labels are among the first of two rankings of all training images."""

    looked: int  # the length of the lists
    replaced: int  # labels in all
    images: int
    by_influence: int  # in the list of those that hurt the test images most
    by_loss: int  # in the list of those whose own loss is highest

    @property
    def by_chance(self) -> float:
        """How many a random list has on average."""
        return self.looked * self.replaced / self.images

    @property
    def words(self) -> str:
        """The counts."""
        return (
            f"Of the {self.looked} training images that hurt the test images most, {self.by_influence} have a replaced label "
            f"(by chance {self.by_chance:.1f}); of the {self.looked} with the highest loss of their own, {self.by_loss}."
        )


@dataclass(frozen=True)
class ImageDemo:
    """The run that the demo leaves, and its results on the queries that are hardest for the model."""

    run: str
    data: str
    accuracy: float
    labels: list[int]  # of the queries
    predicted: list[int]
    influence: Influence
    timeline: Timeline  # exact
    found: tuple[Found, ...]  # in a short list and in one as long as the replaced labels are many
    check: Check
    seconds: dict[str, float]
    recipe: ClassVar[str] = RECIPE
    queries: ClassVar[str] = "demo"  # the query set that the run stores

    @property
    def scope(self) -> str:
        """What was done to the labels, and what finds it."""
        last = self.found[-1]
        return (
            f"{last.replaced} of the {last.images:,} training labels ({last.replaced / last.images:.0%}) were replaced by wrong ones "
            f"on purpose, drawn at random; their source is {WRONG_LABEL!r}. {' '.join(x.words for x in self.found)}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; the images stay in the run."""
        results = [
            {"label": label, "predicted": predicted, **self.influence.as_dict(top=TOP, query=k)}
            for k, (label, predicted) in enumerate(zip(self.labels, self.predicted, strict=True))
        ]
        return {
            "run": self.run, "data": self.data, "accuracy": self.accuracy, "steps": self.influence.at,
            "occurrences": len(self.influence), "queries": results, "timeline": self.timeline.as_dict(),
            "replaced": {"words": self.scope, "lists": [{**asdict(x), "by_chance": x.by_chance} for x in self.found]},
            "check": self.check.as_dict(), "seconds": self.seconds,
        }  # fmt: skip


def image_demo(
    out: Path, *, source: str = "auto", n_queries: int = 5, n_random: int = 12, progress: Progress | None = None
) -> ImageDemo:
    """Run the whole demo into the folder `out`; the recorded run is `out/run`."""
    path, stages = prepare_folder(out / "run", RECIPE), Stages(progress)
    args: dict[str, Any] = {"source": "mnist" if images(source).x.shape[-1] > 8 else "digits", "wrong": WRONG}
    plan, replaced = recipe(**args), _replaced(**args)
    with stages.stage("train and record") as done:
        run = record_recipe(plan, path, done, outputs="cross-entropy", recipe=RECIPE, recipe_args=args, **SETTINGS)
    _describe(run, plan, replaced)
    x, y = plan.queries["test"]
    with torch.no_grad():
        outputs = plan.model(x)
    hard = _hardest(outputs, y, n_queries)
    batch, predicted = (x[hard], y[hard]), outputs.argmax(1)
    run.add_queries(ImageDemo.queries, batch)
    with stages.stage("embed") as done:
        run.embed(progress=done)
    with stages.stage("exact") as done:  # of the mean losses, so that what is made from them is exact
        run.exact([ImageDemo.queries, "test"], RECIPE, progress=done)
    with stages.stage("calibrate") as done:
        run.calibrate("test", RECIPE, progress=done)
    with stages.stage("query"):
        influence = run.query(plan.model, loss, batch)
    with stages.stage("retrain") as done:
        checked = check(run, RECIPE, influence, lambda model: loss(model, batch), random=n_random, progress=done)
    return ImageDemo(
        run=str(path), data=images(args["source"]).name, accuracy=float((predicted == y).float().mean()),
        labels=y[hard].tolist(), predicted=predicted[hard].tolist(), influence=influence,
        timeline=timeline(run, plan.model, loss, batch), found=find_replaced(run, plan, replaced), check=checked,
        seconds=stages.seconds,
    )  # fmt: skip


def _replaced(source: str, wrong: float) -> set[int]:
    """The images whose label the recipe with these arguments replaces."""
    data = images(source)
    train, _ = split(data, BATCH_SIZE)
    return set((replace_labels(data.y, train, wrong) != data.y).nonzero().flatten().tolist())


def find_replaced(run: Run, plan: Recipe, replaced: AbstractSet[int]) -> tuple[Found, ...]:
    """How many of the replaced labels `harmful` ranks first for the test images, and how many the images' own loss does."""
    ids, batches = zip(*plan.batches, strict=True)
    x, y = (torch.cat(part) for part in zip(*batches, strict=True))
    with torch.no_grad():
        own = dict(zip((i for few in ids for i in few), loss(plan.model, (x, y)).tolist(), strict=True))
    by_loss = sorted(own, key=lambda i: -own[i])
    hurt = [int(s.sample) for s in harmful(run, plan.model, loss, plan.queries["test"], top=len(replaced)).harmful]

    def count(n: int) -> Found:
        return Found(n, len(replaced), len(own), *(len(replaced & set(ranked[:n])) for ranked in (hurt, by_loss)))

    return count(min(FEW, len(replaced))), count(len(replaced))


def _describe(run: Run, plan: Recipe, replaced: AbstractSet[int]) -> None:
    samples = {i: (image, label) for ids, (xs, ys) in plan.batches for i, image, label in zip(ids, xs, ys, strict=True)}
    run.describe(
        list(samples),
        image=[png(image[0]) for image, _ in samples.values()],
        label=[int(label) for _, label in samples.values()],
        source=[WRONG_LABEL if i in replaced else RIGHT_LABEL for i in samples],
    )


def _hardest(outputs: Tensor, y: Tensor, n: int) -> Tensor:
    """Test images about which the model is torn: the smallest gaps between the right class and the best other one."""
    right = outputs.gather(1, y[:, None]).squeeze(1)
    others = outputs.scatter(1, y[:, None], float("-inf")).amax(1)
    return (right - others).abs().argsort()[:n]
