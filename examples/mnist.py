"""Find wrong labels: train a small network on MNIST with some labels wrong, and see which images hurt it.

    python examples/mnist.py            about a minute
    python examples/mnist.py --small    some seconds

MNIST is downloaded once (1 MB); without a network, scikit-learn's smaller digits are used.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import backstory
from backstory import insight
from backstory.demo.digits import images, png

WRONG = 0.05  # share of the labels


def losses(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def train(model, x, y, out, epochs):
    """Plain SGD, with `record` around the loop and `rec.step` around each update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with backstory.record(model, optimizer, out, loss_reduction="mean", curvature="sampled:1") as rec:
        for _ in range(epochs):
            for ids in torch.randperm(len(y)).split(50):
                with rec.step(ids) as step, step.outputs_of(model, "cross-entropy"):
                    losses(model, (x[ids], y[ids])).mean().backward()
                    optimizer.step()
                optimizer.zero_grad()
        rec.describe(range(len(y)), label=y.tolist(), image=[png(image[0]) for image in x])


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--small", action="store_true", help="fewer images")
    options.add_argument("--out", type=Path, default=Path("runs/mnist"), help="folder for the run")
    args = options.parse_args()

    torch.manual_seed(0)
    data = images()
    order = torch.randperm(len(data.y))
    n = 800 if args.small else 4000
    x, truth, test = data.x[order[:n]], data.y[order[:n]], order[n:]
    wrong = torch.rand(n) < WRONG
    y = torch.where(wrong, (truth + torch.randint(1, 10, (n,))) % 10, truth)

    model = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 64), nn.GELU(), nn.Linear(64, 10))
    train(model, x, y, args.out, epochs=5)
    queries = data.x[test], data.y[test]
    accuracy = (model(queries[0]).argmax(1) == queries[1]).float().mean()
    print(f"Trained on {n} images, {int(wrong.sum())} of them with a wrong label. Test accuracy {accuracy:.0%}.\n")

    run = backstory.open(args.out)
    top = int(wrong.sum())
    late = run.n_steps // 10  # the last updates weigh most, whatever their images: nothing came after them
    result = insight.harmful(run, model, losses, queries, top=top, without_last=late)
    print("The images that hurt the test images most:")
    for sample in result.harmful[:8]:
        note = "WRONG LABEL" if wrong[sample.sample] else ""
        shown = f"image {sample.sample:4} labelled {sample.label}, really {truth[sample.sample]}"
        print(f"  {shown}   influence {sample.influence:+.5f}   {note}")

    hits = sum(bool(wrong[sample.sample]) for sample in result.harmful)
    print(
        f"\nOf the {top} most harmful images, {hits} have a wrong label; by chance it would be about {WRONG * top:.0f}."
    )
    print(result.quality.sentence)
    print(f"The run is in {args.out}.")


if __name__ == "__main__":
    main()
