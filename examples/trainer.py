"""Value data sources with Hugging Face's Trainer: train on prose and code, and see which source helps with which.

    python examples/trainer.py            a few minutes
    python examples/trainer.py --small    some seconds

Nothing is downloaded: prose are the help texts that come with Python, code is source code of its library, and the model is
a tiny GPT-2 made from its configuration. With your own model and data, only the line with BackstoryCallback is new.
"""

import argparse
import inspect
import pydoc_data.topics
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import backstory
from backstory import insight
from backstory.demo.data import Bytes, Document, cut
from backstory.integrations.huggingface import BackstoryCallback

LENGTH = 64  # bytes in a passage


def losses(model, tokens):
    """One loss per passage, the mean over its bytes."""
    logits = model(input_ids=tokens).logits[:, :-1].transpose(1, 2)
    return torch.nn.functional.cross_entropy(logits, tokens[:, 1:], reduction="none").mean(1)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--small", action="store_true", help="fewer passages")
    options.add_argument("--out", type=Path, default=Path("runs/trainer"), help="folder for the run")
    args = options.parse_args()

    torch.manual_seed(0)
    texts = {"prose": "\n".join(pydoc_data.topics.topics.values()), "code": inspect.getsource(inspect)}
    passages = cut([Document("text", source, text) for source, text in texts.items()], Bytes(), LENGTH)
    order = torch.randperm(len(passages.ids))
    of = {s: [i for i in order.tolist() if passages.sources[i] == s] for s in texts}
    count = 120 if args.small else 1000
    chosen = [i for some in of.values() for i in some[:count]]
    data = [
        {"sample_id": passages.ids[i], "input_ids": passages.tokens[i], "labels": passages.tokens[i]} for i in chosen
    ]

    size = dict(n_layer=1, n_embd=16, n_head=2) if args.small else dict(n_layer=2, n_embd=96, n_head=4)
    size |= dict(vocab_size=256, n_positions=LENGTH, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(GPT2Config(**size))
    settings = TrainingArguments(
        str(args.out.with_suffix(".trainer")), num_train_epochs=2, per_device_train_batch_size=16, learning_rate=3e-3,
        lr_scheduler_type="cosine", save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    recording = BackstoryCallback(args.out, loss_reduction="token-mean")
    Trainer(model, settings, train_dataset=data, callbacks=[recording]).train()

    run = backstory.open(args.out)
    run.describe([passages.ids[i] for i in chosen], source=[passages.sources[i] for i in chosen])
    queries = {source: passages.tokens[some[count : count + 32]] for source, some in of.items()}  # unseen passages
    result = insight.sources(run, model, losses, queries)
    print(f"\nTrained on {count} passages of prose and {count} of code, {run.n_steps} steps.\n")
    for row in result.cells:
        for value in row:
            interval = f"{value.low:+.3f} to {value.high:+.3f}"
            print(
                f"{value.source:5} for unseen {value.domain:5}: {value.value:+.3f} nats per byte ({interval}), {value.words}"
            )
    print("\nPositive: without this source, the loss would be higher.")
    print(result.quality.sentence)


if __name__ == "__main__":
    main()
