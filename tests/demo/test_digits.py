"""Images that somebody brings become queries; what is no small PNG is refused before it is decoded."""

import io
import struct
import zlib

import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngImageFile
from torch.nn import functional as F

from backstory.demo.digits import (
    MOST_PIXELS,
    build_model,
    images,
    loss,
    png,
    predict,
    read_image,
    recipe,
    replace_labels,
    show_queries,
    split,
)
from backstory.errors import UsageError

DIGIT = torch.zeros(28, 28)
DIGIT[6:22, 12:16] = 1.0


def saved(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def test_pixels_of_a_png_are_dark_on_light() -> None:
    image = Image.open(io.BytesIO(png(torch.tensor([[0.0, 1.0, 0.5], [0.25, 0.75, 2.0]]))))
    assert (image.size, image.mode) == ((3, 2), "L")
    assert list(image.tobytes()) == [255, 0, 127, 191, 63, 0]


def test_the_image_that_the_run_shows_comes_back() -> None:
    x, y = read_image(png(DIGIT), "1", side=28)
    assert torch.allclose(x[0, 0], DIGIT, atol=1 / 255)
    assert (x.shape, y.tolist()) == ((1, 1, 28, 28), [1])


def test_light_on_dark_is_turned() -> None:
    dark = Image.fromarray((DIGIT * 255).byte().numpy())
    assert torch.allclose(read_image(saved(dark), None, side=28)[0][0, 0], DIGIT, atol=1 / 255)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_every_kind_of_png_is_read(mode: str) -> None:
    drawn = Image.fromarray((255 - DIGIT * 255).byte().numpy()).resize((64, 80))
    data = saved(drawn.convert("I").point(lambda v: v * 256).convert(mode) if mode == "I;16" else drawn.convert(mode))
    x, _ = read_image(data, None, side=8)
    assert x.shape == (1, 1, 8, 8)
    assert 0 <= float(x.min()) <= float(x.max()) <= 1


def test_what_is_transparent_is_white() -> None:
    clear = Image.new("RGBA", (28, 28), (0, 0, 0, 0))
    clear.paste((0, 0, 0, 255), (12, 6, 16, 22))
    assert torch.allclose(read_image(saved(clear), None, side=28)[0][0, 0], DIGIT, atol=1 / 255)


def test_no_label_is_the_answer_of_the_model() -> None:
    model = build_model(28)
    x, y = read_image(png(DIGIT), None, side=28)
    out = model(x)
    assert y.tolist() == [-1]
    assert torch.allclose(loss(model, (x, y)), F.cross_entropy(out, out.argmax(1), reduction="none"), rtol=1e-4)
    assert torch.allclose(loss(model, (x, torch.tensor([3]))), F.cross_entropy(out, torch.tensor([3]), reduction="none"), rtol=1e-4)  # fmt: skip


@pytest.mark.parametrize("label", ["10", "", "-1", "seven", "１"])
def test_another_label_is_refused(label: str) -> None:
    with pytest.raises(UsageError, match="must be a digit"):
        read_image(png(DIGIT), label, side=28)


@pytest.mark.parametrize("data", [b"", b"GIF89a", png(DIGIT)[:60], png(DIGIT)[:8], b"\x89PNG\r\n\x1a\n" + b"\0" * 100])
def test_what_is_no_png_is_refused(data: bytes) -> None:
    with pytest.raises(UsageError, match="not a complete PNG"):
        read_image(data, None, side=28)


def test_other_formats_are_refused() -> None:
    with pytest.raises(UsageError, match="not a complete PNG"):
        read_image(saved(Image.new("L", (8, 8)), "BMP"), None, side=28)


def test_a_large_image_is_refused() -> None:
    assert MOST_PIXELS == 1024 * 1024
    assert read_image(saved(Image.new("L", (1024, 1024))), None, side=8)[0].shape == (1, 1, 8, 8)
    with pytest.raises(UsageError, match="got 1025 × 1024"):
        read_image(saved(Image.new("L", (1025, 1024))), None, side=8)


@pytest.mark.parametrize(
    "before", [b"", struct.pack(">II", 1, 1)], ids=["size first", "a private chunk before the size"]
)
@pytest.mark.parametrize(("width", "height"), [(2_000, 1_000), (20_000, 6_000), (60_000, 60_000)])
def test_a_bomb_is_refused_before_it_is_decoded(
    width: int, height: int, before: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    def decoded(*_: object) -> None:
        raise AssertionError("the image was decoded")

    monkeypatch.setattr(PngImageFile, "load", decoded)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    first = chunk(b"prVt", before) if before else b""
    bomb = b"\x89PNG\r\n\x1a\n" + first + header + chunk(b"IDAT", zlib.compress(bytes(1 << 20))) + chunk(b"IEND", b"")
    with pytest.raises(UsageError):
        read_image(bomb, None, side=28)


def test_queries_are_shown_with_their_label() -> None:
    (actual,) = show_queries((DIGIT[None, None], torch.tensor([1])))
    assert actual == {"image": png(DIGIT), "label": "1"}


def test_the_model_predicts_a_digit_for_each_image() -> None:
    made = recipe("digits", epochs=1)
    batch = made.queries["test"]
    actual = predict(made.model, batch)
    assert actual == [str(x) for x in made.model(batch[0]).argmax(1).tolist()]
    assert made.page.predict is predict


def test_the_seed_replaces_labels_of_training_images_only() -> None:
    data = images("digits")
    train, test = split(data, 50)
    actual = replace_labels(data.y, train, 0.1)
    assert actual[test].tolist() == data.y[test].tolist()
    assert int((actual != data.y).sum()) == round(0.1 * len(train))
    assert set(actual.tolist()) == set(range(10))
    assert (
        actual.tolist() == replace_labels(data.y, train, 0.1).tolist() != replace_labels(data.y, train, 0.1, 1).tolist()
    )
    own, spoiled = recipe("digits", epochs=1), recipe("digits", epochs=1, wrong=0.1)
    for (ids, (_, before)), (_, (_, after)) in zip(own.batches, spoiled.batches, strict=True):
        assert (before.tolist(), after.tolist()) == (
            [int(data.y[i]) for i in map(int, ids)],
            [int(actual[i]) for i in map(int, ids)],
        )


@pytest.mark.parametrize("batch_size", [50, 64])
def test_no_step_weighs_more_because_of_its_place(batch_size: int) -> None:
    """The last batch of an epoch was once half as large, so that each of its samples weighed double."""
    made, rates = recipe("digits", epochs=2, batch_size=batch_size), []
    assert {len(ids) for ids, _ in made.batches} == {batch_size}
    for _ in made.batches:
        rates.append(made.optimizer.param_groups[0]["lr"])
        made.optimizer.step()
        made.schedule.step()
    assert rates == sorted(rates, reverse=True)
    assert 0 < rates[-1] <= 0.03 * rates[0]
